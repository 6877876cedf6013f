"""Start of a server in the cheapest order: check options, bind the port, start the engines, then load the HTTP server.

An engine's process loads torch and the weights while this one loads the HTTP server, so this module imports nothing
heavy at the top.
"""

import gc
import os
import signal
from typing import NoReturn

from quire.core.errors import ConfigError
from quire.engine.launcher import spawn_engines
from quire.engine.options import EngineOptions
from quire.server.http.sockets import bind, bind_path, raise_file_limit, remove_path
from quire.server.http.tls import tls_context
from quire.server.idle_collection import collect_rarely
from quire.server.options import ServerOptions
from quire.server.signals import STOP_SIGNALS, StoppedError, exit_on_signal


def start(engine: EngineOptions, options: ServerOptions) -> NoReturn:
    """Serve until a stop signal, then end the process; the status is 0 after a drain.

    Raises ConfigError, ModelError or EngineDeadError if the server cannot start; no process or socket is left then.
    """
    _ensure_standard_streams()
    raise_file_limit(options.max_connections)
    if (options.lora_modules or options.allow_runtime_lora) and not engine.enable_lora:
        raise ConfigError("lora_modules and allow_runtime_lora need enable_lora")
    tls = tls_context(options)
    with bind(options.host, options.port) if options.uds is None else bind_path(options.uds) as listener:
        for number in STOP_SIGNALS:
            signal.signal(number, exit_on_signal)
        children = spawn_engines(engine)
        try:
            gc.disable()  # imported modules are never freed
            from quire.server.lifecycle import run  # noqa: PLC0415 (while the engine loads)

            collect_rarely()
            gc.enable()
            run(children, engine, options, listener, tls)
        except StoppedError:
            for child in children:
                child.process.kill()  # it may be in the middle of a long load, and holds no state
            raise
        finally:
            remove_path(options.uds)
            for child in children:
                child.stop()


def _ensure_standard_streams() -> None:
    """Open /dev/null for each closed standard stream: else a socket gets its number, and printed text with it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
