"""Traces: requests with their arrival times, from Azure's CSV or Mooncake's JSON lines, plain or .gz.

CSV: columns `arrival_s,prompt_tokens,output_tokens`. JSON lines: `timestamp` (ms), `input_length`, `output_length` and
`hash_ids`, one id for each 512 tokens of the prompt: prompts that begin with the same ids begin with the same tokens.
"""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from quire.core.errors import ConfigError
from quire_lab.sim.workloads import WorkItem, converted, read_header, read_records

_COLUMNS: dict[str, Callable[[str], Any]] = {"arrival_s": float, "prompt_tokens": int, "output_tokens": int}
HASH_SPAN = 512  # tokens of one of Mooncake's hash ids


class TraceRow(msgspec.Struct):
    """One request of a trace. Raises ValueError for a time that is none, or hash ids short of the prompt's end."""

    arrival_s: float = msgspec.field(name="timestamp")
    input_len: int = msgspec.field(name="input_length")
    output_len: int = msgspec.field(name="output_length")
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]] = []  # empty: nothing is known of the prompt

    def __post_init__(self) -> None:
        if not math.isfinite(self.arrival_s):
            raise ValueError(f"arrival_s must be a time, got {self.arrival_s}")
        if self.hash_ids and len(self.hash_ids) * HASH_SPAN < self.input_len:
            raise ValueError(
                f"{len(self.hash_ids)} hash ids of {HASH_SPAN} tokens do not cover {self.input_len} tokens"
            )


_decode = msgspec.json.Decoder(TraceRow).decode


@dataclass(frozen=True, slots=True)
class TraceSlice:
    """Part of a trace, and its speed-up."""

    num_prompts: int | None = None
    max_total_len: int = 2048
    start_s: float = 0.0
    speed_up: float = 1.0


def is_trace(path: Path) -> bool:
    """Return whether the file holds arrival times, by its name, and for CSV by its first line."""
    if not _is_csv(path):
        return path.name.endswith((".jsonl", ".jsonl.gz"))
    try:
        return read_header(path) >= set(_COLUMNS)
    except ConfigError:
        return False  # reading it as lengths will raise


def _is_csv(path: Path) -> bool:
    return path.name.endswith((".csv", ".csv.gz"))


def trace_workload(path: Path, part: TraceSlice, vocab_size: int, seed: int) -> list[WorkItem]:
    """Return the first requests from `start_s` on, the first at 0 s, later ones `speed_up` times sooner.

    Rows with a length of 0 or above `max_total_len` in all are left out. Raises ConfigError for a file of another form.
    """
    rows = [
        row
        for row in read_trace(path)
        if row.arrival_s >= part.start_s
        and min(row.input_len, row.output_len) >= 1
        and row.input_len + row.output_len <= part.max_total_len
    ][: part.num_prompts]
    if not rows:
        raise ConfigError(
            f"{path} has no row from {part.start_s} s on with both lengths at least 1 and at most "
            f"{part.max_total_len} tokens in all"
        )
    begin_s = rows[0].arrival_s
    return [
        WorkItem(_prompt(row, number, vocab_size, seed), row.output_len, (row.arrival_s - begin_s) / part.speed_up)
        for number, row in enumerate(rows)
    ]


def _prompt(row: TraceRow, number: int, vocab_size: int, seed: int) -> list[int]:
    """Return random tokens: of the row alone, or in spans that depend on their hash id alone."""
    if not row.hash_ids:
        return _random_tokens((seed, number), row.input_len, vocab_size)
    spans = [_random_tokens((seed, hash_id), HASH_SPAN, vocab_size) for hash_id in row.hash_ids]
    return [token for span in spans for token in span][: row.input_len]


def _random_tokens(seed: tuple[int, int], count: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(seed).integers(vocab_size, size=count).tolist()  # type: ignore[no-any-return]


def read_trace(path: Path) -> list[TraceRow]:
    """Return the rows in the order of their times. Raises ConfigError that names the line of the first bad row."""
    if _is_csv(path):
        rows = read_records(path, csv.DictReader, lambda record: TraceRow(*converted(record, _COLUMNS)))
    else:
        rows = read_records(path, lambda lines: filter(str.strip, lines), _of_json)
    return sorted(rows, key=attrgetter("arrival_s"))


def _of_json(line: str) -> TraceRow:
    row = _decode(line)
    row.arrival_s /= 1000  # timestamps are in milliseconds
    return row
