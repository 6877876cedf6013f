"""Workloads: lists of prompts and output lengths, from a seed or from a file, and traces with arrival times.

Prompts are token ids and answers have a fixed length (greedy, end-of-sequence ignored), so that every engine and every
run does the same work. Where a file gives only lengths, the prompts are random token ids.

CSV: columns `arrival_s,prompt_tokens,output_tokens`. JSON lines: `timestamp` (ms), `input_length`, `output_length` and
`hash_ids`, one id for each 512 tokens of the prompt: prompts that begin with the same ids begin with the same tokens.
"""

import csv
import gzip
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, islice
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO, TypeVar, cast

import msgspec
import numpy as np

from quire.core.errors import ConfigError

_LENGTH_COLUMNS = (  # lengths of prompts and outputs; `_plain`: without a template around the prompt
    ("prompt_tokens", "output_tokens"), ("prompt_plain_tokens", "output_tokens"), ("source_tokens", "target_tokens"),
)  # fmt: skip
_TURN_COLUMNS = {"conversation", "turn", "role", "tokens"}

NO_LIMIT = 2**31  # tokens
Lengths = tuple[int, int]
Record = TypeVar("Record")
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request: prompt, number of output tokens, and in a trace its arrival."""

    prompt_token_ids: list[int]
    output_len: int
    arrival_s: float | None = None
    client_id: str = ""


class _TokenIds(msgspec.Struct):
    """One request of a JSON file."""

    prompt: Annotated[list[int], msgspec.Meta(min_length=1)]
    n_out: int


def random_workload(num_prompts: int, input_len: int, output_len: int, vocab_size: int, seed: int) -> list[WorkItem]:
    """Return prompts of random tokens, all of one length."""
    return with_random_prompts([(input_len, output_len)] * num_prompts, vocab_size, seed)


def token_id_workload(path: Path, name: str | None, num_prompts: int | None) -> list[WorkItem]:
    """Return the first `num_prompts` requests of a JSON file: a list of {"prompt": [ids], "n_out": int}, or several.

    Raises ConfigError when the file or `name` does not fit.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[_TokenIds] | dict[str, list[_TokenIds]])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f'{path} must hold requests {{"prompt": [token ids], "n_out": int}}: {error}') from error
    if isinstance(found, dict):
        if name not in found:
            names = ", ".join(found) or "none"
            raise ConfigError(f"{path} holds the workloads {names}; choose one with --name, got {name!r}")
        found = found[name]
    elif name is not None:
        raise ConfigError(f"{path} holds one workload without a name, got --name {name!r}")
    if not found:
        raise ConfigError(f"{path} must hold a list of requests that is not empty")
    return [WorkItem(request.prompt, request.n_out) for request in found[:num_prompts]]


def length_workload(
    path: Path, num_prompts: int | None, max_total_len: int, vocab_size: int, seed: int
) -> list[WorkItem]:
    """Return random prompts with lengths from a CSV file (plain or .gz), a seeded sample of `num_prompts` of its rows.

    Columns `prompt_tokens,output_tokens` (or as `read_lengths` knows them), or `conversation,turn,role,tokens`: of each
    conversation that begins with a human turn and its answer, these two. Rows with a length of 0 or above
    `max_total_len` in all are left out.
    """
    lengths = fitting(read_lengths(path), path.name, max_total_len)
    if num_prompts is not None and num_prompts < len(lengths):
        chosen = np.random.default_rng(seed).choice(len(lengths), size=num_prompts, replace=False)
        lengths = [lengths[i] for i in sorted(chosen)]
    return with_random_prompts(lengths, vocab_size, seed)


def fitting(rows: Iterable[Lengths], name: str, max_total_len: int) -> list[Lengths]:
    """Return the lengths without those of 0 or above the limit in all. Raises ConfigError if none is left."""
    lengths = [pair for pair in rows if min(pair) >= 1 and sum(pair) <= max_total_len]
    if not lengths:
        raise ConfigError(f"{name} has no row with both lengths at least 1 and at most {max_total_len} tokens in all")
    return lengths


def renewed(items: list[WorkItem], count: int, first_round: int) -> list[WorkItem]:
    """Return `count` requests like `items`, over and over, with other tokens in every round.

    Round r moves every id up by r, around among the ids that there are. So no request finds an earlier one's prompt in
    a prefix cache, and those of one round that share a prefix still do.
    """
    num_ids = 1 + max(max(item.prompt_token_ids) for item in items)
    return [
        replace(item, prompt_token_ids=[(token + first_round + i // len(items)) % num_ids
                                        for token in item.prompt_token_ids])
        for i, item in zip(range(count), cycle(items), strict=False)
    ]


def open_text(path: Path) -> TextIO:
    """Open a text file, plain or .gz."""
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, "rt", encoding="utf-8"))
    return path.open(encoding="utf-8")


