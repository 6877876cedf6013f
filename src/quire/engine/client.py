"""The server's side of the process boundary: requests go out, streams of outputs come back. Loads no torch.

One task reads the engine's reports, hands them to the output processor and wakes whoever waits for one of the requests.
A reader that is slow finds everything since its last look in one output, so a stream holds no more than its answer.
When the engine dies, every stream ends with EngineDeadError, and so does every later call.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import msgspec

from quire.core.outputs import RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.engine.child import EngineChild
from quire.engine.input_processor import InputProcessor, TokenizedPrompt
from quire.engine.options import EngineOptions
from quire.engine.output_processor import EndedRequest, OutputKind, OutputProcessor, ProcessedStep
from quire.engine.wire import (
    LENGTH_BYTES,
    Abort,
    Add,
    Command,
    EngineDeadError,
    EngineState,
    Failed,
    Finish,
    Idle,
    Located,
    Ready,
    Report,
    Stepped,
    as_error,
    decode_report,
    frame,
)
from quire.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Whoever counts. Called on the event loop; must be quick."""

    def stepped(self, step: Stepped, processed: ProcessedStep) -> None:
        """Take down a step of the engine and what it meant to requests."""

    def idled(self, state: EngineState) -> None:
        """Take down that nothing waits and nothing runs."""

    def aborted(self, ended: EndedRequest) -> None:
        """Take down a request that its client, or the server, has ended."""


class PreparedRequest(NamedTuple):
    """A request that was checked and numbered; nothing is queued yet."""

    request: Request
    prompt: TokenizedPrompt


