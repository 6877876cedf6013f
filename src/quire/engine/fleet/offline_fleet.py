"""Several engines, each in a process of its own, for a caller without an event loop.

The engines compute whether or not the caller waits. Their client lives on the event loop of a thread; what a request
gives is passed to the caller's thread through a mailbox, which holds no more than the answers themselves.
"""

import asyncio
import atexit
import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from quire.core.errors import EngineError
from quire.core.lora import Adapter
from quire.core.outputs import KVStats, RequestOutput
from quire.core.sequence import Request
from quire.core.structured_outputs import StructuredOutputsParams
from quire.decoding.grammars.constrained import GrammarChecks
from quire.engine.fleet.fleet import Fleet, FleetSettings, connect_fleet
from quire.engine.launcher import EngineProcess, spawn_engines
from quire.engine.messages import EngineDeadError, SessionBlocks, Tag
from quire.engine.metrics.page import Metrics
from quire.engine.offline_engine import OfflineEngine, T
from quire.engine.options import EngineOptions
from quire.engine.processes.streams import RequestStream
from quire.engine.requests.input_processor import InputProcessor, PreparedRequest
from quire.engine.requests.output_processor import OutputKind


class LoopThread:
    """An event loop that runs until it is closed, or the process ends."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)  # else its tasks are destroyed while they wait

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result; an interrupt of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def is_current(self) -> bool:
        """True if the caller is on this thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Cancel what still runs, wait for its end, and end the thread. Once."""
        atexit.unregister(self.close)
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    """Cancel all other tasks of the loop, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Mailbox:
    """The newest output of each request of a run, or its error, until the caller reads it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._unread: dict[int, RequestOutput | Exception] = {}

    def put(self, request_id: int, new: RequestOutput | Exception) -> None:
        """Put what a request has given in the place of what was not read."""
        with self._changed:
            self._unread[request_id] = new
            self._changed.notify()

    def take(self) -> dict[int, RequestOutput | Exception]:
        """Wait for something unread; return all of it, the request that has waited longest first."""
        with self._changed:
            self._changed.wait_for(lambda: self._unread)
            unread, self._unread = self._unread, {}
            return unread


class BlockingFleet(OfflineEngine):
    """The engines of `data_parallel_size`, started by this object. An engine that dies or stalls is started again.

    ConfigError, ModelError and EngineDeadError as in `EngineClient.connect`.
    """

    def __init__(self, options: EngineOptions, metrics: Metrics) -> None:
        self._metrics = metrics
        settings = FleetSettings(
            options, metrics, start_timeout_s=options.start_timeout, packs_outputs=False,
        )  # fmt: skip
        self._loop, processes = LoopThread("engines"), list[EngineProcess]()
        try:
            processes += spawn_engines(options)
            self._client, supervising = self._loop.run(_connect(processes, settings))
        except BaseException:
            self._loop.close()
            for process in processes:
                process.stop()
            raise
        client = self._client
        self.tokenizer, self.ready, self.pinned = client.tokenizer, client.ready, client.pinned
        self._inputs = InputProcessor(self.tokenizer, self.ready, options, cuts_answers=True)
        self._grammars = GrammarChecks()
        self._closing = weakref.finalize(self, _close, self._loop, client, supervising)
        self._closing.atexit = False    # the engines end with the sockets of this process

    @property
    def inputs(self) -> InputProcessor:
        """The input processor, with the current limits."""
        self._check_open()
        self._inputs.limits = self._client.inputs.limits
        return self._inputs

    def run(self, requests: Sequence[PreparedRequest], kind: OutputKind) -> Iterator[RequestOutput]:
        """Queue the requests; yield their outputs until all have ended. On exit all of them have ended.

        EngineDeadError if an engine dies that has one of them.
        """
        self._check_open()
        mailbox, followers = Mailbox(), list[asyncio.Task[None]]()
        num_left = len(requests)
        try:
            self._loop.run(_follow_all(self._client, requests, kind, mailbox, followers))
            while num_left:
                unread = mailbox.take()
                for new in unread.values():
                    self._check_open()
                    if isinstance(new, Exception):
                        raise new
                    num_left -= new.finished
                    yield new
        finally:
            if self._closing.alive:
                self._loop.run(_abort(followers))

    def check_grammar(self, params: StructuredOutputsParams) -> None:
        """Raise InvalidRequestError for a grammar that cannot be compiled."""
        self._grammars.check(params)

    def read_adapter(self, folder: str) -> Adapter:
        """Have an engine read the LoRA adapter of a folder. ModelError with the reason if it cannot be used."""
        self._check_open()
        return self._loop.run(self._client.read_adapter(folder))

    def unpin(self, request_id: int) -> None:
        """Release what a request has pinned; its blocks are free on return."""
        self._check_open()
        self._loop.run(self._client.release_pin(request_id))

    def save_session(self, request_id: int, folder: Path) -> SessionBlocks:
        """Copy what a request has pinned into the store of a session."""
        self._check_open()
        return self._loop.run(self._client.save_session(request_id, folder))

    def open_session(self, request: Request, folder: Path, num_blocks: int, identity: str) -> SessionBlocks:
        """Let a request that is about to run load from a saved session, until `close_session`."""
        self._check_open()
        return self._loop.run(self._client.open_session(request, folder, num_blocks, identity))

    def close_session(self, request: Request) -> None:
        """Let the request load no more from the saved session."""
        if self._closing.alive:
            self._loop.run(_close_session(self._client, request))

    def kv_stats(self) -> KVStats:
        """Return the sum of the states of the engines that are alive, each between two of its steps."""
        self._check_open()
        return self._loop.run(_kv_stats(self._client))

    def observe(self, read: Callable[[], T]) -> T:
        """Return what `read` makes of the engines' observers, which have the state of the last reports."""
        self._check_open()
        return self._loop.run(_observe(self._metrics, self._client, read))

    @property
    def sleeping(self) -> frozenset[Tag]:
        """The memory that was freed."""
        return self._client.sleeping

    def sleep(self, level: int) -> None:
        """Free the KV caches, and at level 2 the weights as well."""
        self._check_open()
        self._loop.run(self._client.sleep(level))
        for engine in self._metrics.engines:
            engine.fell_asleep(level)

    def wake_up(self, tags: Collection[Tag]) -> None:
        """Load the weights, or make the KV caches, or both."""
        self._check_open()
        self._loop.run(self._client.wake_up(tags))
        for engine in self._metrics.engines if not self._client.sleeping else ():
            engine.woke_up()

    def close(self) -> None:
        """End the engine processes, and with them all requests. Returns when they are gone. Idempotent."""
        self._closing()

    def _check_open(self) -> None:
        if not self._closing.alive:
            raise RuntimeError("this LLM is closed")


