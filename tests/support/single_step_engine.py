"""An engine process that stops itself after each step, while a byte that it shares with the test is set.

The module of a fork (support/forked_engines.py) for `support.single_steps`. Its arguments are the numbers of its socket
and of the file with the byte.
"""

import mmap
import os
import signal
import sys

from quire.engine.processes import engine_process
from quire.engine.processes.engine_process import EngineLoop


def main() -> None:
    """Serve the socket, with the report of a step sent before each stop."""
    step, is_single = EngineLoop._step, mmap.mmap(int(sys.argv[2]), 1)

    def step_and_stop(loop: EngineLoop) -> None:
        step(loop)
        if is_single[0]:
            os.kill(os.getpid(), signal.SIGSTOP)

    EngineLoop._step = step_and_stop  # type: ignore[method-assign]
    engine_process.main()
