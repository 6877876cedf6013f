"""Traces: requests with the times at which they came, from Azure's CSV or Mooncake's JSON lines, plain or .gz.

CSV: columns `arrival_s,prompt_tokens,output_tokens`. JSON lines: `timestamp` (ms), `input_length`, `output_length` and
`hash_ids`, one id for each 512 tokens of the prompt: prompts that begin with the same ids begin with the same tokens.
"""

import csv
import gzip
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from operator import attrgetter
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from quire.core.errors import ConfigError
from quire.paper.workloads import WorkItem, open_text

_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
HASH_SPAN = 512  # tokens that one of Mooncake's hash ids stands for


class _JsonRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]] = []


class TraceRow(NamedTuple):
    """One request of a trace."""

    arrival_s: float
    input_len: int
    output_len: int
    hash_ids: list[int]  # empty: nothing is known of the prompt


_json_row = msgspec.json.Decoder(_JsonRow)


@dataclass(frozen=True, slots=True)
class TraceSlice:
    """Which part of a trace is asked for, and how fast."""

    num_prompts: int | None = None
    max_total_len: int = 2048
    start_s: float = 0.0
    speed_up: float = 1.0


def is_trace(path: Path) -> bool:
    """Whether the file holds arrival times, by its name, and for CSV by its first line."""
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return True
    if not path.name.endswith((".csv", ".csv.gz")):
        return False
    try:
        with open_text(path) as lines:
            return set(next(csv.reader(lines), ())) >= set(_COLUMNS)
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError):
        return False  # whoever reads it as lengths will tell


def trace_workload(path: Path, part: TraceSlice, vocab_size: int, seed: int) -> list[WorkItem]:
    """Return the first requests from `start_s` on, the first at 0 s, later ones `speed_up` times sooner.

    Rows with a length of 0 or above `max_total_len` in all are left out. Raises ConfigError for a file of another form.
    """
    fitting = (
        row
        for row in read_trace(path)
        if row.arrival_s >= part.start_s
        and min(row.input_len, row.output_len) >= 1
        and row.input_len + row.output_len <= part.max_total_len
    )
    rows = list(islice(fitting, part.num_prompts))
    if not rows:
        raise ConfigError(
            f"{path} has no row from {part.start_s} s on with both lengths at least 1 and at most "
            f"{part.max_total_len} tokens in all"
        )
    return [
        WorkItem(
            _prompt(row, number, vocab_size, seed),
            row.output_len,
            (row.arrival_s - rows[0].arrival_s) / part.speed_up,
        )
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
    rows: list[TraceRow] = []
    numbers = count(1)
    try:
        with open_text(path) as file:
            lines = (line for line, _ in zip(file, numbers, strict=False))
            rows.extend(_checked(row) for row in _rows_of(path, lines))
    except (EOFError, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is no gzip file: {error}") from error
    except (LookupError, TypeError, ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}, line {next(numbers) - 1}: {type(error).__name__}: {error}") from error
    return sorted(rows, key=attrgetter("arrival_s"))


def _rows_of(path: Path, lines: Iterable[str]) -> Iterator[TraceRow]:
    if path.name.endswith((".csv", ".csv.gz")):
        for record in csv.DictReader(lines):
            arrival_s, input_len, output_len = (record[column] for column in _COLUMNS)
            yield TraceRow(float(arrival_s), int(input_len), int(output_len), [])
    for line in lines:
        if line.strip():
            row = _json_row.decode(line)
            yield TraceRow(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)


def _checked(row: TraceRow) -> TraceRow:
    """Return the row. Raises ValueError for a time that is none, or hash ids that do not reach the prompt's end."""
    if not math.isfinite(row.arrival_s):
        raise ValueError(f"arrival_s must be a time, got {row.arrival_s}")
    if row.hash_ids and len(row.hash_ids) * HASH_SPAN < row.input_len:
        raise ValueError(f"{len(row.hash_ids)} hash ids of {HASH_SPAN} tokens do not cover {row.input_len} tokens")
    return row
