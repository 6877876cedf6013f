"""An engine process without a model, with limits that no small model has: the real process over the fake executor.

`python scripted_engine.py FD [POINT NTH]`. The executor fails from its NTH step on ("step"), or one message cannot be
sent or received, the NTH ("send", "receive"). Started by `spawn_scripted`.
"""

import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

from quire.core.frames import frame
from quire.core.plan import GraphCounts, StepResult
from quire.engine import messages
from quire.engine.engine import Engine
from quire.engine.launcher import EngineProcess
from quire.engine.messages import Located, Ready, Start
from quire.engine.options import EngineOptions
from quire.engine.processes import engine_process as process
from quire.engine.processes.liveness import Heartbeat

BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS = 16, 40_000, 64
FAULT = "the device is gone"


def spawn_scripted(point: str = "", nth: int = 0) -> EngineProcess:
    """Start the process; it fails at the `nth` hit of a point, if one is named."""
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), point, str(nth)],
            pass_fds=[theirs.fileno()],
            env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        )
    ours.sendall(frame(Start(EngineOptions())))
    return EngineProcess(child, ours)


def serve(connection: process.Connection, commands: SimpleQueue[bytes]) -> NoReturn:
    """What the engine process does once it listens, without a model to load."""
    from support.fake_executor import VOCAB_SIZE
    from support.scheduling import Harness

    class FailingExecutor:
        """Fails from some step on, for good."""

        max_steps_in_flight, graphs = 1, GraphCounts()

        def __init__(self) -> None:
            self.submit = harness.executor.submit
            self._num_steps = 0

        def collect(self) -> StepResult:
            self._num_steps += 1
            if sys.argv[2] == "step" and self._num_steps >= int(sys.argv[3]):
                raise RuntimeError(FAULT)
            return harness.executor.collect()

    commands.get()
    with tempfile.TemporaryDirectory() as folder:  # without a tokenizer
        connection.send(Located(folder))
    harness = Harness(NUM_BLOCKS, BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS, budget=1 << 20)
    limits = harness.scheduler.limits
    connection.send(Ready(limits, 1 << 20, VOCAB_SIZE, frozenset(), "none", "none", 0, 0, 0))
    engine, heartbeat = Engine(harness.scheduler, FailingExecutor()), Heartbeat(lambda: 0, lambda: None)
    process.EngineLoop(engine, commands, connection.send, heartbeat).run()


def failing(inner: Callable[..., Any], nth: int) -> Callable[..., Any]:
    """Return a function that fails at its `nth` call."""
    hits = count(1)

    def call(*arguments: Any) -> Any:  # noqa: ANN401 (of whatever it stands for)
        if next(hits) == nth:
            raise RuntimeError(FAULT)
        return inner(*arguments)

    return call


if __name__ == "__main__":
    if sys.argv[2] in ("send", "receive"):
        owner, name = (process, "frame") if sys.argv[2] == "send" else (messages, "decode_command")
        setattr(owner, name, failing(getattr(owner, name), int(sys.argv[3])))
    sys.path.insert(0, str(Path(__file__).parents[1]))
    process.serve = serve
    process.main()
