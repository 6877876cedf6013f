"""Grammars that limit the number of reasoning tokens of an output, and constrain nothing else."""

from collections.abc import Mapping


def bounded_reasoning(end: int, start: int | None, max_tokens: int) -> str:
    """Return the grammar of any output with at most `max_tokens` tokens of reasoning before the token `end`.

    `start`: token that begins reasoning; an output with another first token has none. None: the output begins with
    reasoning. An output may end during reasoning, before the limit.
    """
    other, rest = f"<[^{end}]>", "<[*]>*"
    whole = f"<[{end}]> {rest}"
    if max_tokens > 0:
        ended = f"{other}{{0,{max_tokens - 1}}}" if max_tokens > 1 else '""'
        whole = f"{ended} | {other}{{0,{max_tokens}}} {whole}"
    if start is None:
        return f"start: {whole}\n"
    return f'start: "" | <[^{start}]> {rest} | <[{start}]> reasoning\nreasoning: {whole}\n'


def marker_id(text: str, special: Mapping[str, int]) -> int | None:
    """Return the id of a marker that is one special token, whatever spaces are around it; None for other markers."""
    return special.get(text.strip())
