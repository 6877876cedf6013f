"""`quire generate`: one prompt, streamed to the terminal, or a file of prompts, to text or JSONL."""

import io
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console
from rich.progress import track

from quire.cli.flag_groups import STANDARD_STREAM, check_output, flag, with_config_file, with_flag_groups
from quire.cli.jobs import Format, Job, read_jobs, write_answer
from quire.cli.model_flags import BeamFlags, OfflineOptions, SamplingFlags, load, model_defaults
from quire.core.errors import InvalidRequestError
from quire.core.outputs import RequestOutput
from quire.core.sampling_params import BeamSearchParams, SamplingParams, as_sampling_params

if TYPE_CHECKING:
    from quire.llm import LLM



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
