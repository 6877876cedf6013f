"""Supervisor of several models: does what `Places` decides, and lends loaded models to requests."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import aiohttp

from quire.engine.options import EngineOptions
from quire.server.errors import ApiError, overloaded
from quire.server.models.model_folder import ModelFolder
from quire.server.models.model_process import KILL_AFTER_S, ModelProcess
from quire.server.models.places import Admit, Fail, Places, StartModel, State, StopModel
from quire.server.options import ServerOptions

log = logging.getLogger(__name__)


class Supervisor:
    """The models of a folder and their processes. Lives on the event loop."""

    def __init__(self, engine: EngineOptions, options: ServerOptions) -> None:
        self.folder = ModelFolder(Path(options.models_dir or "").expanduser())
        self.places = Places(options.models_max, options.idle_unload or math.inf)
        self._engine, self._options = engine, options
        self._processes: dict[str, ModelProcess] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._admissions: dict[int, asyncio.Future[ModelProcess]] = {}
        self._tickets = count()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False

    @asynccontextmanager
    async def lend(
        self, name: str, keep_alive_s: float | None = None, *, is_use: bool = True
    ) -> AsyncIterator[ModelProcess]:
        """Wait until a model answers, and keep it loaded meanwhile; arguments as `Places.arrive` has them.

        Raises ApiError 503 for one that cannot be loaded, 429 where too many requests wait for models, and 502 where
        the process dies meanwhile: once its end is known here, since the next request would be sent to it until then.
        """
        num_waiting, limit = self.places.num_waiting, self._options.max_queued_requests
        if num_waiting >= limit:
            raise overloaded(num_waiting, limit, 1)
        ticket = next(self._tickets)
        admission = self._admissions[ticket] = asyncio.get_running_loop().create_future()
        self.places.arrive(name, ticket, time.monotonic(), keep_alive_s, is_use=is_use)
        self._act()
        try:
            process = await admission
            try:
                yield process
            except (aiohttp.ClientError, OSError) as error:
                with suppress(TimeoutError):    # it is alive, and closed one connection
                    await asyncio.wait_for(process.has_ended.wait(), KILL_AFTER_S)
                raise ApiError(
                    502, f"the server of model {name!r} has died; the next request loads it again", type="server_error",
                    code="model_died", headers={"Retry-After": "1"},
                ) from error  # fmt: skip
        finally:
            del self._admissions[ticket]
            if admission.done() and not admission.cancelled() and admission.exception() is None:
                admission.result().take_back()
            self.places.end(ticket, time.monotonic(), is_use=is_use)
            self._act()

    def unload(self, name: str) -> None:
        """Unload a model once it is idle."""
        self.places.unload(name, time.monotonic())
        self._act()

    async def close(self) -> None:
        """End all processes, and wait for their ends."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        for process in self._processes.values():
            process.stop()
        if self._running:
            await asyncio.wait(self._running)

    def _act(self) -> None:
        """Do what has to be done after an event, and what that leads to."""
        for action in self.places.take_actions():
            match action:
                case StartModel(name):
                    task = asyncio.create_task(self._run(name), name=f"model {name}")
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
                case StopModel(name):
                    log.info("model %s is unloaded", name)
                    self._processes[name].stop()
                case Admit(ticket, name):
                    self._settle(ticket, self._processes[name])
                case Fail(ticket, reason):
                    self._settle(ticket, ApiError(
                        503, reason, type="server_error", code="model_not_loaded", headers={"Retry-After": "1"}
                    ))  # fmt: skip
        self._set_timer()

    def _settle(self, ticket: int, result: ModelProcess | ApiError) -> None:
        """Answer a request that waits; one that is open learns of the end of its model by its connection."""
        admission = self._admissions.get(ticket)
        if admission is None or admission.done():
            return
        if isinstance(result, ApiError):
            admission.set_exception(result)
        else:
            result.lend()
            admission.set_result(result)

    async def _run(self, name: str) -> None:
        """Start the process of a model, and report what it does until its end."""
        began_s = time.monotonic()

        def on_ready() -> None:
            log.info("model %s is loaded, after %.1f s", name, time.monotonic() - began_s)
            self.places.has_loaded(name, time.monotonic())
            self._act()

        try:
            path = self.folder.path(name)
            process = self._processes[name] = ModelProcess(name, path, self._engine, self._options)
            reason = await process.run(on_ready)
        except Exception as error:  # its files have gone, or no process can be started
            reason = str(error)
        if not self._is_closing and self.places.state(name) is not State.UNLOADING:
            log.error("model %s: %s", name, reason)
        ended = self._processes.pop(name, None)
        self.places.has_ended(name, f"model {name!r} could not be loaded, or has died: {reason}", time.monotonic())
        self._act()
        if ended is not None:
            ended.has_ended.set()
            await ended.close()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at_s = self.places.next_expiry_s
        if at_s < math.inf:
            delay_s = max(0.0, at_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.places.tick(time.monotonic())
        self._act()
