"""The engine process: `python -m quire.engine.process FD`, started by `quire.engine.launcher` and by nobody else.

One thread reads commands from the inherited socket, the other steps. While anything waits or runs, commands are taken
between steps; otherwise the process sleeps until one comes. A report goes out after each step; where the other side
does not read them, sending waits, and so does the engine. Commands are always read, so the two never wait for each
other.

The end of the stream means that the server is gone. There is nothing to save, so the process ends at once, also while
it loads and in the middle of a step. Signals of the terminal and of service managers are the server's business: it
drains, then closes. Here they are blocked from the start (`quire.engine.launcher`).
"""

import faulthandler
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
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NoReturn

from quire.core.errors import InvalidRequestError
from quire.core.frames import frame, read_frame
from quire.core.outputs import KVStats
from quire.engine import messages
from quire.engine.engine import Engine
from quire.engine.heartbeat import Heartbeat
from quire.engine.messages import EngineState, Report
from quire.engine.stall_detector import LayerCost, StallDetector
from quire.model.footprint import num_layer_weights
from quire.model.resolve import resolve_model

if TYPE_CHECKING:
    from quire.engine.assembly import AssembledEngine

log = logging.getLogger(__name__)

IDLE_CHECK_DELAY_S = 10.0      # idle time before the check for leaked blocks, which takes a second for 500,000 blocks
OWNER_COUNT_INTERVAL_S = 0.5   # at least, between two counts of blocks by owner, which walk all block tables ...
OWNER_COUNT_TIME_SHARE = 0.01  # ... and take no more of the time than this
MAX_ADD_BYTES_PER_STEP = 1 << 18  # of Add messages handled between two steps: 2 ms of decoding and packing


class Connection:
    """Frames over a blocking socket. The end of the stream ends the process, whatever its threads are doing."""

    def __init__(self, connection: socket.socket) -> None:
        self.exit_status = 0  # of the process, when the stream has ended
        self._socket, self._sending = connection, threading.Lock()
        self._input = connection.makefile("rb")

    def send(self, report: Report) -> None:
        """Send a report; wait while the other side does not read."""
        message = frame(report)
        try:
            with self._sending:
                self._socket.sendall(message)
        except OSError:
            self._end()

    def read_into(self, commands: SimpleQueue[bytes]) -> NoReturn:
        """Queue commands as they come; for a thread of its own."""
        try:
            while (command := read_frame(self._input)) is not None:
                commands.put(command)
        except ConnectionError:
            pass  # the server died with reports unread
        except Exception:
            log.exception("commands cannot be read")
            self.exit_status = 1
        self._end()

    def _end(self) -> NoReturn:
        """End the process without tidying up: the other thread may be in the middle of anything."""
        os._exit(self.exit_status)


class EngineLoop:
    """Commands in, steps, reports out. Every change of what waits or runs is followed by a report."""

    def __init__(
        self, engine: Engine, commands: SimpleQueue[bytes], send: Callable[[Report], None], heartbeat: Heartbeat
    ) -> None:
        self._engine, self._commands, self._send, self._heartbeat = engine, commands, send, heartbeat
        self._owners_due_s = 0.0
        self._quiet_since_s = time.monotonic()  # the end of the last step
        self._is_checked = False                # since then
        self._checking: Iterator[None] | None = None  # what is left of the check under way
        self._pending_adds = deque[bytes]()          # messages of requests that are not added yet, in order
        self._aborted: set[int] = set()         # ids of requests among them, perhaps

    def run(self) -> NoReturn:
        """Step for as long as the process lives."""
        while True:
            while not self._commands.empty():
                self._handle_message(self._commands.get())
            self._add_pending()
            if self._engine.scheduler.has_requests:
                self._step()
            elif not self._pending_adds:
                self._wait_for_command()

    def _handle_message(self, message: bytes) -> None:
        """Obey a command. A request is added later, so that a burst does not hold up a step, or an abort behind it."""
        if messages.is_add(message):
            self._pending_adds.append(message)
        else:
            self._handle_command(message)

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
        if not isinstance(command, messages.GetBlocks):
            self._checking = None               # begins anew: what it has seen changes
        match command:
            case messages.Add(request):
                if request.request_id in self._aborted:
                    return
                try:
                    self._engine.add(request)
                except InvalidRequestError as error:
                    self._send(messages.Refused(request.request_id, str(error), error.param, error.code))
            case messages.Abort(request_id):
                if not self._engine.abort(request_id) and self._pending_adds:
                    self._aborted.add(request_id)
            case messages.Finish(request_id, index):
                self._engine.finish(request_id, index)
            case messages.GetBlocks(_, first, count, tier):
                self._send(messages.BlocksReply(command, self._engine.block_map(first, count, tier)))
            case messages.Vocabulary(token_bytes):
                self._engine.token_bytes = lambda: token_bytes
            case messages.Start():
                raise AssertionError("started twice")

    def _step(self) -> None:
        self._heartbeat.resume()
        engine, started_s = self._engine, time.monotonic()
        try:
            deltas = engine.step()
        except Exception as error:
            log.exception("a step has failed; the requests that it computed for are computed again in groups")
            deltas = engine.recover(error)
        self._quiet_since_s, self._is_checked = time.monotonic(), False
        state, preempted = self._state(), engine.scheduler.preempted
        self._send(messages.Stepped(started_s, engine.num_computed_tokens, engine.admissions, deltas, state, preempted))

    def _wait_for_command(self) -> None:
        """Say that all is done, and sleep until the next command.

        When nothing has run for a while, whoever has asked what meanwhile, look once for lost blocks and rows: a leak
        shall be found by us, not by users. A command waits for a slice of that, about a millisecond.
        """
        self._heartbeat.pause()
        self._send(messages.Idle(self._state()))
        if not self._is_checked:
            pause_s = self._quiet_since_s + IDLE_CHECK_DELAY_S - time.monotonic()
            if pause_s > 0:
                with suppress(Empty):
                    return self._handle_message(self._commands.get(timeout=pause_s))
            while self._check_slice() and self._commands.empty():
                pass
        return self._handle_message(self._commands.get())

    def _check_slice(self) -> bool:
        """Go on with the check for lost blocks; False if that was the last of it."""
        if self._checking is None:
            self._checking = self._engine.scheduler.checking()
        for _ in self._checking:
            return True
        self._is_checked, self._checking = True, None
        return False

    def _state(self) -> EngineState:
        scheduler = self._engine.scheduler
        return EngineState(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + scheduler.num_held,
            num_swapped=len(scheduler.swapped),
            kv=self._kv_stats(),
            pins=scheduler.cache.pins,
            num_pinned_blocks=scheduler.limits.num_pinned_blocks,
            num_running_seqs=scheduler.num_running_seqs,
            waits_for=scheduler.wait_reason,
        )

    def _kv_stats(self) -> KVStats:
        """Return the state of the cache, and from time to time, at rest always, who holds it."""
        started_s, is_at_rest = time.monotonic(), not self._engine.scheduler.has_requests
        if started_s < self._owners_due_s and not is_at_rest:
            return self._engine.kv_stats(by_owner=False)
        stats = self._engine.kv_stats()
        ended_s = time.monotonic()
        pause_s = 0.0 if is_at_rest else max(OWNER_COUNT_INTERVAL_S, (ended_s - started_s) / OWNER_COUNT_TIME_SHARE)
        self._owners_due_s = ended_s + pause_s
        return stats


