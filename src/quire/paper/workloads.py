"""Workloads: lists of prompts and output lengths, from a seed or from a file.

Prompts are token ids and answers have a fixed length (greedy, end-of-sequence ignored), so that every engine and every
run does the same work. Where a file gives only lengths, the prompts are random token ids.
"""

import csv
import gzip
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np

from quire.core.errors import ConfigError

_LENGTH_COLUMNS = {"prompt_tokens", "output_tokens"}
_TURN_COLUMNS = {"conversation", "turn", "role", "tokens"}

Lengths = tuple[int, int]


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request: what is asked, how many tokens it is answered with, and in a trace when it comes."""

    prompt_token_ids: list[int]
    output_len: int
    arrival_s: float | None = None


def random_workload(num_prompts: int, input_len: int, output_len: int, vocab_size: int, seed: int) -> list[WorkItem]:
    """Return prompts of random tokens, all of one length."""
    return with_random_prompts([(input_len, output_len)] * num_prompts, vocab_size, seed)


def token_id_workload(path: Path, name: str | None, num_prompts: int | None) -> list[WorkItem]:
    """Return the first `num_prompts` requests of a JSON file: a list of {"prompt": [ids], "n_out": int}, or several.

    Raises ConfigError when the file or `name` does not fit.
    """
    content = _load_json(path)
    if isinstance(content, dict):
        if name not in content:
            raise ConfigError(f"{path} holds the workloads {', '.join(content)}; choose one with --name, got {name!r}")
        content = content[name]
    elif name is not None:
        raise ConfigError(f"{path} holds one workload without a name, got --name {name!r}")
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{path} must hold a list of requests that is not empty")
    return [_work_item(path, record) for record in content[:num_prompts]]


def length_workload(
    path: Path, num_prompts: int | None, max_total_len: int, vocab_size: int, seed: int
) -> list[WorkItem]:
    """Return random prompts with lengths from a CSV file (plain or .gz), a seeded sample of `num_prompts` of its rows.

    Columns `prompt_tokens,output_tokens`, or `conversation,turn,role,tokens`: of each conversation that begins with a
    human turn and its answer, these two. Rows with a length of 0 or above `max_total_len` in all are left out.
    """
    lengths = [pair for pair in read_lengths(path) if min(pair) >= 1 and sum(pair) <= max_total_len]
    if not lengths:
        raise ConfigError(f"{path} has no row with both lengths at least 1 and at most {max_total_len} tokens in all")
    if num_prompts is not None and num_prompts < len(lengths):
        chosen = np.random.default_rng(seed).choice(len(lengths), size=num_prompts, replace=False)
        lengths = [lengths[i] for i in sorted(chosen)]
    return with_random_prompts(lengths, vocab_size, seed)


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


def _load_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error


def _work_item(path: Path, record: Any) -> WorkItem:  # noqa: ANN401 (JSON)
    """Return one request of a JSON workload. Raises ConfigError when a field is missing or of another type."""
    try:
        prompt, output_len = record["prompt"], record["n_out"]
        is_sound = bool(prompt) and all(type(token) is int for token in prompt) and type(output_len) is int
    except (KeyError, TypeError):
        is_sound = False
    if not is_sound:
        raise ConfigError(f'{path} must hold requests of the form {{"prompt": [token ids], "n_out": int}}')
    return WorkItem(list(prompt), output_len)


def read_lengths(path: Path) -> list[Lengths]:
    """Return all (prompt, output) lengths of a CSV file, by the columns that it has; of conversations their beginnings.

    Raises ConfigError for other columns, and with the line for what is no number.
    """
    columns = _columns(path)
    if columns >= _LENGTH_COLUMNS:
        return read_columns(path, "prompt_tokens", "output_tokens")
    if columns >= _TURN_COLUMNS:
        return list(_first_turns(read_columns(path, "conversation", "turn", "tokens", text="role")))
    raise ConfigError(
        f"{path} needs the columns prompt_tokens,output_tokens or conversation,turn,role,tokens, "
        f"has {','.join(sorted(columns)) or 'none'}"
    )


def read_columns(path: Path, *names: str, text: str | None = None) -> list[Any]:
    """Return the integers in some columns of a CSV file, one tuple for each row, behind them one column of `text`.

    Raises ConfigError that names the file, the line and what is wrong there.
    """
    found = []
    with _reading(path), open_text(path) as lines:
        rows = csv.DictReader(lines)
        for row in rows:
            try:
                found.append((*(int(row[name]) for name in names), *(() if text is None else (row[text],))))
            except (LookupError, TypeError, ValueError) as error:
                raise ConfigError(f"{path}, line {rows.line_num}: a length that is no integer: {error}") from error
    return found


def _columns(path: Path) -> set[str]:
    with _reading(path), open_text(path) as lines:
        return set(next(csv.reader(lines), ()))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no CSV file: {error}") from error


def _first_turns(turns: Iterable[tuple[int, int, int, str]]) -> Iterator[Lengths]:
    """Yield the lengths of each conversation's first two turns where a human asks and the model answers."""
    asked: dict[int, int] = {}
    for conversation, turn, num_tokens, role in turns:
        if turn == 0 and role == "human":
            asked[conversation] = num_tokens
        if turn == 1 and role == "gpt" and conversation in asked:
            yield asked[conversation], num_tokens
