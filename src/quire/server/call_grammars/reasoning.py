"""Grammars that bound the reasoning of an output in tokens, and leave the rest to the model."""

from collections.abc import Mapping


def bounded_reasoning(end: int, start: int | None, max_tokens: int) -> str:
    """Return the grammar of any output of which at most `max_tokens` tokens of reasoning precede the token `end`.

    `start`: token that begins reasoning, as the first of the output, or there is none; None: the output begins inside.
    An output may end inside of its reasoning, before the bound.
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
