"""Lifecycle of the server process: connect to the engine, serve, and stop in one of three ways.

The first signal drains: /ready and new requests get 503, running requests continue until the shutdown timeout and are
then cancelled. A second signal ends the process at once. After the death of an engine that is not replaced the process
ends within seconds, long enough for probes to see /health fail.

A dead engine is restarted up to `restart_engine` times with growing pauses. The new engine has the same options and
continues the numbering of requests. The state of the old one is lost: its requests have failed, and nothing is cached
or pinned. With `restart_engine` an engine that makes no progress for the stall limit is ended by its client, and so
dies; without it the server stays unhealthy until the engine goes on, or the operator ends it. A stall is logged with
the stacks of all threads.
"""

import asyncio
import gc
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

import uvloop

from quire.core import logs
from quire.core.errors import ConfigError, EngineError
from quire.core.owner_labels import OwnerLabels
from quire.engine.fleet.fleet import Fleet, FleetSettings, connect_fleet
from quire.engine.launcher import EngineProcess
from quire.engine.metrics.page import Metrics
from quire.engine.options import EngineOptions
from quire.engine.processes.base_client import BaseClient
from quire.engine.processes.client import EngineClient
from quire.server.app import create_app
from quire.server.errors import shutting_down
from quire.server.http.http_server import HttpServer
from quire.server.http.sockets import remove_path, url_of
from quire.server.options import ServerOptions
from quire.server.service import Service
from quire.server.signals import StopSignals
from quire.server.startup_banner import print_banner
from quire.server.templates.template_renderer import TemplateRenderer

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
CHECKS_PER_LIMIT = 4
log = logging.getLogger(__name__)

DEMO_NAME = "quire-demo"
UNHEALTHY_S = 2.0      # /health is 503 for this long after the death of the engine, then the process ends
FINAL_WRITE_S = 1.0     # for the last frames of cancelled responses to be sent
COLLECTION_INTERVAL_S = 5.0


async def supervise_engine(
    service: Service,
    options: EngineOptions,
    signals: StopSignals,
    *,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    spawn: Callable[[EngineOptions], EngineProcess] = EngineProcess.spawn,
) -> Exception:
    """Restart the only engine whenever it dies; return the last error when no restart is left.

    `pause` waits before each start, and `spawn` starts the process.
    """
    num_granted = service.options.restart_engine
    (client,), (metrics,) = service.client.engines, service.metrics.engines
    why: Exception = await client.wait_dead()
    for number in range(1, num_granted + 1):
        pause_s = min(FIRST_PAUSE_S * 2 ** (number - 1), LONGEST_PAUSE_S)
        log.error("%s; restart %d of %d in %g s (restart_engine)", why, number, num_granted, pause_s)
        metrics.engine_died()
        await pause(pause_s)
        try:
            signals.children[0] = spawn(options)
            started = await EngineClient.connect(
                signals.children[0], options, metrics, client.request_ids, client.inputs.owners,
                service.options.start_timeout, on_stall="end",
            )  # fmt: skip
        except (EngineError, OSError) as error:
            why = error
            continue
        started.inputs.images = client.inputs.images    # calls under way have its marks and numbers
        service.client = client = started
        metrics.engine_restarted()
        log.warning("the engine was restarted; cached and pinned prefixes are lost")
        why = await client.wait_dead()
    return why


async def watch_for_stalls(service: Service) -> None:
    """Log the start of each stall, with the stacks of all threads of both processes, and its end, until cancelled."""
    stalled, limit_s = set[int](), service.options.stall_limit
    while True:
        await asyncio.sleep(limit_s / CHECKS_PER_LIMIT)
        engines = service.client.engines  # replaced by restarts
        for number, engine in enumerate(engines):
            name = "the engine" if len(engines) == 1 else f"engine {number}"
            is_stalled = engine.stalled_s > limit_s
            if is_stalled and number not in stalled:
                stalled.add(number)
                log.error("%s has work and made no progress for %g seconds (stall_limit)", name, limit_s)
                logs.log_stacks(log)
                engine.log_stacks()
            elif number in stalled and not is_stalled:
                stalled.remove(number)
                log.warning("%s makes progress again", name)


def run(
    children: list[EngineProcess], engine: EngineOptions, options: ServerOptions, listener: socket.socket,
    tls: ssl.SSLContext | None = None,
) -> NoReturn:  # fmt: skip
    """Serve with engines that have just been spawned, and end the process. Raises their start error, if any.

    Ends by os._exit: a normal shutdown would join threads that still tokenize for disconnected clients.
    """
    logs.set_up("server")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(_run(children, engine, options, listener, tls))
        remove_path(options.uds)
        logs.flush()
        os._exit(status)


async def _run(
    children: list[EngineProcess], engine: EngineOptions, options: ServerOptions, listener: socket.socket,
    tls: ssl.SSLContext | None,
) -> int:  # fmt: skip
    signals = StopSignals(children)
    connecting = asyncio.create_task(connect(children, engine, options))
    await signals.wait_or(connecting)
    if not connecting.done():
        signals.kill_engines()  # they may be in the middle of a long load
        connecting.cancel()
        await asyncio.wait((connecting,))
        return signals.status
    service = connecting.result()
    http = HttpServer(create_app(service), options, tls)
    try:
        await http.start(listener, options.host)
        has_tokenizer = service.client.tokenizer is not None
        url = url_of(listener, options.host, is_encrypted=tls is not None)
        num_engines = len(service.client.engines)
        if options.log_format == "json":
            log.info("Quire is serving %s on %s", service.names[0], url)
        else:
            print_banner(
                service.names[0], url, service.client.ready, has_tokenizer=has_tokenizer, num_engines=num_engines
            )
        status = await _serve(service, http, signals, engine)
        await http.stop()
        return status
    finally:
        await close_service(service)


