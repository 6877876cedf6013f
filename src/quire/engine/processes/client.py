"""Client of an engine process: requests are sent over a socket pair, streams of outputs come back. Loads no torch.

One task receives the engine's reports, gives them to the output processor and wakes the readers of the requests that
they concern. When the engine dies, every stream ends with EngineDeadError, and so does every later call. Another task
watches whether the engine makes progress, and may end it if it does not (`quire.engine.processes.liveness`).
"""

import asyncio
import itertools
import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, Self, TypeVar

from quire.core.block_map import BlockMap, Tier
from quire.core.errors import (
    DeadlineExceededError,
    EngineAsleepError,
    EngineError,
    InvalidRequestError,
    ModelError,
    RequestFailedError,
)
from quire.core.frames import LENGTH_BYTES, frame
from quire.core.images import KeptPixels
from quire.core.lora import Adapter
from quire.core.owner_labels import OwnerLabels
from quire.core.sequence import Request
from quire.engine import messages
from quire.engine.formats import TokenizerUse, load_tokenizer
from quire.engine.launcher import EngineProcess
from quire.engine.messages import (
    Command,
    EngineDeadError,
    EngineState,
    Profile,
    Report,
    SessionBlocks,
    SleepReply,
    Tag,
)
from quire.engine.options import EngineOptions
from quire.engine.options.parallel_options import START_TIMEOUT_S
from quire.engine.processes.base_client import SingleEngine
from quire.engine.processes.forecast import Asked, Forecast, asked_of
from quire.engine.processes.liveness import LOOKS_PER_LIMIT, OnStall, stall_reason, wait_for_stall, with_start_timeout
from quire.engine.processes.pending_commands import PendingCommands
from quire.engine.processes.streams import RequestStream, RequestStreams
from quire.engine.requests.input_processor import InputProcessor, PreparedRequest
from quire.engine.requests.output_processor import FinishedRequest, OutputKind, ProcessedStep
from quire.text.tokenizer import Tokenizer

ReportT = TypeVar("ReportT", messages.Located, messages.Ready)


class EngineConnection:
    """An engine process that is ready, and the streams of the socket to it. Get one from `open`."""

    def __init__(
        self, engine: EngineProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        tokenizer: Tokenizer | None, ready: messages.Ready, start_timeout_s: float,
    ) -> None:  # fmt: skip
        self.engine, self.tokenizer, self.ready, self.start_timeout_s = engine, tokenizer, ready, start_timeout_s
        self._writer, self.kept_pixels = writer, KeptPixels()
        self.is_closed = False  # then requests go to other engines; a large process takes seconds to end
        # Waits for the next report. EOFError or ConnectionError when the engine is gone.
        self.receive = partial(_receive, reader)
        # Waits until the engine has taken most of what was sent. ConnectionError if it is gone.
        self.drain = writer.drain

    @classmethod
    async def open(
        cls, engine: EngineProcess, start_timeout_s: float, tokenizer_use: TokenizerUse = "optional",
        tokenizer: Tokenizer | None = None,
    ) -> Self:  # fmt: skip
        """Wait until the engine is ready. Errors as in `EngineClient.connect`; after one the process has ended.

        `tokenizer`: read already; else that of the folder that the engine names is read.
        """
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_unix_connection(sock=engine.connection)
            handshake = _handshake(reader, tokenizer_use, tokenizer)
            tokenizer, ready = await with_start_timeout(handshake, engine.process.pid, start_timeout_s)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            status = await asyncio.to_thread(engine.stop)
            if isinstance(error, (EOFError, ConnectionError)):
                raise EngineDeadError(f"the engine process ended while it loaded ({_exit_text(status)})") from error
            raise
        return cls(engine, reader, writer, tokenizer, ready, start_timeout_s)

    def send(self, message: bytes) -> None:
        """Send a frame. A connection that is closing drops it: its reader finds the end."""
        if not self._writer.is_closing():
            self._writer.write(message)

    def abort(self) -> None:
        """Close the connection at once; `receive` raises."""
        self.is_closed = True
        self._writer.transport.abort()

    def kill(self) -> None:
        """End the process at once, and close the connection; `receive` raises."""
        self.engine.kill()
        self.abort()

    async def stop(self) -> str:
        """Close the connection and end the process, if it still runs; return how it ended, as text."""
        self.abort()
        thread = ThreadPoolExecutor(1, "engine stop")  # separate: other work must not delay a death
        try:
            return _exit_text(await asyncio.get_running_loop().run_in_executor(thread, self.engine.stop))
        finally:
            thread.shutdown(wait=False)


