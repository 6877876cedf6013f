"""The engine process: `python -m quire.engine.process FD`, started by `quire.engine.child` and by nobody else.

One thread reads commands from the inherited socket, the other steps. While anything waits or runs, commands are taken
between steps; otherwise the process sleeps until one comes. Reports go out after each step; where the other side does
not read them, sending waits, and so does the engine.

The end of the stream means that the server is gone. There is nothing to save, so the process ends at once, also in the
middle of a step. Signals of the terminal and of service managers are the server's business: it drains, then closes.
"""

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

from quire.engine.options import EngineOptions
from quire.engine.wire import (
    FAULT,
    LENGTH_BYTES,
    Abort,
    Add,
    Command,
    EngineState,
    Finish,
    Idle,
    Located,
    Ready,
    Report,
    Start,
    Stepped,
    decode_command,
    failed,
    frame,
)
from quire.model.resolve import resolve_model

log = logging.getLogger(__name__)

KV_STATS_INTERVAL_S = 0.5   # they walk the whole pool: half a millisecond per 10,000 blocks
CHECK_INTERVAL_S = 60.0     # of an idle engine looking for lost blocks


class Connection:
    """Frames over a blocking socket. The end of the stream ends the process."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._input = connection.makefile("rb")

    def send(self, report: Report) -> None:
        """Send a report; wait while the other side does not read."""
        try:
            self._socket.sendall(frame(report))
        except OSError:
            _end()

    def receive(self) -> Command:
        """Wait for the next command."""
        try:
            length = int.from_bytes(self._read(LENGTH_BYTES), "big")
            return decode_command(self._read(length))
        except OSError:
            _end()

    def _read(self, num_bytes: int) -> bytes:
        read = self._input.read(num_bytes)
        if len(read) < num_bytes:
            _end()
        return read


class EngineLoop:
    """Commands in, steps, reports out."""

    def __init__(self, connection: Connection, options: EngineOptions) -> None:
        from quire.engine.assembly import assemble  # noqa: PLC0415 (loads torch: the folder is reported before)

        assembled = assemble(options)
        self._connection = connection
        self._engine = assembled.engine
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._kv_due_s = self._check_due_s = 0.0
        scheduler, model = self._engine.scheduler, assembled.model
        self.ready = Ready(
            limits=scheduler.limits,
            max_num_batched_tokens=scheduler.config.max_num_batched_tokens,
            vocab_size=model.spec.vocab_size,
            eos_token_ids=assembled.eos_token_ids,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            num_parameters=model.num_parameters,
            weights_bytes=model.weight_bytes,
            kv_bytes_per_token=assembled.kv_bytes_per_token,
        )

    def listen(self) -> None:
        """Queue commands as they come; runs in a thread of its own."""
        while True:
            self._commands.put(self._connection.receive())

    def run(self) -> None:
        """Step for as long as the process lives."""
        while True:
            self._take_commands()
            self._step()

    def _take_commands(self) -> None:
        """Take what has come; with nothing else to do, say so and wait for more."""
        while not self._commands.empty():
            self._obey(self._commands.get())
        if not self._engine.scheduler.has_requests:
            self._check_now_and_then()
            self._connection.send(Idle(self._state(with_kv=True)))
            while not self._engine.scheduler.has_requests:
                self._obey(self._commands.get())

    def _obey(self, command: Command) -> None:
        match command:
            case Add(request):
                self._engine.add(request)
            case Abort(request_id):
                self._engine.abort(request_id)
            case Finish(request_id, index):
                self._engine.finish(request_id, index)
            case Start():
                raise AssertionError("started twice")

    def _step(self) -> None:
        engine, started_s = self._engine, time.monotonic()
        deltas = engine.step()
        with_kv = started_s >= self._kv_due_s
        if with_kv:
            self._kv_due_s = started_s + KV_STATS_INTERVAL_S
        self._connection.send(
            Stepped(started_s, engine.num_computed_tokens, engine.admissions, deltas, self._state(with_kv=with_kv))
        )

    def _state(self, *, with_kv: bool) -> EngineState:
        scheduler = self._engine.scheduler
        return EngineState(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            num_recomputed_tokens=scheduler.num_recomputed_tokens,
            kv=self._engine.kv_stats() if with_kv else None,
        )

    def _check_now_and_then(self) -> None:
        """Look for lost blocks and rows while there is time: a leak shall be found by us, not by users."""
        if time.monotonic() >= self._check_due_s:
            self._check_due_s = time.monotonic() + CHECK_INTERVAL_S
            self._engine.scheduler.check()


def main() -> None:
    """Serve the socket whose number is the only argument."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(levelname)s engine: %(message)s")
    connection = Connection(socket.socket(fileno=int(sys.argv[1])))
    start = connection.receive()
    assert isinstance(start, Start), f"the first command must be Start, got {start}"
    try:
        connection.send(Located(str(resolve_model(start.options.model))))
        loop = EngineLoop(connection, start.options)
        threading.Thread(target=loop.listen, name="commands", daemon=True).start()
        connection.send(loop.ready)
        loop.run()
    except Exception as error:  # the server has to know why: its users are waiting
        message = failed(error)
        if message.kind == FAULT:
            log.exception("the engine ends")
        connection.send(message)
        sys.exit(1)


def _end() -> NoReturn:
    """End the process, whatever its threads are doing."""
    os._exit(0)


if __name__ == "__main__":
    main()
