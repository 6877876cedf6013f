"""Fleet: several engines of one model behind one client, each in a process of its own.

A request is sent to the engine with the least work for it (`router`), and stays there until it ends. When an engine
dies, its requests end with EngineDeadError, and its cache and its pins are lost; it is started again, with growing
pauses, while the other engines serve. One that makes no progress for the stall limit is ended, and so dies.

With `prefill_engines` the first engines compute prompts, and the others decode. A long prompt is computed under a
ticket, as for another server (`quire.cache.kv_tickets`); then the request is sent with it to an engine that decodes,
which fetches the blocks. It computes what it cannot fetch: the death of an engine for prompts ends no request.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from msgspec import structs

from quire.core.deltas import Admission, SequenceDelta
from quire.core.errors import EngineError, InvalidRequestError
from quire.core.lora import Adapter
from quire.core.outputs import RequestMetrics, RequestOutput
from quire.core.owner_labels import OwnerLabels
from quire.core.pooling import PinTask, Pool
from quire.core.sequence import KVTransfer, Request
from quire.core.step_times import chunk_work
from quire.engine.fleet.router import Router, Routing
from quire.engine.launcher import EngineProcess, member_name
from quire.engine.messages import EngineDeadError, EngineState, Ready, SessionBlocks, Stepped, Tag
from quire.engine.metrics.engine_metrics import EngineMetrics
from quire.engine.metrics.page import Metrics
from quire.engine.options import EngineOptions
from quire.engine.options.parallel_options import START_TIMEOUT_S
from quire.engine.processes.base_client import BaseClient
from quire.engine.processes.client import EngineClient
from quire.engine.processes.forecast import Asked
from quire.engine.processes.streams import RequestStream
from quire.engine.requests.input_processor import ANY_TOKEN, InputProcessor, PreparedRequest
from quire.engine.requests.output_processor import FinishedRequest, OutputKind, ProcessedStep
from quire.engine.sizing import same_sizes
from quire.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
HEALTHY_S = 60.0        # an engine that lived for so long is started again after the first pause
MAX_FAILED_STARTS = 5   # failures in a row of each engine, while none is alive


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Settings that all engines of a fleet share."""

    options: EngineOptions
    metrics: Metrics
    owners: OwnerLabels | None = None
    start_timeout_s: float = START_TIMEOUT_S
    requires_tokenizer: bool = False
    packs_outputs: bool = True          # as in `OutputProcessor`
    routing: Routing = "prefix"         # another rule is for measurements


async def connect_fleet(processes: Sequence[EngineProcess], settings: FleetSettings) -> "Fleet":
    """Wait until all engines are ready. Errors as in `EngineClient.connect`; after one all processes have ended."""
    observers = [_Observer(number, engine) for number, engine in enumerate(settings.metrics.engines)]
    clients: list[EngineClient] = []
    request_ids = count()
    try:
        for process, observer in zip(processes, observers, strict=True):
            tokenizer = clients[0].tokenizer if clients else None
            clients.append(await _connect(process, settings, observer, request_ids, tokenizer))
    except BaseException:
        await asyncio.gather(*(client.close() for client in clients))
        await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes))
        raise
    return Fleet(clients, observers, settings, request_ids)


async def _connect(
    process: EngineProcess, settings: FleetSettings, observer: "_Observer", request_ids: Iterator[int],
    tokenizer: Tokenizer | None, options: EngineOptions | None = None,
) -> EngineClient:  # fmt: skip
    """Return the client of an engine that is ready. `options`: in place of the settings' own."""
    return await EngineClient.connect(
        process, options or settings.options, observer, request_ids, settings.owners, settings.start_timeout_s,
        requires_tokenizer=settings.requires_tokenizer, tokenizer=tokenizer, on_close=observer.on_close,
        packs_outputs=settings.packs_outputs, on_stall="end",
    )  # fmt: skip


class _Observer:
    """Observer of one engine: reports go to that of its metrics, and to the fleet."""

    def __init__(self, number: int, engine: EngineMetrics) -> None:
        self.engine = engine
        self.fleet: Fleet | None = None
        self._number = number

    def on_step(self, step: Stepped, processed: ProcessedStep) -> None:
        """Record a step of the engine."""
        self.engine.on_step(step, processed)
        if self.fleet is not None:
            self.fleet.record_step(self._number, step)

    def on_idle(self, state: EngineState) -> None:
        """Record that no request waits or runs."""
        self.engine.on_idle(state)
        if self.fleet is not None:
            self.fleet.record_state(self._number, state)

    def on_abort(self, ended: FinishedRequest) -> None:
        """Record a request that its client, or the server, has aborted."""
        self.engine.on_abort(ended)

    def on_close(self, request_id: int) -> None:
        """Record that the stream of a request has ended."""
        if self.fleet is not None:
            self.fleet.router.forget(request_id)


