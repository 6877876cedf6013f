"""Start of a server of several models: check options, bind the port, serve until a signal, end all processes."""

import asyncio
import logging
import os
import signal
import socket
import ssl
from typing import NoReturn

import uvloop

from quire.core import logs
from quire.core.errors import ConfigError
from quire.engine.options import EngineOptions
from quire.server.http.http_server import HttpServer
from quire.server.http.sockets import bind, bind_path, raise_file_limit, remove_path, tls_context, url_of
from quire.server.models.models_app import ModelsApp
from quire.server.models.supervisor import Supervisor
from quire.server.options import ServerOptions
from quire.server.signals import STOP_SIGNALS, StopSignals, exit_on_signal
from quire.server.start import ensure_standard_streams

log = logging.getLogger(__name__)


def start_models(engine: EngineOptions, options: ServerOptions) -> NoReturn:
    """Serve the models of a folder until a stop signal, then end the process. ConfigError if it cannot start."""
    ensure_standard_streams()
    logs.share(options.log_level, options.log_format, options.log_file)
    raise_file_limit(options.max_connections)
    if engine.model is not None:
        raise ConfigError(f"models_dir takes the place of MODEL, and there is {engine.model!r}")
    if engine.nnodes > 1:
        raise ConfigError("models_dir is of one machine, and nnodes is above 1")
    if engine.kv_events is not None:
        raise ConfigError("models_dir: kv_events_config is of one model, and servers of several would share its ports")
    if engine.kv_role != "none":
        raise ConfigError(f"models_dir: kv_role {engine.kv_role!r} is of one model, and servers would share its port")
    if engine.prefill_engines:
        raise ConfigError("models_dir: prefill_engines is of one model, and servers of several would share its ports")
    tls = tls_context(options)
    with bind(options.host, options.port) if options.uds is None else bind_path(options.uds) as listener:
        for number in STOP_SIGNALS:
            signal.signal(number, exit_on_signal)
        try:
            logs.set_up("server")
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(engine, options, listener, tls))
        finally:
            remove_path(options.uds)
        logs.flush()
        os._exit(0)


async def _serve(
    engine: EngineOptions, options: ServerOptions, listener: socket.socket, tls: ssl.SSLContext | None
) -> None:
    supervisor = Supervisor(engine, options)
    app = ModelsApp(supervisor, options)
    http, signals = HttpServer(app, options, tls), StopSignals([])
    await http.start(listener, options.host)
    names, url = [*supervisor.folder.names()], url_of(listener, options.host, is_encrypted=tls is not None)
    told = f"{len(names)} model{'s' * (len(names) != 1)} of {options.models_dir}"
    print(*(f"  {name}" for name in names), f"Quire is serving {told} on {url}", sep="\n", flush=True)  # noqa: T201
    await signals.wait_or(asyncio.create_task(asyncio.Event().wait()))
    app.is_draining = True
    log.info("shutting down: running requests have %g seconds to finish", options.shutdown_timeout)
    await http.wait_until_answered(options.shutdown_timeout)
    await supervisor.close()
    await http.stop()