async def close_service(service: Service) -> None:
    """End the processes of a service."""
    await service.templates.close()
    await service.grammars.close()
    if service.images is not None:
        await service.images.close()
    await service.client.close()
    await asyncio.to_thread(service.metrics.close_events)
    if service.traces is not None:
        await asyncio.to_thread(service.traces.close)


async def connect(
    children: list[EngineProcess], engine: EngineOptions, options: ServerOptions, *, ends_stalled: bool = False
) -> Service:
    """Wait until the engines are ready. ConfigError, ModelError or EngineDeadError if a start fails.

    `ends_stalled`: a single engine without progress is ended, although none takes its place.
    """
    names = options.served_model_name or (engine.model or DEMO_NAME,)
    num_engines = len(children)
    metrics = Metrics(names[0], None, num_engines, engine)
    metrics.measure_energy()
    owners = OwnerLabels(options.max_metric_labels)
    client: BaseClient
    if num_engines > 1:
        client = await _connect_fleet(children, engine, options, metrics, owners)
    else:
        client = await EngineClient.connect(
            children[0], engine, metrics.engines[0], owners=owners, start_timeout_s=options.start_timeout,
            requires_tokenizer=True, on_stall="end" if options.restart_engine or ends_stalled else "tell",
        )  # fmt: skip
        metrics.engines[0].engine_ready(client.ready)
    if defaults := client.ready.sampling.params:
        log.info("defaults of requests by generation_config: %s", ", ".join(f"{k} {v}" for k, v in defaults.items()))
    templates = TemplateRenderer(client.tokenizer, max_waiting=options.max_queued_requests)
    templates.warm_up()
    service = Service(
        client, options, names, metrics, templates, can_sleep=engine.enable_sleep_mode, model_source=engine.model,
        engine_options=engine,
    )  # fmt: skip
    if service.images is not None:
        service.images.warm_up()
    try:
        if engine.kv_events is not None:
            service.metrics.open_events(engine.kv_events)
        await _load_adapters(service)
    except BaseException:
        await close_service(service)
        raise
    return service


async def _load_adapters(service: Service) -> None:
    """Read the adapters of --lora-modules, one after the other. ModelError for one that cannot be served."""
    for name, path, base_model_name in service.options.adapters:
        if (reason := service.adapters.reason_against(name)) is not None:
            raise ConfigError(f"lora_modules: {reason}")
        folder = await asyncio.to_thread(Path(path).resolve)
        service.adapters.add(name, await service.client.read_adapter(str(folder)), base_model_name)


async def _connect_fleet(
    children: list[EngineProcess], engine: EngineOptions, options: ServerOptions, metrics: Metrics,
    owners: OwnerLabels,
) -> BaseClient:  # fmt: skip
    settings = FleetSettings(
        engine, metrics, owners, options.start_timeout, requires_tokenizer=True
    )
    return await connect_fleet(children, settings)


async def _supervise(service: Service, engine: EngineOptions, signals: StopSignals) -> Exception:
    """Restart engines that die; return the last error when none is left."""
    if isinstance(service.client, EngineClient):
        return await supervise_engine(service, engine, signals)
    assert isinstance(service.client, Fleet), "a client of one engine or of a fleet"
    return await service.client.supervise(signals.replace_child)


async def _serve(service: Service, http: HttpServer, signals: StopSignals, engine: EngineOptions) -> int:
    """Serve until a signal has drained the server or the last engine has died; return the exit status."""
    supervising = asyncio.create_task(_supervise(service, engine, signals), name="engine supervisor")
    watch = asyncio.create_task(watch_for_stalls(service), name="stall watch")
    watch.add_done_callback(_log_end)
    collecting = asyncio.create_task(collect_when_idle(lambda: http.num_open_requests), name="garbage collection")
    collecting.add_done_callback(_log_end)
    service.critical_tasks = supervising, watch
    await signals.wait_or(supervising)
    if signals.received:
        await _drain(service, http)
    else:
        log.error("%s; the server stops", supervising.result())
        await signals.wait_or(asyncio.create_task(asyncio.sleep(UNHEALTHY_S)))
    watch.cancel()
    collecting.cancel()
    supervising.cancel()
    await asyncio.wait((supervising,))  # it may have to stop a loading engine
    return 0 if service.client.is_alive else 1


def _log_end(task: asyncio.Task[None]) -> None:
    """Log the end of a task that should never end, with its traceback; /health is 503 from now on."""
    if not task.cancelled():
        log.critical("the %s has ended", task.get_name(), exc_info=task.exception())


async def _drain(service: Service, http: HttpServer) -> None:
    """Refuse new requests, wait for running ones until the shutdown timeout, then cancel the rest."""
    service.is_draining = True
    timeout_s = service.options.shutdown_timeout
    log.info("shutting down: %d running requests have %g seconds to finish", http.num_open_requests, timeout_s)
    if not await http.wait_until_answered(timeout_s):
        log.warning("cancelling %d requests that took longer", http.num_open_requests)
        service.responses.cancel_all(shutting_down())
        await http.wait_until_answered(FINAL_WRITE_S)


async def collect_when_idle(num_open_requests: Callable[[], int], interval_s: float = COLLECTION_INTERVAL_S) -> None:
    """Collect all garbage now and then while no request is open; return when cancelled.

    A full collection traverses what all open requests hold, some 0.13 ms for each, while every stream waits.
    """
    while True:
        await asyncio.sleep(interval_s)
        if gc.get_count()[2] and not num_open_requests():
            gc.collect()
