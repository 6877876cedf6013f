"""Start of a server in the cheapest order: options, port, a model of a hub, the engines, then the HTTP server.

An engine's process loads its libraries and the weights while this one loads the HTTP server, so this module imports
nothing heavy at the top.
"""

import gc
import os
import signal
from collections.abc import Callable
from typing import NoReturn

from quire.core import logs
from quire.core.errors import ConfigError
from quire.engine.launcher import block_stop_signals, spawn_engines
from quire.engine.options import EngineOptions
from quire.server.http.sockets import bind, bind_path, raise_file_limit, remove_path, tls_context
from quire.server.options import ServerOptions
from quire.server.signals import STOP_SIGNALS, StoppedError, exit_on_signal

FULL_COLLECTION = 1000   # collections of the middle generation between two full ones: 7 million new objects


def start(
    engine: EngineOptions, options: ServerOptions, fetch: Callable[[EngineOptions], object] = lambda engine: None
) -> NoReturn:
    """Serve until a stop signal, then end the process; the status is 0 after a drain.

    `fetch` is called when the port is bound: no model is fetched for a server that cannot start. Raises ConfigError,
    ModelError or EngineDeadError if the server cannot start; no process or socket is left then.
    """
    if engine.enable_sleep_mode and options.api_key and options.operator_api_key is None:
        raise ConfigError(
            "enable_sleep_mode needs operator_api_key where clients have keys (api_key): any of them could stop the "
            "service of all others"
        )
    ensure_standard_streams()
    logs.share(options.log_level, options.log_format, options.log_file)
    raise_file_limit(options.max_connections)
    if (options.lora_modules or options.allow_runtime_lora) and not engine.enable_lora:
        raise ConfigError("lora_modules and allow_runtime_lora need enable_lora")
    tls = tls_context(options)
    with bind(options.host, options.port) if options.uds is None else bind_path(options.uds) as listener:
        for number in STOP_SIGNALS:
            signal.signal(number, exit_on_signal)
        fetch(engine)
        children = spawn_engines(engine)
        try:
            gc.disable()  # imported modules are never freed
            # Imports end with callbacks of weak references, where an exception of a signal's handler would be ignored.
            with block_stop_signals():
                from quire.server.lifecycle import run  # noqa: PLC0415 (while the engine loads)

            _collect_rarely()
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


def _collect_rarely() -> None:
    """Exempt all objects so far from collections, and make full ones rare: `collect_when_idle` makes them.

    Objects of requests are freed by their reference counts: after 3,000 completions a full collection finds nothing,
    after 200 disconnects 505 objects. FULL_COLLECTION bounds the memory where a server is never idle.
    """
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION)


def ensure_standard_streams() -> None:
    """Open /dev/null for each closed standard stream: else a socket gets its number, and printed text with it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
