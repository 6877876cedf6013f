"""The server's side of the process boundary: requests go out, streams of outputs come back. Loads no torch.

One task reads the engine's reports, hands them to the output processor and wakes whoever waits for one of the requests.
A reader that is slow finds everything since its last look in one output, so a stream holds no more than its answer.
When the engine dies, every stream ends with EngineDeadError, and so does every later call.
"""

import asyncio
import itertools
import logging
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from quire.core.beam_search_params import BeamSearchParams
from quire.core.block_map import BlockMap, Tier
from quire.core.errors import EngineError, InvalidRequestError, RequestFailedError
from quire.core.frames import LENGTH_BYTES, frame
from quire.core.outputs import RequestOutput
from quire.core.owner_labels import OwnerLabels
from quire.core.sampling_params import SamplingParams
from quire.engine import messages
from quire.engine.input_processor import InputProcessor, PreparedRequest, TokenizedPrompt
from quire.engine.launcher import EngineProcess
from quire.engine.messages import Command, EngineDeadError, EngineState, Report
from quire.engine.options import EngineOptions
from quire.engine.output_processor import FinishedRequest, OutputKind, OutputProcessor, ProcessedStep
from quire.engine.pinned_prefixes import PinnedPrefixes
from quire.engine.start_timeout import START_TIMEOUT_S, with_start_timeout
from quire.engine.streams import RequestStream
from quire.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ReportT = TypeVar("ReportT", messages.Located, messages.Ready)


class Observer(Protocol):
    """Whoever counts. Called on the event loop; must be quick."""

    def on_step(self, step: messages.Stepped, processed: ProcessedStep) -> None:
        """Take down a step of the engine and what it meant to requests."""

    def on_idle(self, state: EngineState) -> None:
        """Take down that nothing waits and nothing runs."""

    def on_abort(self, ended: FinishedRequest) -> None:
        """Take down a request that its client, or the server, has ended."""