async def _handshake(
    reader: asyncio.StreamReader, tokenizer_use: TokenizerUse, tokenizer: Tokenizer | None
) -> tuple[Tokenizer | None, messages.Ready]:
    """Wait for the engine's two reports of its start; read the tokenizer between them, unless it is given."""
    located = await _expect(reader, messages.Located)
    if tokenizer is None:
        tokenizer = await asyncio.to_thread(load_tokenizer, Path(located.folder), tokenizer_use)
    return tokenizer, await _expect(reader, messages.Ready)


async def _expect(reader: asyncio.StreamReader, kind: type[ReportT]) -> ReportT:
    """Wait for a report of this kind. Raises the error of a `Failed`."""
    report = await _receive(reader)
    if isinstance(report, messages.Failed):
        raise messages.error_from(report)
    assert isinstance(report, kind), f"expected {kind.__name__}, got {report}"
    return report


async def _receive(reader: asyncio.StreamReader) -> Report:
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return messages.decode_report(await reader.readexactly(length))


def _exit_text(status: int) -> str:
    """Return an exit status for an error's text; a negative one is that of a signal."""
    return f"exit status {status}" if status >= 0 else f"killed by signal {-status}, {signal.strsignal(-status)}"


log = logging.getLogger(__name__)


def _check(reply: SleepReply) -> None:
    """Raise the error of an engine that could not sleep or be woken."""
    if reply.error is not None:
        raise messages.error_from(reply.error)


class Observer(Protocol):
    """Callbacks of a client. Called on the event loop; must be quick."""

    def on_step(self, step: messages.Stepped, processed: ProcessedStep) -> None:
        """Record a step of the engine and what it gave to requests."""

    def on_idle(self, state: EngineState) -> None:
        """Record that no request waits or runs."""

    def on_abort(self, finished: FinishedRequest) -> None:
        """Record a request that its client, or the server, has aborted."""