class EngineClient:
    """The engine, from the event loop of another process. Get one from `connect`, and `close` it."""

    def __init__(
        self, child: EngineChild, writer: asyncio.StreamWriter, ready: Ready, tokenizer: Tokenizer | None,
        options: EngineOptions, observer: Observer | None,
    ) -> None:
        self.ready, self.tokenizer = ready, tokenizer
        self.state = EngineState(0, 0, 0, 0)
        self.inputs = InputProcessor(
            tokenizer,
            ready.limits,
            vocab_size=ready.vocab_size,
            eos_token_ids=ready.eos_token_ids,
            engine_seed=options.seed,
            max_logprobs=options.max_logprobs,
        )
        self._child, self._writer, self._observer = child, writer, observer
        self._outputs = OutputProcessor(tokenizer)
        self._streams: dict[int, RequestStream] = {}      # whose last output has not been taken
        self._queued: set[int] = set()                    # sent, and never yet let into a step
        self._request_ids = itertools.count()
        self._death: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        self._listener: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, child: EngineChild, options: EngineOptions, observer: Observer | None = None) -> Self:
        """Wait until the engine is ready.

        ConfigError or ModelError: it cannot run so. EngineDeadError: it died. In each case nothing is left behind.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(sock=child.connection)
            located = await _receive(reader)
            if isinstance(located, Failed):
                raise as_error(located)
            assert isinstance(located, Located), f"expected the model's folder, got {located}"
            tokenizer = await asyncio.to_thread(Tokenizer.from_folder_if_any, Path(located.folder))
            ready = await _receive(reader)
            if isinstance(ready, Failed):
                raise as_error(ready)
            assert isinstance(ready, Ready), f"expected readiness, got {ready}"
        except (asyncio.IncompleteReadError, OSError) as error:
            status = await asyncio.to_thread(child.end)
            raise EngineDeadError(f"the engine process ended while it loaded ({_told(status)})") from error
        except BaseException:
            await asyncio.to_thread(child.end)
            raise
        client = cls(child, writer, ready, tokenizer, options, observer)
        client._listener = asyncio.create_task(client._listen(reader), name="engine reports")
        return client

    # --- requests -------------------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Requests that were sent and have not run yet."""
        return len(self._queued)

    @property
    def num_open(self) -> int:
        """Requests that have not ended, or whose last output has not been taken."""
        return len(self._streams)

    def prepare(self, prompt: TokenizedPrompt, params: SamplingParams) -> PreparedRequest:
        """Check a request and number it. InvalidRequestError names what is wrong. For any thread; takes its time."""
        return PreparedRequest(self.inputs.make_request(next(self._request_ids), prompt, params), prompt)

    async def add(
        self, prepared: PreparedRequest, *, external_id: str, arrival_s: float, kind: OutputKind = "final"
    ) -> "RequestStream":
        """Queue a request, once. EngineDeadError if there is no engine any more."""
        self._raise_if_dead()
        request = prepared.request
        self._outputs.add(
            request.request_id,
            external_id=external_id,
            prompt=prepared.prompt.text,
            prompt_token_ids=request.prompt_token_ids,
            params=request.params,
            arrival_s=arrival_s,
            kind=kind,
        )
        stream = self._streams[request.request_id] = RequestStream(self, request.request_id)
        self._queued.add(request.request_id)
        self._send(Add(request))
        try:
            await self._writer.drain()
        except OSError:
            pass  # the engine is gone: the listener finds out, and the stream tells
        except BaseException:
            stream.abort()
            raise
        return stream

    def _output(self, request_id: int) -> RequestOutput:
        output = self._outputs.output(request_id)
        if output.finished:
            del self._streams[request_id]
        return output

    def _abort(self, request_id: int) -> None:
        """End a request whose outputs nobody wants any more."""
        if self._streams.pop(request_id, None) is None:
            return
        self._queued.discard(request_id)
        ended = self._outputs.abort(request_id, time.monotonic())
        self._outputs.drop(request_id)
        if ended is None:
            return
        self._send(Abort(request_id))
        if self._observer is not None:
            self._observer.aborted(ended)

    # --- the engine -----------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether the engine still answers."""
        return not self._death.done()

    async def death(self) -> EngineDeadError:
        """Wait until the engine has died or the client was closed; return why."""
        return await asyncio.shield(self._death)

    async def close(self) -> None:
        """End the engine process, and with it all requests. Returns when it is gone. Twice is fine."""
        self._die(EngineDeadError("the engine was closed"))
        if self._listener is not None:
            self._listener.cancel()
        self._writer.close()
        await asyncio.to_thread(self._child.end)

    def _raise_if_dead(self) -> None:
        if self._death.done():
            raise self._death.result()

    def _send(self, command: Command) -> None:
        if self.is_alive:
            self._writer.write(frame(command))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Take reports until the engine ends, in whatever way."""
        try:
            while True:
                self._take(await _receive(reader))
        except (asyncio.IncompleteReadError, OSError):
            status = await asyncio.to_thread(self._child.end)
            self._die(EngineDeadError(f"the engine process ended ({_told(status)})"))
        except Exception as error:
            log.exception("a report of the engine could not be taken")
            self._die(EngineDeadError(f"a report of the engine could not be taken: {error}"))

    def _take(self, report: Report) -> None:
        match report:
            case Stepped():
                self._take_step(report)
            case Idle(state):
                self._note_state(state)
                if self._observer is not None:
                    self._observer.idled(state)
            case Failed(_, message):
                self._die(EngineDeadError(f"the engine has failed: {message}"))
            case _:
                raise AssertionError(f"not expected while running: {report}")

    def _take_step(self, step: Stepped) -> None:
        self._note_state(step.state)
        self._queued.difference_update(request_id for request_id, _ in step.admissions)
        self._outputs.note_admitted(step.admissions, step.started_s)
        processed = self._outputs.process(step.deltas, time.monotonic())
        for request_id, index in processed.finish:
            self._send(Finish(request_id, index))
        for request_id in processed.ready:
            self._streams[request_id].wake()
        if self._observer is not None:
            self._observer.stepped(step, processed)

    def _note_state(self, state: EngineState) -> None:
        """Keep the newest figures; those of the cache come now and then."""
        self.state = state if state.kv is not None else msgspec.structs.replace(state, kv=self.state.kv)

    def _die(self, error: EngineDeadError) -> None:
        if not self._death.done():
            self._death.set_result(error)
            for stream in list(self._streams.values()):
                stream.fail(error)


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, as its kind says. Whoever stops before the end calls `abort`."""

    def __init__(self, client: EngineClient, request_id: int) -> None:
        self._client, self._request_id = client, request_id
        self._woken = asyncio.Event()
        self._has_output = False
        self._error: EngineDeadError | None = None
        self._is_over = False

    async def __anext__(self) -> RequestOutput:
        """Wait for the next output. EngineDeadError if none can come any more."""
        if self._is_over:
            raise StopAsyncIteration
        await self._woken.wait()
        if self._error is not None and not self._has_output:
            self._is_over = True
            raise self._error
        if self._error is None:
            self._woken.clear()
        self._has_output = False
        output = self._client._output(self._request_id)
        self._is_over = output.finished
        return output

    def abort(self) -> None:
        """End the request if it runs, and forget it. Twice, or after the end, is fine."""
        self._is_over = True
        self._client._abort(self._request_id)

    def wake(self) -> None:
        """Tell the reader that there is something new."""
        self._has_output = True
        self._woken.set()

    def fail(self, error: EngineDeadError) -> None:
        """Tell the reader that nothing comes any more."""
        self._error = error
        self._woken.set()


async def _receive(reader: asyncio.StreamReader) -> Report:
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return decode_report(await reader.readexactly(length))


def _told(status: int) -> str:
    """Say how a process ended."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
