"""How `quire generate` writes answers: text for people, one JSON object per line for programs."""

import json
from collections.abc import Callable
from typing import Any, Literal, TextIO

from quire.cli.jobs import Chat, Job
from quire.core.outputs import CompletionOutput, RequestOutput

Format = Literal["text", "jsonl"]


def write_result(stream: TextIO, output_format: Format, job: Job, output: RequestOutput) -> None:
    """Write one finished request."""
    _WRITERS[output_format](stream, job, output)
    stream.flush()


def _write_text(stream: TextIO, job: Job, output: RequestOutput) -> None:
    """Write each answer's text and a line end."""
    for completion in output.outputs:
        stream.write(completion.text + "\n")


def _write_jsonl(stream: TextIO, job: Job, output: RequestOutput) -> None:
    """Write one line: the job's id, the prompt as it was given, counts, and the answers."""
    record: dict[str, Any] = {} if job.job_id is None else {"id": job.job_id}
    record |= _prompt_record(job)
    record["num_prompt_tokens"] = len(output.prompt_token_ids)
    record["outputs"] = [_completion_record(completion) for completion in output.outputs]
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = _logprobs_record(output.prompt_logprobs)
    stream.write(_json_text(record, stream.encoding or "utf-8") + "\n")


def _json_text(record: dict[str, Any], encoding: str) -> str:
    """Return JSON, with escapes if `encoding` lacks a character: half a surrogate pair in an id, say."""
    text = json.dumps(record, ensure_ascii=False)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(record)
    return text


def _prompt_record(job: Job) -> dict[str, Any]:
    """Return the prompt under the name that it has in the input."""
    if isinstance(job.prompt, Chat):
        return {"messages": job.prompt.messages}
    return {"prompt" if isinstance(job.prompt, str) else "prompt_token_ids": job.prompt}


def _completion_record(completion: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        record["cumulative_logprob"] = completion.cumulative_logprob
        record["logprobs"] = _logprobs_record(completion.logprobs)
    return record


def _logprobs_record(positions: list[Any]) -> list[list[dict[str, Any]] | None]:
    """Return, per position, the reported tokens; None where the model had nothing to predict from."""
    return [
        None
        if position is None
        else [
            {"token_id": token_id, "logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token_id, entry in position.items()
        ]
        for position in positions
    ]


_WRITERS: dict[Format, Callable[[TextIO, Job, RequestOutput], None]] = {"text": _write_text, "jsonl": _write_jsonl}
