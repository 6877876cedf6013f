"""What `quire generate` is asked: one prompt, or the lines of a JSONL file. All is read before anything runs.

A line is an object with exactly one of `prompt` (text), `prompt_token_ids` (a list of integers) and `messages` (a chat:
objects with `role` and `content`), an `id` that the answer repeats, and any field of `SamplingParams`, which wins over
the command line.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from quire.core.checks import check_token_ids
from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import SamplingParams

_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt that the model's chat template makes into text."""

    messages: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Job:
    """One request before it meets a model: text, token ids or a chat, and how to continue it."""

    prompt: str | list[int] | Chat
    params: SamplingParams
    job_id: str | int | None = None
    source: str = "the prompt"  # for errors: where it came from


def read_jobs(lines: Iterable[str], params: SamplingParams, file_name: str) -> list[Job]:
    """Return a job per line that is not blank. Raises InvalidRequestError that names the file and the line."""
    return list(_parse_lines(lines, params, file_name))


def _parse_lines(lines: Iterable[str], params: SamplingParams, file_name: str) -> Iterator[Job]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            source = f"{file_name}, line {number}"
            try:
                yield _parse_line(line, params, source)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{source}: {error}", param=error.param) from error


def _parse_line(line: str, params: SamplingParams, source: str) -> Job:
    """Return the line's job. Raises InvalidRequestError without the line's number."""
    record = _load_object(line)
    prompts = [name for name in _PROMPT_FIELDS if name in record]
    if len(prompts) != 1:
        given = ", ".join(prompts) or "none"
        raise InvalidRequestError(f"needs exactly one of {', '.join(_PROMPT_FIELDS)}, has {given}")
    prompt = _check_prompt(prompts[0], record.pop(prompts[0]))
    job_id = record.pop("id", None)
    if job_id is not None and not isinstance(job_id, str | int):
        raise InvalidRequestError(f"id must be a string or an integer, got a {type(job_id).__name__}", param="id")
    return Job(prompt, _override(params, record), job_id, source)


def _load_object(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise InvalidRequestError(f"expected an object, got a {type(record).__name__}")
    return record


def _check_prompt(name: str, value: object) -> str | list[int] | Chat:
    """Return the prompt if it has the form that its field's name promises."""
    if name == "prompt" and isinstance(value, str):
        return value
    if name == "prompt_token_ids":
        return list(check_token_ids(name, value))
    if name == "messages" and isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return Chat(value)
    expected = "a string" if name == "prompt" else "a list of objects that is not empty"
    raise InvalidRequestError(f"{name} must be {expected}, got a {type(value).__name__}", param=name)


def _override(params: SamplingParams, fields_of_line: dict[str, Any]) -> SamplingParams:
    """Return `params` with the line's own values. Raises InvalidRequestError for an unknown field or a bad value."""
    unknown = fields_of_line.keys() - _SAMPLING_FIELDS
    if unknown:
        raise InvalidRequestError(f"unknown field {min(unknown)!r}", param=min(unknown))
    return replace(params, **fields_of_line)
