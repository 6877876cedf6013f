"""The engine process: `python -m quire.engine.processes.engine_process FD`, started by `quire.engine.launcher`.

One thread reads commands from the inherited socket, the other runs steps. While requests wait or run, commands are
handled between steps; otherwise the process sleeps until the next one. A report is sent after each step; if the server
does not read, sending blocks, and so does the engine. Commands are always read, so the two processes cannot deadlock.

The end of the stream means that the server ends. The process ends at once, also while it loads and during a step; while
the server waits for it, once what is queued for the disk is written. SIGINT and SIGTERM are blocked from the start
(`quire.engine.launcher`): the server handles them, drains, then closes the socket.
"""

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NoReturn

import msgspec

from quire.core import logs
from quire.core.errors import InvalidRequestError, ModelError
from quire.core.frames import frame, has_room, read_frame
from quire.core.images import KeptPixels
from quire.core.lora import Adapter
from quire.core.outputs import KVStats
from quire.core.sequence import Request
from quire.engine import messages
from quire.engine.engine import NO_ADAPTERS, Engine
from quire.engine.kv_disk import DRAIN_S, KVDisk
from quire.engine.launcher import Start
from quire.engine.messages import EngineState, Report
from quire.engine.processes.liveness import Heartbeat, LayerCost, StallDetector
from quire.engine.processes.profiler import Profiler
from quire.extension.isas import threads_of_kernels
from quire.model.resolve import resolve_model, resolve_tokenizer

if TYPE_CHECKING:
    from quire.engine.assembly import AssembledEngine
    from quire.engine.sleeping import SleepingEngine
    from quire.model.decoder import Decoder

log = logging.getLogger(__name__)

IDLE_CHECK_DELAY_S = 10.0      # idle time before the check for leaked blocks, which takes a second for 500,000 blocks
OWNER_COUNT_INTERVAL_S = 0.5   # minimum between two counts of blocks by owner, which walk all block tables ...
OWNER_COUNT_TIME_SHARE = 0.01  # ... and their maximum share of the time
DISK_WAIT_S = 0.005               # between two looks at the disk tier while the engine is idle
LEASE_WAIT_S = 0.05               # the same, at leases of other engines
MAX_ADD_BYTES_PER_STEP = 1 << 18  # Add messages handled between two steps: 4 ms of decoding if all are short
MAX_COMMANDS_PER_STEP = 512       # others handled between two steps: 3 to 4 ms if all abort a request


class Connection:
    """Frames over a blocking socket. The thread that reads finds the end of the stream, and ends the process."""

    def __init__(self, connection: socket.socket) -> None:
        self.exit_status = 0  # exit status of the process, when the stream has ended
        self.on_end: Callable[[], None] = lambda: None  # called before, by the thread that reads
        self._socket, self._sending, self._server = connection, threading.Lock(), os.getppid()
        self._input = connection.makefile("rb")

    def send(self, report: Report) -> None:
        """Send a report; blocks while the server does not read."""
        message = frame(report)
        with suppress(OSError), self._sending:  # the thread that reads finds the end
            self._socket.sendall(message)

    @property
    def is_awaited(self) -> bool:
        """Return whether the server, which has closed the stream, waits for the end of a process without a fault."""
        return not self.exit_status and os.getppid() == self._server

    def beat(self) -> None:
        """Send a heartbeat, unless it would have to wait: then a report has just been sent, or is not read."""
        if self._sending.acquire(blocking=False):
            with suppress(OSError, ValueError):  # the thread that reads finds the end
                if has_room(self._socket):
                    self._socket.sendall(frame(messages.Beat()))
            self._sending.release()

    def read_into(self, commands: SimpleQueue[bytes]) -> NoReturn:
        """Read commands into a queue, in a thread of its own."""
        try:
            while (command := read_frame(self._input)) is not None:
                commands.put(command)
        except ConnectionError:
            pass  # the server died with reports unread
        except Exception:
            log.exception("commands cannot be read")
            self.exit_status = 1
        self.on_end()
        os._exit(self.exit_status)  # without cleanup: the other thread may be in the middle of a step


_LEAVES_BLOCKS = (
    messages.GetBlocks | messages.ReadAdapter | messages.StartProfile | messages.StopProfile | messages.Ping
)