def with_random_prompts(lengths: list[Lengths], vocab_size: int, seed: int) -> list[WorkItem]:
    """Return requests of these lengths with random tokens."""
    generator = np.random.default_rng(seed)
    return [
        WorkItem(generator.integers(vocab_size, size=input_len).tolist(), output_len)
        for input_len, output_len in lengths
    ]


def read_lengths(path: Path) -> list[Lengths]:
    """Return all (prompt, output) lengths of a CSV file, by the columns that it has; of conversations their beginnings.

    Raises ConfigError for other columns, and with the line for what is no number.
    """
    columns = read_header(path)
    for names in _LENGTH_COLUMNS:
        if columns >= set(names):
            return read_columns(path, **dict.fromkeys(names, int))
    if columns >= _TURN_COLUMNS:
        return list(_first_turns(read_columns(path, conversation=int, turn=int, tokens=int, role=str)))
    raise ConfigError(
        f"{path} needs the columns prompt_tokens,output_tokens or conversation,turn,role,tokens, "
        f"has {','.join(sorted(columns)) or 'none'}"
    )


def read_header(path: Path) -> set[str]:
    """Return the columns of a CSV file by its first line. Raises ConfigError for a file that is no text."""
    rows = read_records(path, lambda lines: islice(csv.reader(lines), 1), set[str])
    return rows[0] if rows else set()


def read_columns(path: Path, **columns: Callable[[str], Any]) -> list[Any]:
    """Return some columns of a CSV file, one tuple for each row, each value converted.

    Raises ConfigError that names the file, the line and the column where that cannot be.
    """
    return read_records(path, csv.DictReader, lambda record: tuple(converted(record, columns)))


def converted(record: dict[str, str], columns: Mapping[str, Callable[[str], Any]]) -> Iterator[Any]:
    """Yield some columns of a row, each converted. Raises ValueError for what is not there or cannot be."""
    for name, convert in columns.items():
        try:
            yield convert(record[name])
        except (KeyError, TypeError, ValueError):
            kind = "an integer" if convert is int else "a number" if convert is float else "there"
            raise ValueError(f"{name} must be {kind}, got {record.get(name)!r}") from None


def read_records(
    path: Path, split: Callable[[Iterator[str]], Iterable[Record]], convert: Callable[[Record], Row]
) -> list[Row]:
    """Return what `convert` makes of the records of a text file, plain or .gz, into which `split` cuts its lines.

    Raises ConfigError that names the line of the first record that cannot be.
    """
    numbers = count(1)
    try:
        with open_text(path) as file:
            return [convert(record) for record in split(line for line, _ in zip(file, numbers, strict=False))]
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no text, or no gzip file: {error}") from error
    except (csv.Error, ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}, line {next(numbers) - 1}: {error}") from error


def _first_turns(turns: Iterable[tuple[int, int, int, str]]) -> Iterator[Lengths]:
    """Yield the lengths of each conversation's first two turns where a human asks and the model answers."""
    asked: dict[int, int] = {}
    for conversation, turn, num_tokens, role in turns:
        if turn == 0 and role == "human":
            asked[conversation] = num_tokens
        if turn == 1 and role == "gpt" and conversation in asked:
            yield asked[conversation], num_tokens


ArrivalKind = Literal["trace", "poisson", "burst", "closed"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Due time of each request, in order, and the most that may be open at once.

    Without due times it is a closed loop: `max_open` clients, each asking anew when it is answered.
    """

    due_s: list[float] | None
    max_open: int

    @property
    def offered_rps(self) -> float | None:
        """Requests per second that are due; None for a burst, a single request and a closed loop."""
        if not self.due_s or self.due_s[-1] == self.due_s[0]:
            return None
        return (len(self.due_s) - 1) / (self.due_s[-1] - self.due_s[0])


def poisson_arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return times with gaps of mean 1 / rate, the first at 0.

    `burstiness` is the shape of the gaps' gamma distribution: 1 is Poisson's process, less is burstier (coefficient of
    variation 1 / sqrt(shape)), more is steadier. The gaps drawn are scaled to exactly that mean: ten
    requests could otherwise have half the rate asked for, or twice.
    """
    gaps = np.random.default_rng(seed).standard_gamma(burstiness, size=count)
    times = np.cumsum(gaps) - gaps[0]
    if times[-1] > 0:
        times *= (count - 1) / (rate * times[-1])
    return times.tolist()  # type: ignore[no-any-return]


def trace_arrivals(items: Sequence[WorkItem]) -> list[float]:
    """Return the workload's own times. Raises ConfigError when it is no trace."""
    times = [item.arrival_s for item in items if item.arrival_s is not None]
    if len(times) != len(items):
        raise ConfigError("arrivals trace needs a workload with arrival times: a .jsonl file, or a .csv with arrival_s")
    return times


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
