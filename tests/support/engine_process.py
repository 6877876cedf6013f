"""Engines in processes of their own: waiting for what they do, and looking at what they hold."""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from quire.core.logprob_table import LogprobTable
from quire.core.outputs import Logprob, RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.engine.messages import EngineState, Stepped
from quire.engine.options import EngineOptions
from quire.engine.processes.client import EngineClient, Observer
from quire.engine.processes.streams import RequestStream
from quire.engine.requests.input_processor import Prompt
from quire.engine.requests.output_processor import FinishedRequest, OutputKind, ProcessedStep, logprob_dict
from quire.text.tokenizer import Tokenizer
from support.forked_engines import fork_engine

TIMEOUT_S = 120.0 # nothing here takes long, but the machine may be busy
QUIET_S = 0.3
Seen = TypeVar("Seen")


class Recorder:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.steps: list[Stepped] = []
        self.processed: list[ProcessedStep] = []
        self.aborted_requests: list[FinishedRequest] = []
        self.num_rests = 0

    def on_step(self, step: Stepped, processed: ProcessedStep) -> None:
        self.steps.append(step)
        self.processed.append(processed)

    def on_idle(self, state: EngineState) -> None:
        self.num_rests += 1

    def on_abort(self, ended: FinishedRequest) -> None:
        self.aborted_requests.append(ended)


async def connect(options: EngineOptions, observer: Observer | None = None) -> EngineClient:
    """Return a client of a new engine process, which is forked."""
    return await EngineClient.connect(fork_engine(options), options, observer or Recorder())


async def add(
    client: EngineClient, prompt: Prompt, params: SamplingParams, kind: OutputKind = "final", name: str = "mine"
) -> RequestStream:
    """Queue a request that arrives now."""
    prepared = client.prepare(client.inputs.tokenize(prompt), client.inputs.check_params(params))
    return await client.add(prepared, external_id=name, arrival_s=time.monotonic(), kind=kind)


def unpacked(output: RequestOutput, tokenizer: Tokenizer | None) -> RequestOutput:
    """Return an output as `LLM` gives it: with dictionaries of logprobs instead of tables."""

    def dicts(table: LogprobTable) -> list[dict[int, Logprob]]:
        return [logprob_dict(position, tokenizer) for position in table.positions(0, len(table))]

    pieces = [
        piece if (table := piece.packed_logprobs) is None else replace(
            piece, logprobs=dicts(table), packed_logprobs=None
        )
        for piece in output.outputs
    ]
    output = replace(output, outputs=pieces)
    if (prompt := output.packed_prompt_logprobs) is None:
        return output
    return replace(output, prompt_logprobs=[None, *dicts(prompt)], packed_prompt_logprobs=None)


async def read(stream: RequestStream) -> list[RequestOutput]:
    """Return all outputs of a stream, with the prompt's tokens."""
    outputs = stream._table._outputs
    held = outputs._requests.get(stream._request_id)
    token_ids = [] if held is None else held.prepared.request.prompt_token_ids.tolist()
    return [replace(unpacked(output, outputs._tokenizer), prompt_token_ids=token_ids) async for output in stream]


async def until(condition: Callable[[], Seen]) -> Seen:
    """Wait for a condition on the event loop, and return what it saw: a second look may see something else."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (seen := condition()):
            await asyncio.sleep(0.002)
    return seen


def wait_until(condition: Callable[[], Seen]) -> Seen:
    """Wait for a condition without an event loop, and return what it saw."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (seen := condition()):
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.002)
    return seen


def is_at_rest(client: EngineClient) -> bool:
    """Whether the engine says that nothing waits, nothing runs and no block is in use."""
    state = client.state
    return state.num_running == state.num_waiting == 0 and state.kv is not None and state.kv.used_blocks == 0


def holds_nothing(client: EngineClient) -> bool:
    """Whether the client has forgotten all requests."""
    tables = client._streams, client._streams._outputs, client._forecast
    return not any(map(len, tables)) and client.num_queued == client.num_queued_tokens == 0


def is_running(pid: int) -> bool:
    """Whether there is such a process, apart from one that has ended and was not waited for."""
    return _status(pid) not in ("", "Z", "X")


def is_quiet(pid: int) -> bool:
    """Whether a process uses no processor for a while."""
    before = _cpu_ticks(pid)
    time.sleep(QUIET_S)
    return _cpu_ticks(pid) == before


def open_files(pid: int) -> list[str]:
    """Return what a process holds open besides its standard streams, sockets as "socket:[number]"."""
    held = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the process of this very listing
            held += [os.readlink(entry)] if int(entry.name) > 2 else []
    return sorted(held)


def _status(pid: int) -> str:
    return next(iter(_stat(pid)), "")


def _cpu_ticks(pid: int) -> int:
    return sum(map(int, _stat(pid)[11:13]))  # user mode and kernel


def _stat(pid: int) -> list[str]:
    """Return what /proc tells of a process, from its status on; nothing if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