# --- on the event loop: none of these holds the object, which is closed when it is dropped ----------------------------


async def _connect(
    processes: Sequence[EngineProcess], settings: FleetSettings
) -> tuple[Fleet, "asyncio.Task[Exception]"]:
    """Return the client of the engines, and the task that starts them again when they die."""
    client = await connect_fleet(processes, settings)
    return client, asyncio.create_task(client.supervise(lambda number, process: None), name="supervisor")


async def _follow_all(
    client: Fleet, requests: Sequence[PreparedRequest], kind: OutputKind, mailbox: Mailbox,
    followers: list[asyncio.Task[None]],
) -> None:  # fmt: skip
    """Queue requests in their order; `followers` get the tasks that put their outputs into the mailbox."""
    arrival_s = time.monotonic()
    for prepared in requests:
        request_id = prepared.request.request_id
        stream = await client.add(prepared, external_id=str(request_id), arrival_s=arrival_s, kind=kind)
        followers.append(asyncio.create_task(_follow(stream, request_id, mailbox)))


async def _follow(stream: RequestStream, request_id: int, mailbox: Mailbox) -> None:
    """Pass the outputs of a request on. Cancelling aborts the request."""
    try:
        async for output in stream:
            mailbox.put(request_id, output)
    except EngineError as error:
        mailbox.put(request_id, error)
    except Exception as error:  # else the caller would wait forever
        mailbox.put(request_id, error)
        raise
    finally:
        stream.abort()


async def _abort(followers: Sequence["asyncio.Task[None]"]) -> None:
    """Abort the requests that have not ended."""
    for follower in followers:
        follower.cancel()
    await asyncio.gather(*followers, return_exceptions=True)


async def _kv_stats(client: Fleet) -> KVStats:
    """Ask each engine, behind all that it was sent before."""
    living = [engine for engine in client.engines if engine.is_alive]
    if not living:
        raise EngineDeadError(client.death_reason)
    maps = await asyncio.gather(*(engine.block_map(0, 1, math.inf) for engine in living))
    return total([found.stats for found in maps])


async def _close_session(client: Fleet, request: Request) -> None:
    client.close_session(request)


async def _observe(metrics: Metrics, client: Fleet, read: Callable[[], T]) -> T:
    for observer, engine in zip(metrics.engines, client.engines, strict=True):
        observer.num_queued = engine.num_queued
    return read()


def _close(loop: LoopThread, client: Fleet, supervising: "asyncio.Task[Exception]") -> None:
    """End the engines and the loop; in another thread, if the loop's own has dropped the object."""
    if loop.is_current:
        threading.Thread(target=_close, args=(loop, client, supervising)).start()
        return
    loop.run(_end(client, supervising))
    loop.close()


async def _end(client: Fleet, supervising: "asyncio.Task[Exception]") -> None:
    supervising.cancel()
    await asyncio.wait([supervising])   # it may have to stop an engine that loads
    await client.close()


def total(stats: Sequence[KVStats]) -> KVStats:
    """Return the sum of the states of several caches with blocks of one size; there is at least one."""
    summed: dict[str, Any] = {}
    for name in (field.name for field in fields(KVStats) if field.name != "block_size"):
        values = [getattr(each, name) for each in stats]
        if None in values:
            summed[name] = None
        elif isinstance(values[0], dict):
            keys = dict.fromkeys(key for value in values for key in value)
            summed[name] = {key: sum(value.get(key, 0) for value in values) for key in keys}
        else:
            summed[name] = sum(values)
    return KVStats(stats[0].block_size, **summed)
