"""The start of a server, in the order that costs least: check, take the port, start the engine, then load ourselves.

The engine's process loads torch and the weights while this one loads the HTTP server, so nothing heavy may be imported
here at the top.
"""

import gc
import os
import signal
from typing import NoReturn

from quire.engine.launcher import EngineProcess
from quire.engine.options import EngineOptions
from quire.server.http.sockets import bind, raise_file_limit
from quire.server.ops.signals import STOP_SIGNALS, StoppedError, exit_on_signal
from quire.server.options import ServerOptions


def start(engine: EngineOptions, options: ServerOptions) -> NoReturn:
    """Serve until told to stop; ends the process, with status 0 after a drain.

    ConfigError, ModelError or EngineDeadError say why it cannot start; then nothing is left behind.
    """
    _ensure_standard_streams()
    raise_file_limit(options.max_connections)
    with bind(options.host, options.port) as listener:
        for number in STOP_SIGNALS:
            signal.signal(number, exit_on_signal)
        child = EngineProcess.spawn(engine)
        try:
            gc.disable()  # what is imported stays
            from quire.server.ops.lifecycle import run  # noqa: PLC0415 (while the engine loads)

            gc.freeze()  # else every full collection looks through it again, and all streams wait
            gc.enable()
            run(child, engine, options, listener)
        except StoppedError:
            child.process.kill()  # it may be in the middle of a long load, and has nothing to lose
            raise
        finally:
            child.stop()


def _ensure_standard_streams() -> None:
    """Put /dev/null where a standard stream is closed: else our sockets get its number, and what is printed with it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
