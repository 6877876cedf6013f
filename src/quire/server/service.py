"""What all routes share: the engine, the limits, who is let in, and what is counted."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from quire.core.checks import shown
from quire.engine.client import EngineClient
from quire.engine.input_processor import PreparedRequest
from quire.server.admission.body_memory import BodyMemory
from quire.server.admission.concurrency import ConcurrencyLimiter, ConcurrencyReservation
from quire.server.admission.logprob_memory import LogprobMemory
from quire.server.admission.pending_pins import PendingPins
from quire.server.api.active_responses import ActiveResponses
from quire.server.errors import (
    ApiError,
    as_api_error,
    engine_unhealthy,
    invalid,
    overloaded,
    shutting_down,
    too_many_queued_tokens,
)
from quire.server.fair_semaphore import Lanes
from quire.server.ops.metrics import Metrics
from quire.server.options import ServerOptions
from quire.server.template_renderer import TemplateRenderer
from quire.server.time_slices import TimeSlices
from quire.server.watch.history import History

T = TypeVar("T")

LONG_CHARS = 1 << 17  # a text of more takes a quarter of a second and up to eight to be tokenized


class RequestRecord(msgspec.Struct, omit_defaults=True):
    """What the log line of one HTTP request says; routes fill in what they know. None is left out."""

    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    num_prompts: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reasons: list[str] | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    preemptions: int | None = None


@dataclass(slots=True)
class Service:
    """One engine behind HTTP. Lives on the event loop; only `names` and `options` may be read from elsewhere."""

    client: EngineClient
    options: ServerOptions
    names: tuple[str, ...]                    # of the model, the first is the one that answers carry
    metrics: Metrics
    templates: TemplateRenderer
    history: History = field(init=False)
    logprob_memory: LogprobMemory = field(default_factory=LogprobMemory)
    slices: TimeSlices = field(default_factory=TimeSlices)
    responses: ActiveResponses = field(default_factory=ActiveResponses)
    concurrency: ConcurrencyLimiter = field(default_factory=ConcurrencyLimiter)
    # for prompts to become tokens, and tokens large answers; long prompts may hold up each other, and no short ones
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "prepare"))
    long_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "prepare long"))
    thread_lanes: Lanes = field(default_factory=lambda: Lanes(num_short=2, num_long=1))
    decode_lanes: Lanes = field(default_factory=Lanes)  # of large bodies, in slices on the event loop
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    critical_tasks: tuple[asyncio.Task[Any], ...] = ()  # tasks without which the server is not well
    num_preparing: int = 0                    # requests let in and not yet sent to the engine
    num_preparing_tokens: int = 0             # prompt tokens x n of calls that are being sent to the engine
    body_memory: BodyMemory = field(init=False)     # that are received, decoded and tokenized
    pending_pins: PendingPins = field(default_factory=PendingPins)

    def __post_init__(self) -> None:
        """Make what depends on the options."""
        self.body_memory = BodyMemory(self.options.max_total_body_bytes)
        self.history = History(self.options.max_history_bytes)

    def check_model(self, name: str | None) -> str:
        """Return the name that answers carry: the one asked for, or the first. ApiError 404 for another model."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            message = f"the model {shown(name)} does not exist; this server has {', '.join(self.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    async def run_in_thread(self, num_chars: int, work: Callable[[], T], client_id: str = "") -> T:
        """Return what `work` returns, which is done off the event loop for so many characters, or token ids.

        Clients take turns at the threads.
        """
        is_long = num_chars > LONG_CHARS
        threads = self.long_thread if is_long else self.threads
        async with self.thread_lanes.slot(client_id, is_long=is_long):
            return await asyncio.get_running_loop().run_in_executor(threads, work)

    def check_engine(self) -> None:
        """Raise ApiError 503 when the engine is dead or stalled, or a task that serves it has ended."""
        if not self.client.is_alive:
            raise engine_unhealthy(self.client.death_reason)
        for task in self.critical_tasks:
            if task.done():
                raise engine_unhealthy(f"the server's {task.get_name()} has ended")
        limit_s = self.options.stall_limit
        if self.client.stalled_s > limit_s:
            message = f"the engine has work and made no progress for more than {limit_s:g} s (stall_limit)"
            raise engine_unhealthy(message)

    def check_capacity(self, num_requests: int, client_id: str = "") -> None:
        """Raise ApiError 503 while shutting down or without an engine that works, 429 if the queue has no such room.

        429 also where this client has too many requests (max_requests_per_key). Beyond the queue's bound, so many are
        let in as there are free seats while nobody waits: a burst shall not be turned away from an idle engine.
        """
        if self.is_draining:
            self.metrics.refused("shutting_down")
            raise shutting_down()
        try:
            self.check_engine()
        except ApiError as error:
            self.metrics.failed(str(error.code))
            raise
        refusal = self.concurrency.refusal(client_id, num_requests, self.options.max_requests_per_key)
        if refusal is not None:
            self.metrics.refused("key_limit")
            raise refusal
        limit, num_queued = self.options.max_queued_requests, self.num_preparing + self.client.num_queued
        if num_queued + num_requests > limit + self.client.num_free_seqs:
            self.metrics.refused("server_overloaded")
            raise overloaded(num_queued, limit, self.metrics.retry_after_s(num_queued))

    @contextmanager
    def admit(self, num_requests: int, param: str = "prompt", client_id: str = "") -> Iterator[ConcurrencyReservation]:
        """Hold places in the queue while requests are tokenized and sent; raise before any work if there are none.

        A call of several prompts counts as that many. Raises as `check_capacity`, and ApiError 400 if
        so many could never be admitted.
        The reservation is the client's: what runs the requests keeps it until they have ended.
        """
        self._check_call(num_requests, param)
        self.check_capacity(num_requests, client_id)
        self.num_preparing += num_requests
        reservation = self.concurrency.reserve(client_id, num_requests)
        try:
            yield reservation
        finally:
            self.num_preparing -= num_requests
            if not reservation.is_kept:
                reservation.release()

    def _check_call(self, num_requests: int, param: str) -> None:
        """Raise ApiError 400 for a call of more prompts than could ever be taken at once."""
        num_queued, num_seats = self.options.max_queued_requests, self.client.ready.limits.max_num_seqs
        limit, per_key = num_queued + num_seats, self.options.max_requests_per_key
        bounds = f"{num_queued} may wait (max_queued_requests) and {num_seats} run (max_num_seqs)"
        if 0 < per_key < limit:
            limit, bounds = per_key, f"{per_key} may wait or run (max_requests_per_key)"
        if num_requests > limit and not self.is_draining:
            invalid(f"{num_requests} prompts in one call; at most {bounds}", param=param)

    @contextmanager
    def reserve_tokens(
        self, requests: Iterable[PreparedRequest], param: str = "n"
    ) -> Iterator[Callable[[PreparedRequest], None]]:
        """Hold room for a call's prompt tokens x n while its requests are sent; raise before any is.

        Gives the function to call for each request that has been sent: from then on the engine's client counts it.
        ApiError 429 while too many wait, 400 if the call alone has more than may ever wait.
        """
        num_tokens = sum(prepared.request.num_queued_tokens for prepared in requests)
        limit, num_queued = self.options.max_queued_tokens, self.num_preparing_tokens + self.client.num_queued_tokens
        if num_tokens > limit:
            invalid(f"prompt tokens x n are {num_tokens}; at most {limit} may wait (max_queued_tokens)", param=param)
        if num_queued + num_tokens > limit:
            self.metrics.refused("server_overloaded")
            retry_after_s = self.metrics.retry_after_s(self.num_preparing + self.client.num_queued)
            raise too_many_queued_tokens(num_queued, limit, retry_after_s)
        num_unsent = num_tokens

        def sent(prepared: PreparedRequest) -> None:
            nonlocal num_unsent
            num_unsent -= prepared.request.num_queued_tokens
            self.num_preparing_tokens -= prepared.request.num_queued_tokens

        self.num_preparing_tokens += num_tokens
        try:
            yield sent
        finally:
            self.num_preparing_tokens -= num_unsent

    def to_api_error(self, error: Exception) -> ApiError:
        """Return what a client is told of an error that its call has run into, and count it if it is not the call's."""
        told = as_api_error(error)
        if told.status >= 500 and not isinstance(error, ApiError):
            self.metrics.failed(str(told.code))
        return told