class EngineLoop:
    """Handles commands, runs steps, sends reports. Every change of the queues is followed by a report."""

    def __init__(
        self, engine: Engine, commands: SimpleQueue[bytes], send: Callable[[Report], None], heartbeat: Heartbeat,
        timed: "Decoder | None" = None, kept_pixels: KeptPixels | None = None,
    ) -> None:  # fmt: skip
        self._kept_pixels = kept_pixels or KeptPixels()
        self._timed = timed                     # the model of which profiles have the ops
        self._profiler: Profiler | None = None  # while a profile is taken
        self._engine, self._commands, self._send, self._heartbeat = engine, commands, send, heartbeat
        self._owners_due_s = 0.0
        self._quiet_since_s = time.monotonic()  # the end of the last step
        self._is_checked = False                # since then
        self._checking: Iterator[None] | None = None  # the rest of the check for leaks
        self._sleep: messages.Sleep | None = None  # the command that ends the loop
        self._pending_adds = deque[bytes]()          # messages of requests not added yet, in order
        self._aborted: set[int] = set()         # ids that may be among them

    def run(self) -> messages.Sleep:
        """Step until the engine is told to sleep, which it can: no request is left."""
        while self._sleep is None:
            self._handle_commands()
            self._add_pending()
            if self._engine.scheduler.has_requests:
                self._step()
            elif self._sleep is None and not self._pending_adds and self._commands.empty():
                self._wait_for_command()
        return self._sleep

    def _handle_commands(self) -> None:
        """Handle commands that have arrived, in order, up to a bound on the work between two steps."""
        num_left = MAX_COMMANDS_PER_STEP
        while num_left and not self._commands.empty():
            num_left -= not self._handle_message(self._commands.get())

    def _handle_message(self, message: bytes) -> bool:
        """Handle a command, or return True if it adds a request.

        Requests are added later, so that a burst delays neither a step nor an abort behind it.
        """
        if messages.is_add(message):
            self._pending_adds.append(message)
            return True
        self._handle_command(message)
        return False

    def _add_pending(self) -> None:
        """Add requests that have arrived, in order, up to a bound on the work between two steps."""
        num_bytes = 0
        while self._pending_adds and num_bytes < MAX_ADD_BYTES_PER_STEP:
            message = self._pending_adds.popleft()
            num_bytes += len(message)
            self._handle_command(message)
        if not self._pending_adds:
            self._aborted.clear()

    def _handle_command(self, message: bytes) -> None:
        command = messages.decode_command(message)
        if not isinstance(command, _LEAVES_BLOCKS):
            self._checking = None               # restart the check: blocks are about to change
        match command:
            case messages.AddRequest(request):
                request.images = request.images and self._kept_pixels.received(request.images)
                if request.request_id in self._aborted:
                    return
                try:
                    self._engine.add(request, _age_s(request))
                except InvalidRequestError as error:
                    self._send(messages.RequestRefused(request.request_id, str(error), error.param, error.code))
            case messages.Abort(request_id):
                if not self._engine.abort(request_id) and self._pending_adds:
                    self._aborted.add(request_id)
            case messages.Finish(request_id, index):
                self._engine.finish(request_id, index)
            case messages.GetBlocks(_, first, count, tier):
                self._send(messages.BlocksReply(command, self._engine.block_map(first, count, tier)))
            case messages.ReadAdapter(_, folder):
                self._read_adapter(command, folder)
            case messages.StartProfile() | messages.StopProfile():
                self._profile(command)
            case messages.SaveSession() | messages.OpenSession() | messages.CloseSession():
                self._move_session(command)
            case messages.Sleep() | messages.Wake():
                self._fall_asleep(command)
            case messages.Ping():
                pass                                # a report follows every command
            case Start():
                raise AssertionError("started twice")

    def _profile(self, command: messages.StartProfile | messages.StopProfile) -> None:
        """Start a profile, or end it and send it."""
        before = self._profiler
        if isinstance(command, messages.StartProfile):
            self._profiler = before or Profiler(self._timed)
            return self._send(messages.ProfileReply(command, before is None))
        self._profiler = None
        profile = None if before is None else before.stop()
        return self._send(messages.ProfileReply(command, profile is not None, profile))

    def _move_session(
        self, command: messages.SaveSession | messages.OpenSession | messages.CloseSession
    ) -> None:
        """Begin to save a session, or to load from a saved one, or end that; the answer is sent when it is done."""
        sessions = None if self._engine.disk is None else self._engine.disk.sessions
        assert sessions is not None, "a server without kv_disk_dir saves no session"
        if isinstance(command, messages.CloseSession):
            return sessions.close_session(command.request_id)

        def reply(blocks: messages.SessionBlocks) -> None:
            self._send(messages.SessionReply(command, blocks))

        if isinstance(command, messages.SaveSession):
            return sessions.save(command.request_id, Path(command.folder), reply)
        folder = Path(command.folder)
        return sessions.open(command.request_id, folder, command.num_blocks, command.identity, reply)

    def _fall_asleep(self, command: messages.Sleep | messages.Wake) -> None:
        """End the loop, unless requests are left; the engine is awake until then."""
        while self._pending_adds:
            self._add_pending()                 # aborted ones are not added
        if isinstance(command, messages.Wake):
            self._send(messages.SleepReply(command))
        elif self._engine.scheduler.has_requests:
            error = InvalidRequestError("requests wait or run: an engine sleeps without any")
            self._send(messages.SleepReply(command, messages.failed(error)))
        else:
            self._sleep = command

    def _read_adapter(self, command: messages.ReadAdapter, folder: str) -> None:
        """Have an adapter read; the thread that reads it sends the answer."""
        adapters = self._engine.adapters
        if adapters is None:
            return self._send(messages.AdapterReply(command, None, NO_ADAPTERS))

        def reply(read: "Future[Adapter]") -> None:
            error = read.exception()
            if error is None:
                return self._send(messages.AdapterReply(command, read.result()))
            if not isinstance(error, ModelError):
                log.error("an adapter cannot be read", exc_info=error)
            text = str(error) if isinstance(error, ModelError) else f"the adapter cannot be read: {error!r}"
            return self._send(messages.AdapterReply(command, None, messages.failed(ModelError(text)).message))

        return adapters.read(folder).add_done_callback(reply)

    def _step(self) -> None:
        self._heartbeat.resume()
        engine, started_s = self._engine, time.monotonic()
        try:
            deltas = engine.step()
        except Exception as error:
            log.exception("a step has failed; the requests that it computed for are computed again in groups")
            deltas = engine.recover(error)
        self._quiet_since_s, self._is_checked = time.monotonic(), False
        state, preempted = self._state(), engine.scheduler.step.preempted
        self._send(
            messages.Stepped(
                started_s, engine.num_computed_tokens, engine.admissions, deltas, state, preempted, engine.timing,
                [] if engine.scheduler.measured is None else engine.take_block_lives(),
                engine.prompts_left.chunks,
            )
        )

    def _wait_for_command(self) -> None:
        """Report that the engine is idle, and wait for the next command.

        After IDLE_CHECK_DELAY_S without a step, check once for leaked blocks and rows, in slices of about a
        millisecond, so that a command does not wait longer than that.
        """
        self._heartbeat.pause()
        self._send(messages.Idle(self._state()))
        if self._engine.num_moves_left and not self._finish_moves():
            return
        if not self._is_checked:
            pause_s = self._quiet_since_s + IDLE_CHECK_DELAY_S - time.monotonic()
            if pause_s > 0:
                with suppress(Empty):
                    self._handle_message(self._commands.get(timeout=pause_s))
                    return
            while self._check_slice() and self._commands.empty():
                pass
        self._handle_message(self._commands.get())

    def _finish_moves(self) -> bool:
        """Write what the disk tier has queued, and wait for the ends of leases; False if a command comes meanwhile."""
        engine = self._engine
        while engine.num_moves_left:
            engine.move_blocks()
            is_writing = engine.disk is not None and engine.disk.num_left > 0
            with suppress(Empty):
                self._handle_message(self._commands.get(timeout=DISK_WAIT_S if is_writing else LEASE_WAIT_S))
                return False
        self._send(messages.Idle(self._state()))
        return True

    def _check_slice(self) -> bool:
        """Run a slice of the check for leaked blocks; return False after the last one."""
        if self._checking is None:
            self._checking = self._engine.scheduler.checking()
        for _ in self._checking:
            return True
        self._is_checked, self._checking = True, None
        return False

    def _state(self) -> EngineState:
        return self._engine.state(self._kv_stats())

    def _kv_stats(self) -> KVStats:
        """Return the state of the cache, with blocks by owner if the engine is idle or the last count is old."""
        started_s, is_at_rest = time.monotonic(), not self._engine.scheduler.has_requests
        if started_s < self._owners_due_s and not is_at_rest:
            return self._engine.kv_stats(by_owner=False)
        stats = self._engine.kv_stats()
        ended_s = time.monotonic()
        pause_s = 0.0 if is_at_rest else max(OWNER_COUNT_INTERVAL_S, (ended_s - started_s) / OWNER_COUNT_TIME_SHARE)
        self._owners_due_s = ended_s + pause_s
        return stats


