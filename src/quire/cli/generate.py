"""`quire generate`: one prompt, streamed to the terminal, or a file of prompts, to text or JSON lines.

A line of the file is an object with exactly one of `prompt` (text), `prompt_token_ids` (a list of integers) and
`messages` (a chat: objects with `role` and `content`), an `id` that the answer repeats, and any field of
`SamplingParams`, which wins over the command line. All lines are read before anything runs.
"""

import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TextIO

import typer

from quire.cli.flag_groups import STANDARD_STREAM, check_output, flag, with_config_file, with_flag_groups
from quire.cli.model_flags import BeamFlags, OfflineOptions, SamplingFlags, load, model_defaults
from quire.core.checks import check_token_ids
from quire.core.errors import InvalidRequestError
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.sampling_params import BeamSearchParams, SamplingParams, as_sampling_params

if TYPE_CHECKING:
    from quire.llm import LLM


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


@with_config_file
@with_flag_groups
def generate(
    engine: OfflineOptions,
    sampling: SamplingFlags,
    beams: BeamFlags,
    prompt: Annotated[str | None, flag("text to complete; without it and --input, standard input")] = None,
    input: Annotated[  # noqa: A002 (the flag's name)
        Path | None, flag("JSONL: prompt, prompt_token_ids or messages, and sampling", metavar="FILE|-")
    ] = None,
    output: Annotated[
        Path, flag("where answers go; - is standard output", metavar="FILE|-", callback=check_output)
    ] = STANDARD_STREAM,
    format: Annotated[  # noqa: A002 (the flag's name)
        Format | None, flag("of the answers", show_default="jsonl with --input, else text")
    ] = None,
) -> None:
    """Complete one prompt, or a JSONL file of prompts."""
    if prompt is not None and input is not None:
        raise typer.BadParameter("give --prompt or --input, not both")
    params = sampling.params()
    if (beam := beams.search(params)) is not None:
        params = as_sampling_params(beam)
    jobs = _read_input(prompt, input, params)
    if beam is None:
        defaults = {name: value for name, value in model_defaults(engine).items() if not sampling.sets(name)}
        jobs = [job.with_defaults(defaults) for job in jobs]
    output_format: Format = format or ("jsonl" if input else "text")
    with load(engine) as llm:
        results = _start(llm, jobs, beam)
        with _open_output(output) as stream:
            if not input and output_format == "text" and jobs[0].params.n == 1 and beam is None:
                _stream_text(results, stream, prompt or "")
            else:
                _write_all(results, stream, jobs, output_format)


def _read_input(prompt: str | None, path: Path | None, params: SamplingParams) -> list[Job]:
    """Return the jobs: of a JSONL file, of `--prompt`, or of standard input. A terminal is not waited for."""
    if path == STANDARD_STREAM:
        return read_jobs(sys.stdin, params, "standard input")
    if path is not None:
        with path.open(encoding="utf-8") as lines:
            return read_jobs(lines, params, str(path))
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("nothing to complete: give --prompt TEXT, --input FILE.jsonl, or text on stdin")
    return [Job(sys.stdin.read() if prompt is None else prompt, params)]


def _open_output(path: Path) -> AbstractContextManager[TextIO]:
    if path != STANDARD_STREAM:
        return path.open("w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may have characters that the terminal has not
    return nullcontext(sys.stdout)


def _start(llm: "LLM", jobs: list[Job], beam: BeamSearchParams | None) -> Iterator[RequestOutput]:
    """Check every job and return the stream of their outputs. Raises InvalidRequestError that names the bad job."""
    try:
        prompts = [_as_prompt(llm, job) for job in jobs]
        if beam is None:
            return llm.stream(prompts, [job.params for job in jobs])
        for job in jobs:
            if job.params != as_sampling_params(beam):
                raise InvalidRequestError(f"{job.source}: beams are searched alike for all, with the flags' parameters")
        return iter(llm.beam_search(prompts, beam))
    except InvalidRequestError:
        for job in jobs:
            _check_alone(llm, job)
        raise


def _check_alone(llm: "LLM", job: Job) -> None:
    try:
        llm.stream([_as_prompt(llm, job)], job.params)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{job.source}: {error}", param=error.param, code=error.code) from error


def _as_prompt(llm: "LLM", job: Job) -> str | list[int]:
    """Return the job's text or token ids; a chat through the model's template, up to where the assistant speaks."""
    if job.field != "messages":
        return job.prompt  # type: ignore[no-any-return]
    if llm.tokenizer is None:
        raise InvalidRequestError("the model has no tokenizer: messages need one", param="messages")
    text = llm.tokenizer.apply_chat_template(job.prompt, add_generation_prompt=True)
    return llm.tokenizer.encode(text, add_special_tokens=False)


def _stream_text(results: Iterator[RequestOutput], stream: TextIO, prompt: str) -> None:
    """Write the one answer's text as it grows; a terminal shows the prompt before it."""
    if stream.isatty():
        from rich.console import Console  # noqa: PLC0415 (0.02 s, for a terminal alone)

        Console(file=stream, highlight=False).print(prompt, end="", style="dim", markup=False, soft_wrap=True)
    written = 0
    for result in results:
        text = result.outputs[0].text
        stream.write(text[written:])
        stream.flush()
        written = len(text)
    stream.write("\n")


def _write_all(results: Iterator[RequestOutput], stream: TextIO, jobs: list[Job], output_format: Format) -> None:
    """Write every answer in the order of the jobs, each as soon as it and those before it are done."""
    from rich.console import Console  # noqa: PLC0415 (as above)
    from rich.progress import track  # noqa: PLC0415

    console = Console(stderr=True)
    is_quiet = not console.is_terminal or stream.isatty()  # two writers on one terminal would mix
    finished = (result for result in results if result.finished)
    bar = track(finished, "requests", total=len(jobs), console=console, transient=True, disable=is_quiet)
    waiting: dict[int, RequestOutput] = {}
    written = 0
    for result in bar:
        waiting[int(result.request_id)] = result  # a fresh LLM numbers its requests from 0
        while written in waiting:
            write_answer(stream, output_format, jobs[written], waiting.pop(written))
            written += 1