class EngineClient:
    """The engine, from the event loop of another process. Get one from `connect`, and `close` it."""

    def __init__(
        self, child: EngineProcess, writer: asyncio.StreamWriter, ready: messages.Ready, tokenizer: Tokenizer | None,
        options: EngineOptions, observer: Observer, request_ids: Iterator[int], owners: OwnerLabels | None,
    ) -> None:
        self.ready, self.tokenizer = ready, tokenizer
        self.state = EngineState(0, 0, 0)
        self.inputs = InputProcessor(tokenizer, ready, options, owners)
        self.pinned = PinnedPrefixes(ready.limits.block_size)
        self._child, self._writer, self._observer = child, writer, observer
        self._outputs = OutputProcessor(tokenizer, packs_logprobs=True)
        self._streams: dict[int, RequestStream] = {}      # whose last output has not been taken
        self._queued: dict[int, int] = {}                 # sent and never yet admitted: tokens x n by request id
        self._is_idle, self._last_progress_s = True, 0.0  # as the engine's last report says, and when it came
        self.request_ids = request_ids                    # of requests to come
        self._asked: dict[Command, asyncio.Future[Any]] = {}  # commands whose effect somebody waits for
        self._map_numbers = itertools.count()
        self._map_turn = asyncio.Lock()
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._listener: asyncio.Task[None] | None = None
        self._ending = ThreadPoolExecutor(1, "engine end")  # of our own: nobody's work may hold up bad news

    @classmethod
    async def connect(
        cls,
        child: EngineProcess,
        options: EngineOptions,
        observer: Observer,
        request_ids: Iterator[int] | None = None,
        owners: OwnerLabels | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """Wait until the engine is ready. `request_ids`, `owners`: those of an engine that this one replaces.

        ConfigError or ModelError: it cannot run so. EngineDeadError: it died, or gave no sign of life for
        `start_timeout_s`. In each case nothing is left behind.
        """
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_unix_connection(sock=child.connection)
            tokenizer, ready = await with_start_timeout(_started(reader), child.process.pid, start_timeout_s)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            status = await asyncio.to_thread(child.stop)
            if isinstance(error, (EOFError, ConnectionError)):
                raise EngineDeadError(f"the engine process ended while it loaded ({_exit_text(status)})") from error
            raise
        client = cls(child, writer, ready, tokenizer, options, observer, request_ids or itertools.count(), owners)
        client._listener = asyncio.create_task(client._listen(reader), name="engine reports")
        return client

    # --- requests -------------------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Requests that were sent and have not run yet."""
        return len(self._queued)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens x n of the requests that were sent and have not run yet."""
        return sum(self._queued.values())

    @property
    def num_free_seqs(self) -> int:
        """Requests of one sequence that would not have to wait, as far as the last report tells: none if some do."""
        state = self.state
        if state.num_waiting or state.num_swapped:
            return 0
        return max(0, self.ready.limits.max_num_seqs - state.num_running_seqs)

    def prepare(
        self, prompt: TokenizedPrompt, params: SamplingParams, beam: BeamSearchParams | None = None, priority: int = 0,
        client_id: str = "", weight: float = 1.0,
    ) -> PreparedRequest:  # fmt: skip
        """Check a request and number it. InvalidRequestError names what is wrong. For any thread; takes its time."""
        return self.inputs.prepare(next(self.request_ids), prompt, params, beam, priority, client_id, weight)

    async def add(
        self, prepared: PreparedRequest, *, external_id: str, arrival_s: float, kind: OutputKind = "final"
    ) -> RequestStream:
        """Queue a request, once. EngineDeadError if there is no engine any more."""
        self._raise_if_dead()
        request_id = prepared.request.request_id
        message = frame(messages.Add(prepared.request))       # before anything is taken down
        metrics = self._outputs.add(prepared, external_id=external_id, arrival_s=arrival_s, kind=kind)
        stream = self._streams[request_id] = RequestStream(self, request_id, metrics)
        if self._has_rest:
            self._last_progress_s = time.monotonic()
        self._queued[request_id] = prepared.request.num_queued_tokens
        self._write(message)
        try:
            await self._writer.drain()
        except ConnectionError:
            pass  # the engine is gone: the listener finds out, and the stream tells
        except BaseException:
            stream.abort()
            raise
        return stream

    # --- pinned prefixes ------------------------------------------------------------------------------------------

    def prepare_pin(self, prompt: TokenizedPrompt, client_id: str = "", weight: float = 1.0) -> PreparedRequest:
        """As `prepare`, for a request that pins its prompt. Once it has ended, `pinned.add` it, or `unpin` it."""
        return self.inputs.prepare_pin(next(self.pinned.request_ids), prompt, client_id, weight)

    def unpin(self, request_id: int) -> None:
        """Let go of what a request has pinned, or end it."""
        self._send(messages.Abort(request_id))

    async def unpin_prefix(self, prefix_id: str, key_number: int | None = 0) -> None:
        """Unpin a prefix of a key (None: any); its blocks are free on return. UnknownPrefixError if there is none."""
        self._raise_if_dead()
        await self._ask(messages.Abort(self.pinned.remove(prefix_id, key_number)))

    def expire_prefix(self, prefix_id: str, ttl_s: float) -> None:
        """Unpin a prefix after some seconds, unless it has been unpinned by then."""

        def expire() -> None:
            self.unpin(self.pinned.remove(prefix_id, None))

        timer = asyncio.get_running_loop().call_later(ttl_s, expire)
        self.pinned.on_removal(prefix_id, timer.cancel)

    def _note_state(self, state: EngineState) -> None:
        """Take down where the engine stands; hold requests against limits without what is pinned now."""
        self.state, limits = state, self.inputs.limits
        if state.num_pinned_blocks != limits.num_pinned_blocks:
            self.inputs.limits = replace(limits, num_pinned_blocks=state.num_pinned_blocks)
        if self._asked:
            pins = set(state.pins)
            for command in self._asked:
                if isinstance(command, messages.Abort) and command.request_id not in pins:
                    self._tell(command)

    def _output(self, request_id: int) -> RequestOutput:
        output = self._outputs.output(request_id)
        if output.finished:
            del self._streams[request_id]
        return output

    def _abort(self, request_id: int) -> None:
        """End a request whose outputs nobody wants any more."""
        if request_id not in self._streams:
            return
        ended = self._outputs.abort(request_id, time.monotonic()) if request_id in self._outputs else None
        self._forget(request_id)
        if ended is None:
            return
        self._send(messages.Abort(request_id))
        self._observer.on_abort(ended)

    def _forget(self, request_id: int) -> None:
        del self._streams[request_id]
        self._queued.pop(request_id, None)
        self._outputs.drop(request_id)

    # --- the engine -----------------------------------------------------------------------------------------------

    async def block_map(self, first: int, count: int, timeout_s: float, tier: Tier = "kv") -> BlockMap:
        """Return what blocks [first, first + count) of a tier are, as of the end of a step.

        However many ask, the engine is asked for one map at a time: all together slow a step by no more than that.
        TimeoutError if it was not there in time; EngineDeadError if there is no engine any more.
        """
        async with asyncio.timeout(timeout_s), self._map_turn:
            self._raise_if_dead()
            shown: BlockMap = await self._ask(messages.GetBlocks(next(self._map_numbers), first, count, tier))
            return shown

    async def _ask(self, command: Command) -> Any:  # noqa: ANN401 (what the engine tells)
        """Send a command, and wait until `_tell` is called for it."""
        told = self._asked[command] = asyncio.get_running_loop().create_future()
        try:
            self._send(command)
            return await told
        finally:
            del self._asked[command]

    def _tell(self, command: Command, answer: object = None) -> None:
        """Tell who has asked, unless nobody waits any more."""
        told = self._asked.get(command)
        if told is not None and not told.done():
            told.set_result(answer)

    @property
    def is_alive(self) -> bool:
        """Whether the engine still answers."""
        return not self._death.done()

    @property
    def death_reason(self) -> str:
        """Why the engine no longer answers; for a client that is not alive."""
        return self._death.result()

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine has come any further, although it has work; 0 while it has none."""
        return 0.0 if self._has_rest else time.monotonic() - self._last_progress_s

    @property
    def _has_rest(self) -> bool:
        return self._is_idle and not self._queued

    def log_stacks(self) -> None:
        """Make the engine write to its error stream where every thread stands, as soon as it can."""
        self._child.process.send_signal(signal.SIGUSR1)

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine has died or the client was closed; return why."""
        return EngineDeadError(await asyncio.shield(self._death))

    async def close(self) -> None:
        """End the engine process, and with it all requests. Returns when it is gone. Twice is fine."""
        self._mark_dead("the engine was closed")
        await self._stop_process()
        if self._listener is not None:
            await asyncio.wait([self._listener])

    def _raise_if_dead(self) -> None:
        if self._death.done():
            raise EngineDeadError(self._death.result())

    def _send(self, command: Command) -> None:
        """Send a command about what the engine knows. One that is lost is its end: somebody would run for nobody."""
        try:
            self._write(frame(command))
        except Exception as error:
            log.exception("a command could not be sent")
            self._mark_dead(f"a command could not be sent: {error}")
            self._writer.transport.abort()                # the listener ends the rest

    def _write(self, message: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(message)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Take reports until the engine ends, in whatever way."""
        try:
            while True:
                report = await _receive(reader)
                self._take(report)
                if isinstance(report, messages.Stepped):
                    await self._take_step(report)
        except (EOFError, ConnectionError):
            self._mark_dead(f"the engine process ended ({_exit_text(await self._stop_process())})")
        except EngineDeadError as error:
            self._mark_dead(str(error))
        except Exception as error:
            log.exception("a report of the engine could not be taken")
            self._mark_dead(f"a report of the engine could not be taken: {error}")
        finally:
            self._mark_dead("the reader of the engine's outputs stopped")  # no stream waits in vain
            await self._stop_process()

    def _take(self, report: Report) -> None:
        self._last_progress_s = time.monotonic()
        if not isinstance(report, messages.Alive):  # sent by another thread: may arrive after the Idle
            self._is_idle = isinstance(report, messages.Idle)
        match report:
            case messages.Alive() | messages.Stepped():
                pass
            case messages.Idle(state):
                self._note_state(state)
                self._observer.on_idle(state)
            case messages.Refused(request_id, message, param, code):
                self._fail(request_id, InvalidRequestError(message, param=param, code=code))
            case messages.BlocksReply(command, block_map):
                self._tell(command, block_map)
            case messages.Failed(_, message):
                raise EngineDeadError(f"the engine has failed: {message}")
            case _:
                raise AssertionError(f"not expected while running: {report}")

    async def _take_step(self, step: messages.Stepped) -> None:
        """Take a step in slices, and let readers and connections have a turn after each."""
        self._note_state(step.state)
        for admission in step.admissions:
            self._queued.pop(admission.request_id, None)
        self._outputs.record_scheduled(step.preempted, step.admissions, step.started_s)
        whole = ProcessedStep()
        for processed in self._outputs.process_in_slices(step.deltas, time.monotonic()):
            self._hand_out(processed)
            whole.add(processed)
            if not processed.is_last:
                await asyncio.sleep(0)
        self._observer.on_step(step, whole)

    def _hand_out(self, processed: ProcessedStep) -> None:
        """Notify the engine and the readers of what a slice of a step means."""
        for request_id, index in processed.stopped:
            self._send(messages.Finish(request_id, index))
        for request_id, error in processed.failed:
            log.error("request %d has failed", request_id, exc_info=error)
            self._send(messages.Abort(request_id))
            told = RequestFailedError(f"the request's output could not be made: {error}")
            self._fail(request_id, error if isinstance(error, EngineError) else told)
        for request_id in processed.ready:
            self._streams[request_id].wake()

    def _fail(self, request_id: int, error: EngineError) -> None:
        """End a request for which the engine does nothing more, if it is still here."""
        if request_id in self._streams:
            self._streams[request_id].fail(error)

    def _mark_dead(self, reason: str) -> None:
        if self._death.done():
            return
        self._death.set_result(reason)
        self._queued.clear()
        self._is_idle = True                              # the dead do not stall
        for stream in self._streams.values():
            stream.fail(EngineDeadError(reason))
        for told in self._asked.values():
            if not told.done():
                told.set_exception(EngineDeadError(reason))

    async def _stop_process(self) -> int:
        """End the engine process, if it is still there, and return its exit status."""
        self._writer.transport.abort()
        return await asyncio.get_running_loop().run_in_executor(self._ending, self._child.stop)


async def _started(reader: asyncio.StreamReader) -> tuple[Tokenizer | None, messages.Ready]:
    """Wait for the engine's two reports of its start; read the tokenizer between them."""
    located = await _expect(reader, messages.Located)
    tokenizer = await asyncio.to_thread(Tokenizer.from_folder_if_any, Path(located.folder))
    return tokenizer, await _expect(reader, messages.Ready)


async def _expect(reader: asyncio.StreamReader, kind: type[ReportT]) -> ReportT:
    """Wait for a report of this kind. Raises what a `Failed` stands for."""
    report = await _receive(reader)
    if isinstance(report, messages.Failed):
        raise messages.error_from(report)
    assert isinstance(report, kind), f"expected {kind.__name__}, got {report}"
    return report


async def _receive(reader: asyncio.StreamReader) -> Report:
    """Wait for the next report. EOFError or ConnectionError when the engine is gone."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return messages.decode_report(await reader.readexactly(length))


def _exit_text(status: int) -> str:
    """Say how a process ended."""
    return f"exit status {status}" if status >= 0 else f"killed by signal {-status}, {signal.strsignal(-status)}"
