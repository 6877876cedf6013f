"""An engine process without a model, with limits that no small model has: the real process over the fake executor.

`python scripted_engine.py FD [STEP]`; the executor fails from step STEP on. Started by `spawn_scripted`.
"""

import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

from quire.core.frames import frame
from quire.core.plan import StepResult
from quire.engine import process
from quire.engine.child import EngineChild
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.engine.pulse import Pulse
from quire.engine.wire import Located, Ready, Start

BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS = 16, 40_000, 64
FAULT = "the device is gone"


def spawn_scripted(failing_step: int | None = None) -> EngineChild:
    """Start the process."""
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = [str(theirs.fileno()), *([] if failing_step is None else [str(failing_step)])]
        child = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            pass_fds=[theirs.fileno()],
            env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        )
    ours.sendall(frame(Start(EngineOptions())))
    return EngineChild(child, ours)


def serve(connection: process.Connection, commands: SimpleQueue[bytes]) -> NoReturn:
    """What the engine process does once it listens, without a model to load."""
    from support.fake_executor import VOCAB_SIZE
    from support.scheduling import Harness

    class FailingExecutor:
        """Fails from some step on, for good."""

        def __init__(self) -> None:
            self.submit = harness.executor.submit
            self._num_steps = 0

        def collect(self) -> StepResult:
            self._num_steps += 1
            if sys.argv[2:] and self._num_steps >= int(sys.argv[2]):
                raise RuntimeError(FAULT)
            return harness.executor.collect()

    commands.get()
    with tempfile.TemporaryDirectory() as folder:  # without a tokenizer
        connection.send(Located(folder))
    harness = Harness(NUM_BLOCKS, BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS, budget=1 << 20)
    limits = harness.scheduler.limits
    connection.send(Ready(limits, 1 << 20, VOCAB_SIZE, frozenset(), "none", "none", 0, 0, 0))
    engine, pulse = Engine(harness.scheduler, FailingExecutor()), Pulse(lambda: 0, lambda: None)
    process.EngineLoop(engine, commands, connection.send, pulse).run()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    process.serve = serve
    process.main()
