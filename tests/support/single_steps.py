"""Engine processes whose steps a test runs one by one, so that a request is amid its answer for as long as it looks."""

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.core.frames import frame
from quire.engine.launcher import EngineProcess, Start
from quire.engine.options import EngineOptions
from support.forked_engines import fork_module
from support.server import is_stopped, wait_until
from support.stopping import stopped


class SingleSteps:
    """An engine process, and the byte that lets it stop itself after each step."""

    def __init__(self, options: EngineOptions) -> None:
        file = os.memfd_create("single_steps")
        os.ftruncate(file, 1)
        self._is_single = mmap.mmap(file, 1)
        process, ours = fork_module(
            "support.single_step_engine", env=os.environ | {"OMP_NUM_THREADS": "1"}, descriptors=[file]
        )
        os.close(file)
        ours.sendall(frame(Start(options)))
        self.child = EngineProcess(process, ours)

    @contextmanager
    def on(self) -> Iterator[Callable[[], None]]:
        """Hold the engine still; yield a function that runs its next step, for which a request must have arrived."""
        pid = self.child.process.pid

        def run_step() -> None:
            os.kill(pid, signal.SIGCONT)
            wait_until(lambda: is_stopped(pid))

        with stopped(pid):
            self._is_single[0] = 1
            try:
                yield run_step
            finally:
                self._is_single[0] = 0
