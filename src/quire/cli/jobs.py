"""Input and output of `quire generate`: JSON lines in, JSON lines or text out.

A line is an object with exactly one of `prompt` (text), `prompt_token_ids` (a list of integers) and `messages` (a chat:
objects with `role` and `content`), an `id` that the answer repeats, and any field of `SamplingParams`, which wins over
the command line. All lines are read before anything runs.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from typing import Any, Literal, Self, TextIO

from quire.core.checks import check_token_ids
from quire.core.errors import InvalidRequestError
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.sampling_params import SamplingParams

Format = Literal["text", "jsonl"]
_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class Job:
    """One request before it meets a model: what to continue, and how."""

    prompt: Any  # text, token ids or messages, by `field`
    params: SamplingParams
    field: str = "prompt"
    job_id: str | int | None = None
    source: str = "the prompt"  # for errors: its source
    given: frozenset[str] = frozenset()  # the parameters that its line names

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """Return the job with defaults of the model for what its line leaves out."""
        unset = {name: value for name, value in defaults.items() if name not in self.given}
        try:
            return replace(self, params=replace(self.params, **unset))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{self.source}: {error}", param=error.param) from error


def read_jobs(lines: Iterable[str], params: SamplingParams, file_name: str) -> list[Job]:
    """Return a job per line that is not blank. Raises InvalidRequestError that names the file and the line."""
    jobs = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            source = f"{file_name}, line {number}"
            try:
                jobs.append(_read_job(line, params, source))
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{source}: {error}", param=error.param) from error
    return jobs


def _read_job(line: str, params: SamplingParams, source: str) -> Job:
    """Return the line's job. Raises InvalidRequestError without the line's number."""
    record = _load_object(line)
    given = [name for name in _PROMPT_FIELDS if name in record]
    if len(given) != 1:
        raise InvalidRequestError(f"needs exactly one of {', '.join(_PROMPT_FIELDS)}, has {', '.join(given) or 'none'}")
    [field] = given
    prompt = _check_prompt(field, record.pop(field))
    job_id = record.pop("id", None)
    if job_id is not None and not isinstance(job_id, str | int):
        raise InvalidRequestError(f"id must be a string or an integer, got a {type(job_id).__name__}", param="id")
    unknown = record.keys() - _SAMPLING_FIELDS
    if unknown:
        raise InvalidRequestError(f"unknown field {min(unknown)!r}", param=min(unknown))
    return Job(prompt, replace(params, **record), field, job_id, source, frozenset(record))


def _load_object(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise InvalidRequestError(f"expected an object, got a {type(record).__name__}")
    return record


def _check_prompt(field: str, value: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return the prompt if it has the form that its field's name promises."""
    if field == "prompt_token_ids":
        return list(check_token_ids(field, value))
    if field == "prompt":
        is_sound, expected = isinstance(value, str), "a string"
    else:
        is_sound = isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
        expected = "a list of objects that is not empty"
    if not is_sound:
        raise InvalidRequestError(f"{field} must be {expected}, got a {type(value).__name__}", param=field)
    return value


def write_answer(stream: TextIO, output_format: Format, job: Job, output: RequestOutput) -> None:
    """Write a finished request: each answer's text, or a line with id, prompt as it was given, counts and answers."""
    if output_format == "text":
        stream.writelines(completion.text + "\n" for completion in output.outputs)
    else:
        record: dict[str, Any] = {} if job.job_id is None else {"id": job.job_id}
        record |= {job.field: job.prompt, "num_prompt_tokens": len(output.prompt_token_ids)}
        record["outputs"] = [_completion_record(completion) for completion in output.outputs]
        if output.prompt_logprobs is not None:
            record["prompt_logprobs"] = _logprobs_record(output.prompt_logprobs)
        if output.prompt_token_id_logprobs is not None:
            scores = output.prompt_token_id_logprobs.tolist()
            record["prompt_token_id_logprobs"] = [[each if isfinite(each) else None for each in row] for row in scores]
        stream.write(_json_text(record, stream.encoding or "utf-8") + "\n")
    stream.flush()


def _json_text(record: dict[str, Any], encoding: str) -> str:
    """Return JSON, with escapes if `encoding` lacks a character: half a surrogate pair in an id, say."""
    text = json.dumps(record, ensure_ascii=False)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(record)
    return text


def _completion_record(completion: CompletionOutput) -> dict[str, Any]:
    names = ("index", "text", "token_ids", "finish_reason", "stop_reason")
    record = {name: getattr(completion, name) for name in names}
    if completion.logprobs is not None:
        record["cumulative_logprob"] = completion.cumulative_logprob
        record["logprobs"] = _logprobs_record(completion.logprobs)
    return record


def _logprobs_record(positions: Iterable[Any]) -> list[list[dict[str, Any]] | None]:
    """Return, per position, the reported tokens; None where the model had nothing to predict from."""
    return [
        None if position is None else [{"token_id": token} | asdict(entry) for token, entry in position.items()]
        for position in positions
    ]
