"""HTML of outputs and statistics for notebooks. Text of a model is text in it, never HTML, and it has no scripts."""

import sys
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.core.outputs import CompletionOutput, KVStats, RequestOutput

MAX_CHARS = 20_000   # a prompt's or an answer's
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;text-align:left;margin:.4em 0"
_USED, _CACHED, _FREE = "#2f6f9f", "#8fb8d6", "rgba(128,128,128,.25)"


def is_watched() -> bool:
    """Return whether a person sees standard error as it is written: on a terminal, or in a notebook's cell."""
    return sys.stderr.isatty() or is_notebook()


def is_notebook() -> bool:
    """Return whether standard error is that of a notebook."""
    return type(sys.stderr).__module__.startswith("ipykernel.")


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values, both as text."""
    head = "<th style='text-align:left'>"
    lines = "".join(f"<tr>{head}{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{lines}</table>"


def html_of_cache(stats: "KVStats") -> str:
    """Return a bar of the blocks in use, cached and free, and a table of the figures."""
    parts = (
        ("in use", stats.used_blocks, _USED), ("cached", stats.cached_blocks, _CACHED),
        ("free", stats.free_blocks, _FREE),
    )  # fmt: skip
    spans = "".join(
        f"<span title='{name}' style='flex:{blocks};background:{colour}'></span>" for name, blocks, colour in parts
    )
    bar = f"<div style='display:flex;height:1.2em;max-width:40em;border:1px solid'>{spans}</div>"
    hits = stats.prefix_hits_tokens / max(stats.prefix_queries_tokens, 1)
    rows = [
        *((f"blocks {name}", f"{blocks:,} of {stats.total_blocks:,}") for name, blocks, _ in parts),
        ("tokens of a block", f"{stats.block_size}"),
        ("sequences", f"{stats.num_sequences:,}"),
        ("shared blocks", f"{stats.shared_blocks:,}"),
        ("pinned blocks", f"{stats.pinned_blocks:,}"),
        ("slots in use without a token", f"{stats.tail_waste_ratio:.1%}"),
        ("prompt tokens found in the cache", f"{stats.prefix_hits_tokens:,} ({hits:.0%})"),
        ("preemptions", f"{sum(stats.preemptions.values()):,}"),
    ]
    if stats.swap_total_blocks:
        rows.append(("blocks of the swap space in use", f"{stats.swap_used_blocks:,} of {stats.swap_total_blocks:,}"))
    return bar + table(rows)


def html_of_request(output: "RequestOutput") -> str:
    """Return the prompt, each answer, and below them tokens and times."""
    prompt = f"{len(output.prompt_token_ids):,} token ids" if output.prompt is None else output.prompt
    answers = "".join(_answer(each, output.outputs) for each in output.outputs)
    figures = [f"{len(output.prompt_token_ids):,} prompt tokens, {output.num_cached_tokens:,} of them cached"]
    metrics, num_tokens = output.metrics, sum(len(each.token_ids) for each in output.outputs)
    if metrics is not None and metrics.first_token_s is not None:
        figures.append(f"first token after {metrics.first_token_s - metrics.arrival_s:.3f} s")
        if metrics.finished_s is not None and metrics.finished_s > metrics.arrival_s:
            rate = num_tokens / (metrics.finished_s - metrics.arrival_s)
            figures.append(f"{num_tokens:,} output tokens, {rate:,.1f} per second")
    return (
        f"<div><pre style='{_TEXT};opacity:.7'>{_shown(prompt)}</pre>{answers}"
        f"<small>{escape(' · '.join(figures))}</small></div>"
    )


def _answer(answer: "CompletionOutput", outputs: Sequence["CompletionOutput"]) -> str:
    reason = "not finished" if answer.finish_reason is None else f"ended by {answer.finish_reason}"
    number = f"answer {answer.index} · " if len(outputs) > 1 else ""
    about = f"{number}{len(answer.token_ids):,} tokens · {reason}"
    has_text = answer.text or not answer.token_ids
    text = _shown(answer.text if has_text else f"token ids {answer.token_ids}")
    style = f"{_TEXT};border-left:3px solid {_USED};padding-left:.8em"
    return f"<pre style='{style}'>{text}</pre><small>{about}</small><br>"


def _shown(text: str) -> str:
    """Return a text as HTML, cut at MAX_CHARS."""
    more = f"\n... {len(text) - MAX_CHARS:,} more characters" if len(text) > MAX_CHARS else ""
    return escape(text[:MAX_CHARS] + more)