class _StreamApart(RequestStream):
    """The outputs of a request of which one engine computes the prompt, and then another the answer.

    `computing`: of the prompt. `opening` reads that, and returns the stream of the answer.
    """

    __slots__ = ("_computing", "_opening")

    def __init__(
        self, computing: RequestStream, opening: Coroutine[None, None, RequestStream], metrics: RequestMetrics
    ) -> None:
        self.metrics, self._computing, self._is_over = metrics, computing, False
        self._opening = asyncio.create_task(opening, name="a prompt that is computed apart")

    async def __anext__(self) -> RequestOutput:
        """Wait for the next output. Errors as those of the engine that decodes."""
        if not self._opening.done():
            await asyncio.wait((self._opening,))  # not cancelled with its reader: it aborts
        if self._is_over:
            raise StopAsyncIteration
        return await anext(self._opening.result())

    def abort(self) -> None:
        """End the request, in whichever engine it is. Idempotent."""
        self._is_over = True
        if not self._opening.done():
            self._opening.cancel()
            self._computing.abort()
        elif not self._opening.cancelled() and self._opening.exception() is None:
            self._opening.result().abort()


class Fleet(BaseClient):
    """The engines, from the event loop of another process. Get one from `connect_fleet`, and `close` it."""

    def __init__(
        self, clients: list[EngineClient], observers: list[_Observer], settings: FleetSettings,
        request_ids: Iterator[int],
    ) -> None:  # fmt: skip
        ready, tokenizer = _least([client.ready for client in clients]), clients[0].tokenizer
        inputs = InputProcessor(tokenizer, ready, settings.options, settings.owners)
        super().__init__(tokenizer, ready, inputs, request_ids)
        num_blocks = [client.ready.limits.num_blocks for client in clients]
        self.router = Router(num_blocks, ready.limits.block_size, ready.limits.max_num_seqs, settings.routing)
        self._clients, self._observers, self._settings = clients, observers, settings
        self._pinning: dict[int, EngineClient] = {}     # keyed by the number of the request that pins
        self._restoring: dict[int, EngineClient] = {}   # requests for which a saved session is open
        for observer, client in zip(observers, clients, strict=True):
            observer.fleet = self
            observer.engine.engine_ready(client.ready)

    @property
    def engines(self) -> Sequence[EngineClient]:
        """The engines by number, dead ones too."""
        return self._clients

    @property
    def _living(self) -> list[int]:
        return [number for number, client in enumerate(self._clients) if client.is_alive]

    @property
    def _decoding(self) -> list[int]:
        """Return the engines that decode, of those that are alive; all, where none is left but those for prompts."""
        living, num_others = self._living, self._settings.options.prefill_engines
        return [number for number in living if number >= num_others] or living

    # --- requests -------------------------------------------------------------------------------------------------

    def first_token_s(self, asked: Asked, request: Request | None = None, within_s: float = math.inf) -> float:
        """Return the predicted seconds in the engine that a request will get, or in the quickest of all."""
        if request is None:
            clients = [self._clients[number] for number in self._decoding]
            return min((client.first_token_s(asked, None, within_s) for client in clients), default=0.0)
        apart = self._engine_apart(request)
        number = self.router.rank(request, self._candidates(request))[0] if apart is None else apart
        num_cached = self.router.num_cached(request, number)
        prompt = chunk_work(num_cached, max(1, len(request.prompt_token_ids) - num_cached))
        asked = asked._replace(prompt=prompt, knows_cached=True)
        return self._clients[number].first_token_s(asked, request, within_s)

    async def add(
        self, prepared: PreparedRequest, *, external_id: str, arrival_s: float, kind: OutputKind = "final"
    ) -> RequestStream:
        """Queue a request in an engine, once. EngineDeadError if none is alive."""
        apart = self._engine_apart(prepared.request)
        if apart is None:
            return await self._add(prepared, external_id=external_id, arrival_s=arrival_s, kind=kind)
        prepared = prepared._replace(metrics=(metrics := RequestMetrics(arrival_s, engine=apart)))
        if prepared.request.received_s is None:
            prepared.request.received_s = time.monotonic()  # deadlines of both engines count from here
        transfer = KVTransfer(secrets.token_hex(32), "")
        asked = PreparedRequest(_for_prompt(prepared.request, transfer), prepared.prompt)
        self.router.assign(asked.request, apart)
        try:
            computing = await self._clients[apart].add(asked, external_id=external_id, arrival_s=arrival_s)
        except BaseException:
            self.router.forget(asked.request.request_id)
            raise

        async def open_answer() -> RequestStream:
            try:
                async for _ in computing:
                    pass
                prepared.request.transfer = replace(transfer, peer=member_name(apart))
            except EngineError as error:    # the engine that decodes computes the prompt
                log.info("engine %d has not computed a prompt for another one: %s", apart, error)
            return await self._add(prepared, external_id=external_id, arrival_s=arrival_s, kind=kind)

        return _StreamApart(computing, open_answer(), metrics)

    async def _add(
        self, prepared: PreparedRequest, *, external_id: str, arrival_s: float, kind: OutputKind
    ) -> RequestStream:
        """Queue a request in an engine that decodes."""
        request = prepared.request
        candidates = self._candidates(request)
        if (home := self._restoring.get(request.request_id)) is not None and home.is_alive:
            candidates = [self._clients.index(home)]    # it loads from a saved session
        number = self.router.route(request, candidates)
        client = self._clients[number]
        if isinstance(request.task, PinTask):
            self._pinning[request.request_id] = client
        try:
            stream = await client.add(prepared, external_id=external_id, arrival_s=arrival_s, kind=kind)
        except BaseException:
            self.router.forget(request.request_id)
            self._pinning.pop(request.request_id, None)
            raise
        stream.metrics.engine = number
        return stream

    def _engine_apart(self, request: Request) -> int | None:
        """Return the engine that is to compute a request's prompt for one that decodes; None: that does it itself.

        It does where little is left to compute behind what it has cached, where each of the prompt's hidden states is
        needed, and until it is connected to the engines for prompts.
        """
        options, num_tokens = self._settings.options, len(request.prompt_token_ids)
        if num_tokens < options.prefill_least_tokens or not options.prefill_engines or not self._can_be_apart(request):
            return None
        engines = [number for number in self._progressing(self._living) if number < options.prefill_engines]
        decodes = self.router.rank(request, self._candidates(request))[0]
        kv = self._clients[decodes].state.kv
        num_connected = 0 if kv is None else kv.transfer.get("peers_connected", 0)
        if not engines or decodes < options.prefill_engines or num_connected < len(engines):
            return None
        if num_tokens - self.router.num_cached(request, decodes) < options.prefill_least_tokens:
            return None
        return self.router.rank(request, engines)[0]

    def _can_be_apart(self, request: Request) -> bool:
        generates = not isinstance(request.task, PinTask | Pool)
        return generates and request.reads_cache and request.request_id not in self._restoring

    def _progressing(self, engines: list[int]) -> list[int]:
        """Return the engines that make progress, of these."""
        limit_s = self._settings.options.stall_limit
        return [number for number in engines if self._clients[number].stalled_s <= limit_s]

    def _candidates(self, request: Request) -> list[int]:
        """Return the engines that may get a request: those that make progress, and have room for it beside their pins.

        If there are none of these, all that are alive: the request waits, or the engine refuses it with the reason.
        """
        self._check_serves()
        decoding = self._decoding
        making_progress = self._progressing(decoding) or decoding
        return [number for number in making_progress if self._can_run(number, request)] or making_progress

    def _can_run(self, number: int, request: Request) -> bool:
        limits, num_tokens = self._clients[number].inputs.limits, len(request.prompt_token_ids)
        try:
            limits.check_admissible(num_tokens, request.max_tokens, request.params.n)
            if isinstance(request.task, PinTask):
                limits.check_pinnable(num_tokens, len(self._clients[number].state.pins), most_needed=0)
        except InvalidRequestError:
            return False
        return True

    @property
    def num_open(self) -> int:
        """Requests that were sent, and of which the last output was not read yet."""
        return sum(client.num_open for client in self._clients)

    @property
    def num_queued(self) -> int:
        """Requests that were sent and not yet admitted."""
        return sum(client.num_queued for client in self._clients)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens x n of the requests that were sent and not yet admitted."""
        return sum(client.num_queued_tokens for client in self._clients)

    @property
    def num_free_seqs(self) -> int:
        """Requests of one sequence that could run at once, by the last reports."""
        return sum(self._clients[number].num_free_seqs for number in self._decoding)

    async def read_adapter(self, folder: str) -> Adapter:
        """Have an engine read an adapter; the others read it for their first request."""
        self._check_serves()
        return await self._clients[self._living[0]].read_adapter(folder)

    # --- pinned prefixes ------------------------------------------------------------------------------------------

    def unpin(self, request_id: int) -> None:
        """Release what a request has pinned, or abort it."""
        client = self._pinning.pop(request_id, None)
        if client is not None:
            client.unpin(request_id)

    async def release_pin(self, request_id: int) -> None:
        """Release what a request has pinned; its blocks are free on return. EngineDeadError if its engine has died."""
        client = self._pinning.pop(request_id, None)
        if client is not None:
            await client.release_pin(request_id)

    async def save_session(self, request_id: int, folder: Path) -> SessionBlocks:
        """Copy what a request has pinned into the store of a session. EngineDeadError if its engine has died."""
        client = self._pinning.get(request_id)
        if client is None:
            return SessionBlocks(code="gone", message="the session's prefix is pinned no more")
        return await client.save_session(request_id, folder)

    async def open_session(self, request: Request, folder: Path, num_blocks: int, identity: str) -> SessionBlocks:
        """Let an engine load from a saved session; the request will be its own."""
        client = self._clients[self.router.rank(request, self._candidates(request))[0]]
        self._restoring[request.request_id] = client
        return await client.open_session(request, folder, num_blocks, identity)

    def close_session(self, request: Request) -> None:
        """Let the request load no more from the saved session."""
        client = self._restoring.pop(request.request_id, None)
        if client is not None:
            client.close_session(request)

    def count_pinned_blocks(self) -> None:
        """Count in the limits of requests to come the pinned blocks of the engine with the fewest."""
        limits = self.inputs.limits
        num_pinned = min((self._clients[number].state.num_pinned_blocks for number in self._decoding), default=0)
        if num_pinned != limits.num_pinned_blocks:
            self.inputs.limits = replace(limits, num_pinned_blocks=num_pinned)

    # --- engines --------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return bool(self._living)

    @property
    def death_reason(self) -> str:
        """Reason that no engine answers; for a fleet that is not alive."""
        reasons = (f"engine {number}: {client.death_reason}" for number, client in enumerate(self._clients))
        return f"all engines are dead; {'; '.join(reasons)}"

    @property
    def stalled_s(self) -> float:
        """Seconds since an engine made progress, although all that are alive have work."""
        return min((self._clients[number].stalled_s for number in self._living), default=0.0)

    async def _sleep(self, level: int) -> None:
        self._pinning.clear()
        for number in range(len(self._clients)):
            self.router.replace(number)
        try:
            await self._ask_all(lambda client: client.sleep(level))
        except EngineError:
            await self._ask_all(lambda client: client.wake_up())
            raise

    async def _wake_up(self, tags: tuple[Tag, ...]) -> None:
        await self._ask_all(lambda client: client.wake_up(tags))

    async def _ask_all(self, ask: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Ask the engines that are alive, and wait for all of them; one that dies is started again, and does not sleep.

        Raises the first error of another kind.
        """
        asked = (ask(self._clients[number]) for number in self._living)
        for error in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(error, BaseException) and not isinstance(error, EngineDeadError):
                raise error

    async def close(self) -> None:
        """End the engine processes, and with them all requests. Returns when they are gone. Idempotent."""
        await asyncio.gather(*(client.close() for client in self._clients))

    def record_step(self, number: int, step: Stepped) -> None:
        """Record a step of an engine."""
        self.record_state(number, step.state, step.admissions, step.deltas)

    def record_state(
        self, number: int, state: EngineState, admissions: Sequence[Admission] = (),
        deltas: Sequence[SequenceDelta] = (),
    ) -> None:  # fmt: skip
        """Record the state of an engine, and what a step has admitted and sampled."""
        kv = state.kv
        evicted, used = (0, 0) if kv is None else (kv.evicted_blocks, kv.used_blocks)
        self.router.on_step(number, admissions, deltas, evicted, used, state.waits_for)
        self.count_pinned_blocks()

    async def supervise(
        self,
        on_spawn: Callable[[int, EngineProcess], None],
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        spawn: Callable[[EngineOptions, int, bytes], EngineProcess] = EngineProcess.spawn,
    ) -> Exception:
        """Restart each engine whenever it dies; return the last error once none is alive and none can be started.

        `on_spawn` is called with the number and the process of each new engine; `pause` waits before each start.
        """
        return await _keep_alive(self, lambda number: self._restart(number, on_spawn, spawn), pause)

    async def _restart(
        self, number: int, on_spawn: Callable[[int, EngineProcess], None],
        spawn: Callable[[EngineOptions, int, bytes], EngineProcess],
    ) -> None:  # fmt: skip
        """Start an engine in the place of a dead one, of the same sizes: less memory is free now."""
        dead, observer = self._clients[number].ready, self._observers[number]
        sized = same_sizes(self._settings.options, dead.limits, dead.num_swap_blocks)
        process = spawn(sized, number, self._clients[number].secret)
        on_spawn(number, process)
        client = await _connect(process, self._settings, observer, self.request_ids, self.tokenizer, sized)
        self._clients[number] = client
        observer.engine.engine_restarted()

    def lose(self, number: int) -> None:
        """Forget what a dead engine had: its requests, its cache and its pins."""
        dead = self._clients[number]
        self.router.replace(number)
        self._observers[number].engine.engine_died()
        lost = {request_id for request_id, client in self._pinning.items() if client is dead}
        self._pinning = {request_id: client for request_id, client in self._pinning.items() if client is not dead}
        for pin in [pin for pin in self.pinned.of_key(None) if pin.request_id in lost]:
            self.pinned.remove(pin.prefix.id, None)
        self.count_pinned_blocks()