class EngineClient(SingleEngine):
    """The engine, from the event loop of another process. Get one from `connect`, and `close` it."""

    def __init__(
        self, connection: EngineConnection, options: EngineOptions, observer: Observer,
        request_ids: Iterator[int], owners: OwnerLabels | None, on_close: Callable[[int], None] | None,
        *, packs_outputs: bool = True, on_stall: OnStall = "ignore",
    ) -> None:  # fmt: skip
        ready, tokenizer = connection.ready, connection.tokenizer
        if tokenizer is not None and (template := options.given_chat_template) is not None:
            tokenizer.use_chat_template(template)
        super().__init__(tokenizer, ready, InputProcessor(tokenizer, ready, options, owners), request_ids)
        self.state = EngineState(0, 0, 0)
        self._connection, self._observer, self._on_close = connection, observer, on_close
        self._stall_limit_s, self._on_stall = options.stall_limit, on_stall
        self._forecast = Forecast(
            ready.max_num_batched_tokens, ready.limits.max_num_seqs, options.itl_target_s, options.scheduling_policy
        )
        self._num_signs = self._num_reports = 0           # reports that show progress, and all of them
        self._streams = RequestStreams(
            self.tokenizer, self._on_abort, self._on_closed, is_packed=packs_outputs, itl_target_s=options.itl_target_s
        )
        self._pending = PendingCommands(self._send)
        self._is_idle, self._last_progress_s = True, 0.0  # from the engine's last report, and when it was received
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(
        cls,
        process: EngineProcess,
        options: EngineOptions,
        observer: Observer,
        request_ids: Iterator[int] | None = None,
        owners: OwnerLabels | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        *,
        requires_tokenizer: bool = False,
        tokenizer: Tokenizer | None = None,
        on_close: Callable[[int], None] | None = None,
        packs_outputs: bool = True,
        on_stall: OnStall = "ignore",
    ) -> Self:
        """Wait until the engine is ready. `request_ids`, `owners`: those of an engine that this one replaces.

        Raises ConfigError or ModelError if it cannot run with these options, EngineDeadError if the process died, or
        neither computed nor read for `start_timeout_s`. In each case the process has ended. With `requires_tokenizer` a
        model without one is a ModelError, unless the options skip it. `tokenizer`: that of another engine with the same
        options, which is not read again. `on_close` is called with the number of each request at the end of its stream.
        `packs_outputs`: as in `OutputProcessor`. `on_stall`: of an engine that has work and makes no progress for the
        stall limit.
        """
        unskipped: TokenizerUse = "required" if requires_tokenizer else "optional"
        use: TokenizerUse = "skipped" if options.skip_tokenizer_init else unskipped
        connection = await EngineConnection.open(process, start_timeout_s, use, tokenizer)
        numbers = request_ids or itertools.count()
        client = cls(
            connection, options, observer, numbers, owners, on_close, packs_outputs=packs_outputs, on_stall=on_stall
        )
        client._start(has_ranks=options.tensor_parallel_size > 1)
        return client

    def _start(self, *, has_ranks: bool) -> None:
        """Start to receive reports, and to watch for their absence."""
        self._tasks.append(asyncio.create_task(self._receive_all(), name="engine reports"))
        if has_ranks:
            self._tasks.append(asyncio.create_task(self._end_when_silent(), name="engine heartbeats"))
        if self._on_stall != "ignore":
            self._tasks.append(asyncio.create_task(self._watch_progress(), name="engine progress"))

    # --- requests -------------------------------------------------------------------------------------------------

    @property
    def secret(self) -> bytes:
        """Secret that the engines of its fleet share."""
        return self._connection.engine.secret

    @property
    def num_free_seqs(self) -> int:
        """Requests of one sequence that could run at once, by the last report; 0 if requests wait or are swapped."""
        state = self.state
        if state.num_waiting or state.num_swapped:
            return 0
        return max(0, self.ready.limits.max_num_seqs - state.num_running_seqs)

    def first_token_s(self, asked: Asked, request: Request | None = None, within_s: float = math.inf) -> float:
        """Return the seconds within which what is asked is likely to have its first token; 0: nothing is known."""
        now_s = time.monotonic()
        predicted_s = self._forecast.first_token_s(self.state, self._streams.queued, asked, now_s)
        corrected_s = self._forecast.correct(predicted_s, now_s)
        if request is not None or corrected_s > within_s:       # else it is asked again, with a longer prompt
            self._forecast.record_asked(predicted_s, within_s)
        return corrected_s

    async def add(
        self, prepared: PreparedRequest, *, external_id: str, arrival_s: float, kind: OutputKind = "final"
    ) -> RequestStream:
        """Queue a request, once. EngineDeadError if the engine has died."""
        self._check_serves()
        request, kept = prepared.request, self._connection.kept_pixels
        images, sent = request.images, messages.add_message(request)
        if images:
            sent[1]["images"] = kept.without_kept(images)
        message = frame(sent)   # first: a request that cannot be sent leaves no trace
        now_s, predicted_s = time.monotonic(), 0.0
        if request.has_deadline:    # it shows how good forecasts are
            predicted_s = self._forecast.first_token_s(self.state, self._streams.queued, asked_of(request), now_s)
        self._forecast.record_sent(request, predicted_s, now_s)
        self._await_sign()
        stream = self._streams.open(prepared, external_id=external_id, arrival_s=arrival_s, kind=kind)
        self._connection.send(message)
        if images:
            kept.sent(images)
        try:
            await self._connection.drain()
        except ConnectionError:
            pass  # the engine is gone: `_receive_all` finds out, and the stream raises
        except BaseException:
            stream.abort()
            raise
        return stream

    async def read_adapter(self, folder: str) -> Adapter:
        """Have the engine read the LoRA adapter of a folder. ModelError with the reason if it cannot be served."""
        self._check_serves()
        reply = await self._pending.read_adapter(folder)
        if reply.adapter is None:
            raise ModelError(reply.error)
        return reply.adapter

    async def start_profile(self) -> bool:
        """Start a profile; return False if one runs. EngineDeadError if the engine has died."""
        self._check_serves()
        return (await self._pending.profile(messages.StartProfile)).is_done

    async def stop_profile(self) -> Profile | None:
        """End the profile and return it; None if there is none. EngineDeadError if the engine has died."""
        self._check_serves()
        return (await self._pending.profile(messages.StopProfile)).profile

    def _on_closed(self, request_id: int) -> None:
        self._forecast.forget(request_id)
        if self._on_close is not None:
            self._on_close(request_id)

    def _on_abort(self, request_id: int, finished: FinishedRequest) -> None:
        self._send(messages.Abort(request_id))
        self._observer.on_abort(finished)

    def unpin(self, request_id: int) -> None:
        """Release what a request has pinned, or abort it."""
        self._send(messages.Abort(request_id))

    async def release_pin(self, request_id: int) -> None:
        """Release what a request has pinned; its blocks are free on return. EngineDeadError if the engine has died."""
        self._check_serves()
        await self._pending.unpin(request_id)

    async def save_session(self, request_id: int, folder: Path) -> SessionBlocks:
        """Copy what a request has pinned into the store of a session. EngineDeadError if the engine has died."""
        self._check_serves()
        return await self._pending.save_session(request_id, str(folder))

    async def open_session(self, request: Request, folder: Path, num_blocks: int, identity: str) -> SessionBlocks:
        """Let a request to come load from a saved session. EngineDeadError if the engine has died."""
        self._check_serves()
        return await self._pending.open_session(request.request_id, str(folder), num_blocks, identity)

    def close_session(self, request: Request) -> None:
        """Let no request load from a saved session any more."""
        if self.is_alive and not self.sleeping:
            self._send(messages.CloseSession(request.request_id))

    # --- the engine -----------------------------------------------------------------------------------------------

    async def block_map(self, first: int, count: int, timeout_s: float, tier: Tier = "kv") -> BlockMap:
        """Return what blocks [first, first + count) of a tier are at the end of a step.

        The engine is asked for one map at a time, however many callers there are. Raises TimeoutError after
        `timeout_s`, EngineDeadError if the engine has died.
        """
        async with asyncio.timeout(timeout_s):
            return await self._pending.block_map(first, count, tier, self._check_serves)

    @property
    def is_alive(self) -> bool:
        """True if the engine still answers."""
        return not (self._connection.is_closed or self._death.done())

    @property
    def death_reason(self) -> str:
        """Reason that the engine no longer answers; for a client that is not alive."""
        return self._death.result() if self._death.done() else "the engine process ended"

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine made progress, although it has work or was asked for a sign; else 0."""
        is_at_rest = self._is_idle and not self._streams.queued.requests
        return 0.0 if is_at_rest or self.sleeping else time.monotonic() - self._last_progress_s

    def log_stacks(self) -> None:
        """Make the engine write the stacks of its threads to its error stream, as soon as it can."""
        self._connection.engine.process.send_signal(signal.SIGUSR1)

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine has died or the client was closed; return why."""
        return EngineDeadError(await asyncio.shield(self._death))

    async def close(self) -> None:
        """End the engine process, and with it all requests. Returns when it is gone. Idempotent."""
        self._mark_dead("the engine was closed")
        await self._connection.stop()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _check_serves(self) -> None:
        """As in `BaseClient`, inlined: once a request."""
        if self._connection.is_closed or self._death.done():
            raise EngineDeadError(self.death_reason)
        if self.sleeping:
            raise EngineAsleepError

    async def _sleep(self, level: int) -> None:
        _check(await self._pending.sleep(level))

    async def _wake_up(self, tags: tuple[Tag, ...]) -> None:
        """Wake the engine, and end it if it gives no sign of life, as at start."""
        pid, limit_s = self._connection.engine.process.pid, self._connection.start_timeout_s
        try:
            _check(await with_start_timeout(self._pending.wake(tags), pid, limit_s))
        except EngineDeadError as error:
            if self.is_alive:
                self._kill(str(error))
            raise

    def _send(self, command: Command) -> None:
        """Send a command about what the engine knows. If it is lost, so is the engine: the two would disagree."""
        self._await_sign()
        try:
            self._connection.send(frame(command))
        except Exception as error:
            log.exception("a command could not be sent")
            self._mark_dead(f"a command could not be sent: {error}")
            self._connection.abort()                      # `_receive_all` does the rest

    def _await_sign(self) -> None:
        """Record that the engine is about to get a command, after which it sends a report."""
        if self._is_idle and not self._streams.queued.requests and not self._death.done():  # inlined: once a request
            self._is_idle, self._last_progress_s = False, time.monotonic()

    def _mark_dead(self, reason: str) -> None:
        """Fail everything that waits for the engine. Only the first reason counts."""
        if self._death.done():
            return
        self._death.set_result(reason)
        self._is_idle = True                              # a dead engine does not stall
        self._streams.fail_all(reason)
        self._pending.fail_all(reason)

    # --- reports --------------------------------------------------------------------------------------------------

    async def _receive_all(self) -> None:
        """Handle reports until the connection ends."""
        try:
            while True:
                report = await self._connection.receive()
                self._handle_report(report)
                if isinstance(report, messages.Stepped):
                    await self._handle_step(report)
        except (EOFError, ConnectionError):
            self._mark_dead(f"the engine process ended ({await self._connection.stop()})")
        except EngineDeadError as error:
            self._mark_dead(str(error))
        except Exception as error:
            log.exception("a report of the engine could not be handled")
            self._mark_dead(f"a report of the engine could not be handled: {error}")
        finally:
            self._mark_dead("the reader of the engine's outputs stopped")
            for watch in self._tasks[1:]:
                watch.cancel()
            await self._connection.stop()

    async def _end_when_silent(self) -> None:
        """End an engine of several ranks, which sends heartbeats, once it has sent none for the stall limit."""
        await wait_for_stall(self._stall_limit_s, lambda: self._num_reports, lambda: not self.sleeping, lambda: None)
        self._kill(f"the engine process gave no sign for {self._stall_limit_s:g} s (stall_limit)")

    async def _watch_progress(self) -> None:
        """Ask an idle engine for signs, and end one without progress if it is to be ended, with its stacks logged."""
        limit_s = self._stall_limit_s

        def ask() -> None:
            if not self.sleeping:
                self._send(messages.Ping())

        while True:
            await wait_for_stall(limit_s, lambda: self._num_signs, lambda: self.stalled_s > 0.0, ask)
            if self._on_stall == "end":
                self.log_stacks()
                await asyncio.sleep(limit_s / LOOKS_PER_LIMIT)  # for the stacks; the decision stands
                return self._kill(stall_reason(limit_s))

    def _kill(self, reason: str) -> None:
        """End the engine process at once."""
        log.error("%s; it is ended", reason)
        self._connection.kill()
        self._mark_dead(reason)

    def _handle_report(self, report: Report) -> None:
        self._num_reports += 1
        if isinstance(report, messages.Beat):
            return
        self._num_signs += 1
        self._last_progress_s = time.monotonic()
        if not isinstance(report, messages.Alive | messages.AdapterReply):  # sent by other threads: may follow the Idle
            self._is_idle = isinstance(report, messages.Idle)
        match report:
            case messages.Alive() | messages.Stepped():
                pass
            case messages.Idle(state):
                self._set_state(state)
                self._observer.on_idle(state)
            case messages.RequestRefused(request_id, message, param, code):
                self._streams.fail(request_id, InvalidRequestError(message, param=param, code=code))
            case messages.BlocksReply(command, block_map):
                self._pending.resolve(command, block_map)
            case (
                messages.AdapterReply(asked) | messages.ProfileReply(asked) | messages.SleepReply(asked)
                | messages.SessionReply(asked)
            ):  # fmt: skip
                self._pending.resolve(asked, report)
            case messages.Failed(_, message):
                raise EngineDeadError(f"the engine has failed: {message}")
            case _:
                raise AssertionError(f"not expected while running: {report}")

    async def _handle_step(self, step: messages.Stepped) -> None:
        """Process a step in slices, and let readers and connections run after each."""
        self._set_state(step.state)
        self._forecast.record_step(step, time.monotonic())
        whole: ProcessedStep | None = None
        for processed in self._streams.process(step):
            if processed.stopped:
                self._stop_at_strings(processed.stopped)
            if processed.failed:
                self._fail_outputs(processed.failed)
            if processed.ready:
                self._streams.wake(processed.ready)
            if whole is None:
                whole = processed
            else:
                whole.add(processed)
            if not processed.is_last:
                await asyncio.sleep(0)
        assert whole is not None, "the last slice is never left out"
        self._observer.on_step(step, whole)

    def _set_state(self, state: EngineState) -> None:
        """Store the engine's state, and count its pinned blocks in the limits of requests to come."""
        self.state, limits = state, self.inputs.limits
        if state.num_pinned_blocks != limits.num_pinned_blocks:
            self.inputs.limits = replace(limits, num_pinned_blocks=state.num_pinned_blocks)
        if self._pending.futures:
            self._pending.resolve_unpinned(state.pins)

    def _stop_at_strings(self, branches: Iterable[tuple[int, int]]) -> None:
        """Finish branches in the engine that a stop string has ended."""
        for request_id, index in branches:
            self._send(messages.Finish(request_id, index))

    def _fail_outputs(self, failed: Iterable[tuple[int, Exception]]) -> None:
        """Abort requests without an output because of an error, and fail their streams."""
        for request_id, error in failed:
            if isinstance(error, InvalidRequestError | DeadlineExceededError):
                log.info("request %d is refused: %s", request_id, error)
            else:
                log.error("request %d has failed", request_id, exc_info=error)
            self._send(messages.Abort(request_id))
            shown = RequestFailedError(f"the request's output could not be made: {error}")
            self._streams.fail(request_id, error if isinstance(error, EngineError) else shown)
