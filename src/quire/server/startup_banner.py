"""Startup banner on stdout: the model, its memory and limits, and the server's address."""

import contextlib
import io
import sys
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table

from quire.core.host_limits import Cpus, Memory, find_cpus, find_memory, format_bytes

if TYPE_CHECKING:
    from quire.engine.messages import Ready


def print_banner(
    name: str, url: str, ready: "Ready", stream: TextIO | None = None, *, has_tokenizer: bool = True,
    num_engines: int = 1,
) -> None:
    """Print the table and the ready line to `stream`, by default stdout.

    Write errors (closed pipe, full device) are ignored: the server serves all the same.
    """
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for row in _rows(name, ready):
        table.add_row(*row)
    for row in host_rows(find_cpus(), find_memory()):
        table.add_row(*row)
    if num_engines > 1:
        table.add_row("engines", f"{num_engines}, each with the weights, KV cache and swap above")
    if not has_tokenizer:
        table.add_row("tokenizer", "none: prompts must be token ids")
    printed = io.StringIO()  # a capturing console would write to its stream too
    Console(file=printed, width=Console().width, highlight=False, markup=False, emoji=False).print(table)
    out = sys.stdout if stream is None else stream
    with contextlib.suppress(OSError):
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="replace")  # the name may have characters that the terminal cannot show
        out.write(f"{printed.getvalue()}Quire is serving {name} on {url}\n")  # one write: no log line comes between
        out.flush()


def host_rows(cpus: Cpus, memory: Memory) -> list[tuple[str, str]]:
    """Return the rows of what this host, or container, has; of its memory only where that is limited."""
    rows = [("CPUs", str(cpus))]
    if memory.limit_bytes is not None:
        limit = f"of a limit of {format_bytes(memory.limit_bytes)} (cgroup)"
        rows.append(("memory", f"{format_bytes(memory.free_bytes)} free {limit}"))
    return rows


def _rows(name: str, ready: "Ready") -> list[tuple[str, str]]:
    limits = ready.limits
    blocks_each, num_fitting = -(-limits.max_model_len // limits.block_size), limits.max_num_seqs
    if limits.num_blocks:
        num_fitting = min(limits.num_blocks // blocks_each, num_fitting)
    return [
        ("model", name),
        ("weights", f"{format_bytes(ready.weights_bytes)}, {ready.num_parameters:,} parameters of {ready.dtype}"),
        *([("quantization", ready.quantization)] if ready.quantization else []),
        *([("pooling", str(ready.pooler))] if ready.pooler is not None else []),
        ("device", ready.device),
        ("KV cache", _blocks(limits.num_blocks, ready) + (ready.kv_cache_dtype and f" in {ready.kv_cache_dtype}")),
        ("swap", _blocks(ready.num_swap_blocks, ready) if ready.num_swap_blocks else "none"),
        ("longest request", f"{limits.max_model_len:,} tokens"),
        ("of that length", f"{num_fitting:,} at once"),
    ]


def _blocks(num_blocks: int, ready: "Ready") -> str:
    """Return a number of blocks with their tokens and bytes."""
    if num_blocks == 0:
        return "none: the model keeps no keys and values"
    num_tokens = num_blocks * ready.limits.block_size
    num_bytes = format_bytes(num_tokens * ready.kv_bytes_per_token)
    return f"{num_blocks:,} blocks of {ready.limits.block_size}: {num_tokens:,} tokens, {num_bytes}"