def _for_prompt(request: Request, transfer: KVTransfer) -> Request:
    """Return a request for the keys and values of another one's prompt, of its number, in an engine for prompts."""
    params = replace(
        ANY_TOKEN, ttft_deadline_ms=request.params.ttft_deadline_ms, deadline_ms=request.params.deadline_ms
    )
    return Request(
        request.request_id, request.prompt_token_ids, params, seed=0, max_tokens=1, scope=request.scope,
        images=request.images, adapter_folder=request.adapter_folder, adapter_name=request.adapter_name,
        priority=request.priority, owner=request.owner, client_id=request.client_id, weight=request.weight,
        transfer=transfer, received_s=request.received_s,
    )  # fmt: skip


def _least(ready: Sequence[Ready]) -> Ready:
    """Return the figures of the first engine, with the sizes of the smallest: each takes what it found free."""
    limits = replace(
        ready[0].limits,
        num_blocks=min(each.limits.num_blocks for each in ready),
        max_model_len=min(each.limits.max_model_len for each in ready),
        num_state_slots=min(each.limits.num_state_slots for each in ready),
    )
    return structs.replace(ready[0], limits=limits, num_swap_blocks=min(each.num_swap_blocks for each in ready))


async def _keep_alive(
    fleet: Fleet, restart: Callable[[int], Awaitable[None]], pause: Callable[[float], Awaitable[None]]
) -> Exception:
    """Restart engines until none is alive and each has failed to start MAX_FAILED_STARTS times; return the last error.

    `restart` starts the engine of a number and returns when it is ready.
    """
    num_failed = [0] * len(fleet.engines)
    keepers = [
        asyncio.create_task(_keep(fleet, number, num_failed, restart, pause), name=f"keeper of engine {number}")
        for number in range(len(num_failed))
    ]
    try:
        done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for keeper in keepers:
            keeper.cancel()
        await asyncio.wait(keepers)             # one may have to stop a loading engine


async def _keep(
    fleet: Fleet, number: int, num_failed: list[int], restart: Callable[[int], Awaitable[None]],
    pause: Callable[[float], Awaitable[None]],
) -> Exception:  # fmt: skip
    """Restart one engine whenever it dies."""
    clock, num_short_lives = asyncio.get_running_loop().time, 0
    while True:
        begun_s = clock()
        why: Exception = await fleet.engines[number].wait_dead()
        num_short_lives = num_short_lives + 1 if clock() - begun_s < HEALTHY_S else 1
        fleet.lose(number)
        num_failed[number] = 0
        while True:
            pause_s = min(FIRST_PAUSE_S * 2 ** (num_short_lives + num_failed[number] - 1), LONGEST_PAUSE_S)
            log.error("engine %d: %s; it is started again in %g s", number, why, pause_s)
            await pause(pause_s)
            try:
                await restart(number)
                break
            except (EngineError, OSError) as error:
                why = error
                num_failed[number] += 1
                if not fleet.is_alive and min(num_failed) >= MAX_FAILED_STARTS:
                    return why
        num_failed[number] = 0
        log.warning("engine %d was started again; its cached and pinned prefixes are lost", number)