_PING = msgspec.msgpack.encode(messages.Ping())


def _age_s(request: Request) -> float:
    """Return the seconds since the server received a request."""
    return 0.0 if request.received_s is None else time.monotonic() - request.received_s


def _write_stacks() -> NoReturn:
    """Write the stacks of all threads whenever the server's stall watch requests them by SIGUSR1.

    With Python's lock, unlike a handler of the signal: that would follow frames which other threads change meanwhile,
    and has crashed the engine. A thread that keeps the lock is not seen, but kernels give it back.
    """
    while True:
        signal.sigwait({signal.SIGUSR1})
        logs.log_stacks(log)


def main() -> None:
    """Serve the socket with the number given as the only argument."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # threads inherit the mask
    threading.Thread(target=_write_stacks, name="stacks", daemon=True).start()
    logs.set_up("engine")
    threading.excepthook = _exit_with_thread
    connection, commands = Connection(socket.socket(fileno=int(sys.argv[1]))), SimpleQueue[bytes]()
    listener = threading.Thread(target=connection.read_into, args=(commands,), name="commands", daemon=True)
    listener.start()
    try:
        serve(connection, commands)
    except Exception as error:  # the server reports the reason to its clients
        message = messages.failed(error)
        if message.kind == messages.FAULT:
            log.exception("the engine ends")
        connection.exit_status = 1
        connection.send(message)
        listener.join()  # until the server closes: unread commands would reset the stream


def _exit_with_thread(died: threading.ExceptHookArgs) -> NoReturn:
    """End the process when one of its threads dies: without it, requests would hang."""
    log.critical("a thread of the engine has died", exc_info=died.exc_value)
    os._exit(1)


def serve(connection: Connection, commands: SimpleQueue[bytes]) -> NoReturn:
    """Load the model of the first command, then handle commands."""
    start = messages.decode_command(commands.get())
    assert isinstance(start, Start), f"the first command must be Start, got {start}"
    folder = resolve_model(start.options.model, start.options.model_files, start.options.revision)
    text_source = resolve_tokenizer(start.options.tokenizer, folder, start.options.tokenizer_revision)
    connection.send(messages.Located(str(text_source)))
    gc.disable()  # objects made from here on are permanent
    from quire.engine.assembly import assemble  # noqa: PLC0415 (for a second; the server reads its tokenizer meanwhile)

    assembled = assemble(replace(start.options, model=str(folder)), loads_tokenizer=False, member=start.member)
    report: Report = assembled.ready
    from quire.engine.sleeping import SleepingEngine  # noqa: PLC0415 (imports what is loaded by now)

    kept_pixels = KeptPixels()
    while True:
        asked = _serve_awake(assembled, report, connection, commands, kept_pixels)
        sleeping = SleepingEngine(assembled, asked.level, loads_tokenizer=False)
        del assembled
        assembled, report = _serve_asleep(sleeping, asked, connection, commands)


def _serve_awake(
    assembled: "AssembledEngine", report: Report, connection: Connection, commands: SimpleQueue[bytes],
    kept_pixels: KeptPixels,
) -> messages.Sleep:
    """Send the report that the engine is there, and serve commands until one tells it to sleep."""
    if assembled.ranks is not None:
        connection.on_end = assembled.ranks.dismiss
        assembled.ranks.on_lost = partial(end_with, connection)
        if assembled.ranks.lost is not None:
            raise assembled.ranks.lost
    gc.freeze()  # else a full collection looks through all that was loaded, in the middle of a step
    gc.enable()
    if assembled.engine.disk is not None:
        connection.on_end = partial(_finish_writing, connection, assembled.engine.disk)
    if assembled.engine.peers is not None:
        assembled.engine.peers.watch(lambda: commands.put(_PING))   # metrics tell of engines that come and go
    connection.send(report)
    if assembled.ranks is not None:
        assembled.ranks.on_beat = connection.beat
    from quire.model.decoder import Decoder  # noqa: PLC0415 (loaded by now)

    model = assembled.model
    timed = model if isinstance(model, Decoder) and str(model.device) == "cpu" else None   # a GPU's ops run later
    heartbeat = _make_heartbeat(assembled, lambda: connection.send(messages.Alive()))
    heartbeat.start()
    try:
        return EngineLoop(assembled.engine, commands, connection.send, heartbeat, timed, kept_pixels).run()
    except Exception as error:
        assembled.engine.report_fault(error)        # one that no step has raised: leaked blocks, a broken invariant
        raise
    finally:
        heartbeat.stop()
        gc.unfreeze()


def _serve_asleep(
    sleeping: "SleepingEngine", asked: messages.Sleep, connection: Connection, commands: SimpleQueue[bytes]
) -> "tuple[AssembledEngine, Report]":
    """Free the memory, and answer commands until one wakes the engine; return it, and the answer to that one."""
    connection.on_end = lambda: None
    sleeping.free()
    connection.send(messages.SleepReply(asked))
    while True:
        connection.send(messages.Idle(EngineState(0, 0, 0)))
        command = messages.decode_command(commands.get())
        if isinstance(command, messages.Sleep):
            sleeping.deepen(command.level)
            sleeping.free()
            connection.send(messages.SleepReply(command))
        elif isinstance(command, messages.Wake):
            gc.disable()    # as at start
            try:
                woken, error = sleeping.wake(command.tags), None
            except Exception as failure:
                woken, error = None, messages.failed(failure)
                is_fault = error.kind == messages.FAULT
                log.error("the engine sleeps on: %s", failure, exc_info=failure if is_fault else None)
            if woken is not None:
                return woken, messages.SleepReply(command)
            gc.enable()
            sleeping.free()     # what a failure has left, and what loading took
            connection.send(messages.SleepReply(command, error))


def _finish_writing(connection: Connection, disk: KVDisk) -> None:
    """Close the store of a disk tier, once the thread of the steps has written what is queued.

    It has DRAIN_S, and while the server is there to wait for it: another one may want the folder. Looks are counted, as
    the machine may stop this process for a while.
    """
    for _ in range(round(DRAIN_S / DISK_WAIT_S)):
        if not (disk.num_left and connection.is_awaited):
            break
        time.sleep(DISK_WAIT_S)
    disk.close_store()


def end_with(connection: Connection, error: Exception) -> None:
    """Report the end of the engine to the server, which closes the socket: that ends the process."""
    connection.exit_status = 1
    connection.send(messages.failed(error))


def _make_heartbeat(assembled: "AssembledEngine", beat: Callable[[], None]) -> Heartbeat:
    """Return the heartbeat of a model. A GPU's layers are counted at launch, so their rate tells nothing."""
    progress = assembled.model.progress
    if str(assembled.model.device) != "cpu":
        return Heartbeat(lambda: int(progress[0]), beat)
    # This engine's, not the machine's: engines divide its CPUs, and so do the ranks of one.
    tower = getattr(assembled.model, "vision", None)
    cost = LayerCost(*assembled.model.layer_flops, None if tower is None else tower.layer_flops)
    detector = StallDetector(cost, threads_of_kernels(), time.monotonic)
    assembled.engine.on_submit = detector.begin_step
    return Heartbeat(lambda: int(progress[0]), beat, detector.is_on_time)


if __name__ == "__main__":
    main()