def main() -> None:
    """Serve the socket whose number is the only argument."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if sys.stderr is not None:  # closed, if the server's is
        faulthandler.register(signal.SIGUSR1)  # whoever finds that nothing goes on asks where every thread stands
    logging.basicConfig(format="%(asctime)s %(levelname)s engine: %(message)s")
    threading.excepthook = _exit_with_thread
    connection, commands = Connection(socket.socket(fileno=int(sys.argv[1]))), SimpleQueue[bytes]()
    listener = threading.Thread(target=connection.read_into, args=(commands,), name="commands", daemon=True)
    listener.start()
    try:
        serve(connection, commands)
    except Exception as error:  # the server has to know why: its users are waiting
        message = messages.failed(error)
        if message.kind == messages.FAULT:
            log.exception("the engine ends")
        connection.exit_status = 1
        connection.send(message)
        listener.join()  # until the server has read all of it: what it still sends would otherwise break its stream


def _exit_with_thread(died: threading.ExceptHookArgs) -> NoReturn:
    """End the process with a thread of it, which nobody would miss before it is too late."""
    log.critical("a thread of the engine has died", exc_info=died.exc_value)
    os._exit(1)


def serve(connection: Connection, commands: SimpleQueue[bytes]) -> NoReturn:
    """Load what the first command says, then obey."""
    start = messages.decode_command(commands.get())
    assert isinstance(start, messages.Start), f"the first command must be Start, got {start}"
    folder = str(resolve_model(start.options.model))
    connection.send(messages.Located(folder))
    gc.disable()  # what is made from here on stays
    from quire.engine.assembly import assemble  # noqa: PLC0415 (loads torch; the server reads its tokenizer meanwhile)

    assembled = assemble(replace(start.options, model=folder), loads_tokenizer=False)
    gc.freeze()  # else a full collection looks through all of torch: 75 ms in the middle of a step
    gc.enable()
    connection.send(assembled.ready)
    heartbeat = _make_heartbeat(assembled, lambda: connection.send(messages.Alive()))
    heartbeat.start()
    EngineLoop(assembled.engine, commands, connection.send, heartbeat).run()


def _make_heartbeat(assembled: "AssembledEngine", beat: Callable[[], None]) -> Heartbeat:
    """Return the heartbeat of a model. A GPU's layers are counted at launch, so their rate tells nothing."""
    progress, spec = assembled.model.progress, assembled.model.spec
    if assembled.model.device.type != "cpu":
        return Heartbeat(lambda: int(progress[0]), beat)
    per_token, per_pair = 2.0 * num_layer_weights(spec) / spec.num_layers, 4.0 * spec.num_heads * spec.head_dim
    detector = StallDetector(LayerCost(per_token, per_pair), os.cpu_count() or 1, time.monotonic)
    assembled.engine.on_submit = detector.begin_step
    return Heartbeat(lambda: int(progress[0]), beat, detector.is_on_time)


if __name__ == "__main__":
    main()
