"""Loads on one server: the session, a look at /metrics beside each load, and Ctrl-C, which keeps what was measured."""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import aiohttp

from quire.cli.bench.http_load import HttpLoad, LoadRun, SentRequest, Target, first_model, open_session
from quire.cli.bench.report import Record
from quire.cli.bench.scrape import Scraper, server_use
from quire.cli.bench.serve_flags import ServerFlags
from quire.paper.arrivals import Schedule
from quire.paper.workloads import WorkItem

_DRAIN_S = 10.0  # after a load, until what was cut has left the server

Result = TypeVar("Result")


class Measured(NamedTuple):
    """One load: what the client saw, and what the server said of itself."""

    run: LoadRun
    use: Record


class ServeBench:
    """A server under test. `interrupted` is set by Ctrl-C and ends the load that runs; start none after it."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, interrupted: asyncio.Event) -> None:
        self.target = target
        self.interrupted = interrupted
        self._session = session

    async def measure(
        self,
        items: list[WorkItem],
        schedule: Schedule,
        *,
        on_ended: Callable[[SentRequest], None] = lambda _: None,
        enough: asyncio.Event | None = None,
        limit_s: float | None = None,
    ) -> Measured:
        """Run a load to its end, or until `enough` is set or `limit_s` is over."""
        load = HttpLoad(self._session, self.target, items, schedule, on_ended)
        stops = [self.interrupted] if enough is None else [self.interrupted, enough]
        async with Scraper(self._session, self.target.url) as scraper:
            run = await load.run(*stops, limit_s=limit_s)
        return Measured(run, server_use(scraper.samples))

    async def drain(self) -> None:
        """Wait a bounded time until the server has nothing left of earlier loads."""
        await Scraper(self._session, self.target.url).wait_until_idle(_DRAIN_S)


def on_server(flags: ServerFlags, task: Callable[[ServeBench], Coroutine[Any, Any, Result]]) -> Result:
    """Run `task` with the server of the flags. Raises ServerUnusableError when there is none."""

    async def run() -> Result:
        async with open_session(flags.api_key) as session:
            with _interrupts() as interrupted:
                name = flags.model_name or await first_model(session, flags.base_url)
                target = Target(flags.base_url, name, flags.request_timeout)
                return await task(ServeBench(session, target, interrupted))

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's, which takes half the CPU per chunk, where uvloop exists."""
    if sys.platform == "win32":
        return None
    import uvloop  # noqa: PLC0415 (not on Windows)

    return uvloop.new_event_loop


@contextmanager
def _interrupts() -> Iterator[asyncio.Event]:
    """Yield an event that the first Ctrl-C sets; a second one ends the command at once."""
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()

    def interrupt() -> None:
        interrupted.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        loop.remove_signal_handler(signal.SIGINT)
