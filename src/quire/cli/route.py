"""`quire route`: a router before servers for prompts and servers for decoding."""

import asyncio
import logging
import os
import signal
import socket
from typing import Annotated
from urllib.parse import urlsplit

import typer
import uvloop

from quire.core import logs
from quire.core.errors import ConfigError
from quire.server.http.http_server import HttpServer
from quire.server.http.sockets import bind, raise_file_limit, url_of
from quire.server.options import ServerOptions
from quire.server.route import RouteApp
from quire.server.signals import STOP_SIGNALS, StopSignals, exit_on_signal
from quire.server.start import ensure_standard_streams

log = logging.getLogger(__name__)

MAX_SERVERS = 64


def route(
    prefill: Annotated[list[str], typer.Option(help="URL of a server for prompts; several times", metavar="URL")],
    decode: Annotated[list[str], typer.Option(help="URL of a server for decoding; several times", metavar="URL")],
    host: Annotated[str, typer.Option(help="address to listen at")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port; 0: a free one", min=0, max=65535)] = 8000,
    prefill_least_bytes: Annotated[
        int, typer.Option(help="bodies with fewer bytes go to a server for decoding alone", min=0)
    ] = 4096,
    shutdown_timeout: Annotated[
        float, typer.Option(help="seconds for open requests after SIGTERM", min=0.0, max=86400.0)
    ] = 30.0,
) -> None:
    """Route completions to servers for prompts, then with their KV blocks to servers for decoding."""
    for name, urls in (("prefill", prefill), ("decode", decode)):
        check_urls(name, urls)
    options = ServerOptions(host=host, port=port, shutdown_timeout=shutdown_timeout)
    ensure_standard_streams()
    logs.share(options.log_level, options.log_format, options.log_file)
    raise_file_limit(options.max_connections)
    app = RouteApp(prefill, decode, options, prefill_least_bytes)
    with bind(host, port) as listener:
        for number in STOP_SIGNALS:
            signal.signal(number, exit_on_signal)
        logs.set_up("router")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(app, options, listener))
        logs.flush()
        os._exit(0)


def check_urls(name: str, urls: list[str]) -> None:
    """Raise ConfigError for what is no URL of a server, and for none or too many of them."""
    if not 1 <= len(urls) <= MAX_SERVERS:
        raise ConfigError(f"{name} must be given 1 to {MAX_SERVERS} times, got {len(urls)}")
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ConfigError(f"{name} must be a URL such as http://10.0.0.1:8000, got {url[:200]!r}")


async def _serve(app: RouteApp, options: ServerOptions, listener: socket.socket) -> None:
    http, signals = HttpServer(app, options), StopSignals([])
    await http.start(listener, options.host)
    print(f"Quire is serving routes on {url_of(listener, options.host)}", flush=True)  # noqa: T201
    await signals.wait_or(asyncio.create_task(asyncio.Event().wait()))
    app.is_draining = True
    log.info("shutting down: open requests have %g seconds to finish", options.shutdown_timeout)
    await http.wait_until_answered(options.shutdown_timeout)
    await app.close()
    await http.stop()
