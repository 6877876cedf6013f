"""From an engine that loads to the last answer: connect, serve, and end in one of three ways.

A first signal drains: /ready and new requests are answered with 503, open ones go on until the shutdown timeout, then
they are ended. A second signal ends the process at once. An engine that dies and is not replaced ends it soon: probes
get a moment to see it.
"""

import asyncio
import logging
import os
import socket
from typing import NoReturn

import uvloop

from quire.core.owner_labels import OwnerLabels
from quire.engine.client import EngineClient
from quire.engine.launcher import EngineProcess
from quire.engine.options import EngineOptions
from quire.server.app import create_app
from quire.server.errors import shutting_down
from quire.server.http.server import HttpServer
from quire.server.http.sockets import url_of
from quire.server.ops import logs
from quire.server.ops.engine_supervisor import supervise_engine, watch_for_stalls
from quire.server.ops.metrics import Metrics
from quire.server.ops.signals import StopSignals
from quire.server.ops.startup_banner import print_banner
from quire.server.options import ServerOptions
from quire.server.service import Service
from quire.server.template_renderer import TemplateRenderer

log = logging.getLogger(__name__)

DEMO_NAME = "quire-demo"
UNHEALTHY_S = 2.0      # a server without an engine shows /health as 503 for this long, then ends
FINAL_WRITE_S = 1.0     # for answers that were ended to reach their clients


def run(child: EngineProcess, engine: EngineOptions, options: ServerOptions, listener: socket.socket) -> NoReturn:
    """Serve with an engine that has just been spawned, and end the process. Raises what keeps the engine from starting.

    The process ends without the interpreter's consent, who would wait for threads that make tokens of a long prompt
    for a client that is gone.
    """
    logs.set_up()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(_run(child, engine, options, listener))
        logs.flush()
        os._exit(status)


async def _run(child: EngineProcess, engine: EngineOptions, options: ServerOptions, listener: socket.socket) -> int:
    signals = StopSignals(child)
    connecting = asyncio.create_task(_connect(child, engine, options))
    await signals.wait_or(connecting)
    if not connecting.done():
        child.process.kill()  # it may be in the middle of a long load, and has nothing to lose
        connecting.cancel()
        await asyncio.wait((connecting,))
        return signals.status
    service = connecting.result()
    http = HttpServer(create_app(service), options)
    try:
        await http.start(listener, options.host)
        has_tokenizer = service.client.tokenizer is not None
        url = url_of(listener, options.host)
        print_banner(service.names[0], url, service.client.ready, has_tokenizer=has_tokenizer)
        status = await _serve(service, http, signals, engine)
        await http.stop()
        return status
    finally:
        await service.templates.close()
        await service.client.close()


async def _connect(child: EngineProcess, engine: EngineOptions, options: ServerOptions) -> Service:
    """Wait until the engine is ready. ConfigError, ModelError or EngineDeadError if it will not be."""
    names = options.served_model_name or (engine.model or DEMO_NAME,)
    metrics = Metrics(names[0])
    owners = OwnerLabels(options.max_metric_labels)
    client = await EngineClient.connect(child, engine, metrics, owners=owners, start_timeout_s=options.start_timeout)
    templates = TemplateRenderer(client.tokenizer, max_waiting=options.max_queued_requests)
    templates.warm_up()
    return Service(client, options, names, metrics, templates)


async def _serve(service: Service, http: HttpServer, signals: StopSignals, engine: EngineOptions) -> int:
    """Serve until a signal has drained everything or there is no engine any more; return the exit status."""
    keeping = asyncio.create_task(supervise_engine(service, engine, signals), name="engine keeper")
    watch = asyncio.create_task(watch_for_stalls(service), name="stall watch")
    watch.add_done_callback(_log_end)
    service.critical_tasks = keeping, watch
    await signals.wait_or(keeping)
    if signals.received:
        await _drain(service, http)
    else:
        log.error("%s; the server ends", keeping.result())
        await signals.wait_or(asyncio.create_task(asyncio.sleep(UNHEALTHY_S)))
    watch.cancel()
    keeping.cancel()
    await asyncio.wait((keeping,))  # it may have to end an engine that loads
    return 0 if service.client.is_alive else 1


def _log_end(task: asyncio.Task[None]) -> None:
    """Log that a task that never ends has ended, and where; /health is 503 from now on."""
    if not task.cancelled():
        log.critical("the %s has ended", task.get_name(), exc_info=task.exception())


async def _drain(service: Service, http: HttpServer) -> None:
    """Take nothing new, and wait for what is open until the time is over; then end it."""
    service.is_draining = True
    timeout_s = service.options.shutdown_timeout
    log.info("shutting down: %d open requests have %g seconds to end", http.num_open_requests, timeout_s)
    if not await http.wait_until_answered(timeout_s):
        log.warning("ending %d requests that took longer", http.num_open_requests)
        service.responses.cancel_all(shutting_down())
        await http.wait_until_answered(FINAL_WRITE_S)
