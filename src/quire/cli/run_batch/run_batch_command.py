"""`quire run-batch`: a file of requests in OpenAI's batch form, answered to another file."""

import asyncio
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Annotated, BinaryIO, TextIO

import typer

from quire.cli.flag_groups import STANDARD_STREAM, check_output, flag, flag_field, with_config_file, with_flag_groups
from quire.cli.model_flags import OfflineOptions
from quire.cli.run_batch.lines import read_lines
from quire.core.errors import ConfigError
from quire.server.http.sockets import bind
from quire.server.options import DEFAULT_LIMITS, ServerOptions

MAX_INFLIGHT_PER_SEQ = 4


@dataclass(frozen=True, slots=True)
class BatchFlags:
    """Bounds of a batch, and the names of the model."""

    max_inflight: int | None = flag_field(
        None, "lines that are asked at a time", panel="Batch", show_default="4 times --max-num-seqs",
        row="lines that are asked at a time, and held until the first of them is answered",
    )  # fmt: skip
    max_lines: int = flag_field(50_000, "lines of the input", panel="Batch", row="lines of the input; more end the run")
    max_line_bytes: int = flag_field(
        DEFAULT_LIMITS.max_body_bytes, "longest line", panel="Batch",
        row="longest line; a longer one is answered with an error",
    )  # fmt: skip
    served_model_name: list[str] = flag_field(
        [], "the model's name in the lines (repeatable)", panel="Batch", metavar="NAME",
        show_default="the model's path or id", row="name of the model in the lines; repeatable",
    )  # fmt: skip
    enable_metrics: bool = flag_field(
        False, "serve the metrics of the run to Prometheus", panel="Batch",
        row="while the batch runs, `GET /metrics` is answered on a port",
    )  # fmt: skip
    url: str = flag_field(
        "127.0.0.1", "address of the metrics", panel="Batch", metavar="HOST",
        row="address of the metrics: a name or an IP address of this machine",
    )  # fmt: skip
    port: int = flag_field(8000, "port of the metrics", panel="Batch", row="port of the metrics", min=1, max=65535)

    def check(self) -> None:
        """Raise ConfigError for a bound below 1."""
        for name in ("max_inflight", "max_lines", "max_line_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")


@with_config_file
@with_flag_groups
def run_batch(
    engine: OfflineOptions,
    batch: BatchFlags,
    input_file: Annotated[Path, flag("requests, a JSON object per line", "--input-file", "-i", metavar="FILE|-")],
    output_file: Annotated[
        Path, flag("where answers go, in the order of the lines", "--output-file", "-o", metavar="FILE|-",
                   callback=check_output)
    ],
) -> None:  # fmt: skip
    """Answer a file of requests, in the form of OpenAI's batches."""
    batch.check()
    if input_file == output_file != STANDARD_STREAM:
        raise typer.BadParameter("the output would replace the input")
    from quire.cli.run_batch.runner import run  # noqa: PLC0415 (loads the HTTP server)

    max_inflight = batch.max_inflight or MAX_INFLIGHT_PER_SEQ * engine.resolved_max_num_seqs
    with ExitStack() as files:
        lines = read_lines(_input(input_file, files), batch.max_line_bytes, batch.max_lines)
        output = _output(output_file, files)
        listener = files.enter_context(bind(batch.url, batch.port)) if batch.enable_metrics else None
        totals = asyncio.run(run(engine, _options(batch, max_inflight), lines, output, max_inflight, listener))
    print(f"{totals.num_lines} lines answered, {totals.num_failed} of them with an error", file=sys.stderr)  # noqa: T201
    if totals.num_malformed:
        print(f"{totals.num_malformed} lines are malformed: they have no custom_id", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1)


def _options(batch: BatchFlags, max_inflight: int) -> ServerOptions:
    """Return the settings of the application: its bounds on waiting requests are those of the batch."""
    return ServerOptions(
        host=batch.url,
        served_model_name=tuple(batch.served_model_name),
        max_queued_requests=max(max_inflight, DEFAULT_LIMITS.max_queued_requests),
        max_queued_tokens=DEFAULT_LIMITS.max_queued_tokens * max_inflight,
        max_body_bytes=batch.max_line_bytes,
        max_total_body_bytes=4 * batch.max_line_bytes * max_inflight,
        max_pinned_prefixes=0,
    )


def _input(path: Path, files: ExitStack) -> BinaryIO:
    """Return the input: not `sys.stdin.buffer`, whose lock the interpreter's end needs and a waiting reader has."""
    is_standard = path == STANDARD_STREAM
    buffer = BufferedReader(FileIO(sys.stdin.fileno(), closefd=False) if is_standard else path.open("rb", buffering=0))
    files.callback(_close_below, buffer)
    return buffer


def _close_below(buffer: "BufferedReader[FileIO]") -> None:
    """Close the file below a buffer. Closing the buffer itself would wait for the thread that reads."""
    buffer.raw.close()


def _output(path: Path, files: ExitStack) -> TextIO:
    return sys.stdout if path == STANDARD_STREAM else files.enter_context(path.open("w", encoding="utf-8"))
