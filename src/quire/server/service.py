"""Service: the engine's client, what all routes share around it, and reservations of the engine's queue.

Everything that a client multiplies is reserved here before any work is done for it. The requests of a client, an API
key or a connection without keys, that wait or run are bounded, so that one client cannot fill the queue: a call counts
from its admission until its requests finish. Prefixes that are being computed count towards the bounds on pins like
pinned ones; a pin counts with all of its blocks, shared ones included: it may be their only owner later.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from quire.core.checks import shown
from quire.core.errors import DeadlineExceededError
from quire.core.lora import Adapter
from quire.core.owner_labels import OPERATOR
from quire.engine.metrics.page import Metrics
from quire.engine.options import EngineOptions
from quire.engine.processes.base_client import BaseClient
from quire.engine.requests.input_processor import PreparedRequest
from quire.engine.requests.pinned_prefixes import PinnedPrefixes
from quire.server.adapter_names import AdapterNames
from quire.server.errors import (
    ApiError,
    as_api_error,
    asleep,
    engine_unhealthy,
    invalid,
    overloaded,
    shutting_down,
    too_many_queued_tokens,
    too_many_requests,
)
from quire.server.grammars.grammar_checker import GrammarChecker
from quire.server.history import History
from quire.server.images.image_inputs import ImageDecoder
from quire.server.limits.active_responses import ActiveResponses
from quire.server.limits.fair_semaphore import Lanes, PreparationThreads, TimeSlices
from quire.server.limits.memory import BodyMemory, ImageMemory, LogprobMemory
from quire.server.options import Limits, ServerOptions
from quire.server.templates.template_renderer import TemplateRenderer
from quire.server.tools.served_formats import ServedFormats
from quire.server.traces import Traces


class PendingPins:
    """Number of pending pins, and the blocks that they will hold by the number of the key."""

    def __init__(self) -> None:
        self._num_pins = 0
        self._num_blocks: list[tuple[int, int]] = []    # (number of the key, blocks) of each tokenized prompt

    def __len__(self) -> int:
        """Count the pending pins."""
        return self._num_pins

    @contextmanager
    def reserve(self, pinned: PinnedPrefixes, limits: Limits) -> Iterator[None]:
        """Reserve one pin. ApiError 400 past max_pinned_prefixes."""
        num_pins, most = len(pinned) + self._num_pins, limits.max_pinned_prefixes
        if num_pins >= most:
            message = f"{num_pins} prefixes are pinned already, and at most {most} may be (max_pinned_prefixes)"
            invalid(message, param="prompt")
        self._num_pins += 1
        try:
            yield
        finally:
            self._num_pins -= 1

    @contextmanager
    def reserve_blocks(
        self, key_number: int, num_blocks: int, total_blocks: int, pinned: PinnedPrefixes, limits: Limits
    ) -> Iterator[None]:
        """Reserve blocks of the share of the cache that may be pinned. ApiError 400 past that share, or the key's.

        The operator has no share of its own, nor have clients without keys, which cannot be distinguished.
        """
        self._check("max_pinned_share", None, num_blocks, total_blocks, pinned, limits)
        if key_number not in (0, OPERATOR):
            self._check("max_pinned_share_per_key", key_number, num_blocks, total_blocks, pinned, limits)
        held = key_number, num_blocks
        self._num_blocks.append(held)
        try:
            yield
        finally:
            self._num_blocks.remove(held)

    def _check(
        self, name: str, key_number: int | None, num_blocks: int, total_blocks: int, pinned: PinnedPrefixes,
        limits: Limits,
    ) -> None:  # fmt: skip
        share = getattr(limits, name)
        pending = sum(blocks for key, blocks in self._num_blocks if key_number in (None, key))
        held, most = pinned.num_blocks(key_number) + pending, int(share * total_blocks)
        if held + num_blocks > most:
            owner = "" if key_number is None else " of this key"
            message = (
                f"the prefix takes {num_blocks} KV blocks, and pins{owner} hold {held} already, but of all "
                f"{total_blocks} (num_kv_blocks) they may hold {most} ({name} {share:g})"
            )
            invalid(message, param="prompt")


class QueueReservations:
    """Reservations of all API requests of a service. Lives on the event loop."""

    def __init__(self, max_total_body_bytes: int, max_total_image_bytes: int, metrics: Metrics) -> None:
        self._metrics = metrics
        self.num_preparing = 0           # engine requests admitted and not yet sent to the engine
        self.num_preparing_tokens = 0    # prompt tokens x n of requests that are being sent
        self.num_by_client: dict[str, int] = {}     # requests that wait or run; clients without any are not in it
        self.bodies = BodyMemory(max_total_body_bytes)
        self.images = ImageMemory(max_total_image_bytes)
        self.logprobs = LogprobMemory()
        self.pins = PendingPins()

    def check_capacity(self, client: BaseClient, limits: Limits, num_requests: int, client_id: str) -> None:
        """Raise ApiError 429 if the queue has no room for so many requests, or the client has too many already.

        While no request waits, as many are admitted beyond the bound of the queue as the engine can start at once: a
        burst is not refused by an idle engine.
        """
        held, most = self.num_by_client.get(client_id, 0), limits.max_requests_per_key
        if most and held + num_requests > most:
            self._metrics.refused("key_limit")
            raise too_many_requests(held, most)
        limit, num_queued = limits.max_queued_requests, self.num_preparing + client.num_queued
        num_beyond = num_queued + num_requests - limit
        if num_beyond > 0 and num_beyond > client.num_free_seqs:
            self._metrics.queue_full("max_num_queued_reqs")
            raise overloaded(num_queued, limit, self._metrics.retry_after_s(num_queued))

    def check_call(self, client: BaseClient, limits: Limits, num_requests: int, param: str) -> None:
        """Raise ApiError 400 for a call of more prompts than could ever be admitted at once."""
        num_queued, num_seqs = limits.max_queued_requests, client.ready.limits.max_num_seqs
        limit, per_key = num_queued + num_seqs, limits.max_requests_per_key
        bounds = f"{num_queued} may wait (max_queued_requests) and {num_seqs} run (max_num_seqs)"
        if 0 < per_key < limit:
            limit, bounds = per_key, f"{per_key} may wait or run (max_requests_per_key)"
        if num_requests > limit:
            invalid(f"{num_requests} prompts in one call; at most {bounds}", param=param)

    def reserve_tokens(
        self, client: BaseClient, limits: Limits, requests: Iterable[PreparedRequest], param: str = "n"
    ) -> "TokenReservation":
        """Count the prompt tokens x n of requests as queued while they are sent, in the context of the result.

        ApiError 429 while too many tokens wait, 400 if the call alone has more than may ever wait.
        """
        counts = [prepared.request.num_queued_tokens for prepared in requests]
        num_tokens = sum(counts)
        limit, num_queued = limits.max_queued_tokens, self.num_preparing_tokens + client.num_queued_tokens
        if num_tokens > limit:
            invalid(f"prompt tokens x n are {num_tokens}; at most {limit} may wait (max_queued_tokens)", param=param)
        if num_queued + num_tokens > limit:
            self._metrics.queue_full("max_num_queued_tokens")
            retry_after_s = self._metrics.retry_after_s(self.num_preparing + client.num_queued)
            raise too_many_queued_tokens(num_queued, limit, retry_after_s)
        return TokenReservation(self, counts)


class AdmittedCall:
    """Requests of one call, which count for their client until the first `release`.

    They are queued within its context, while they are tokenized and sent. At its end they are released, unless
    `is_kept` was set: then the generation releases them.
    """

    __slots__ = ("_client_id", "_control", "_num_image_bytes", "_num_preparing", "_num_requests", "is_kept")

    def __init__(self, control: QueueReservations, client_id: str, num_requests: int) -> None:
        self._control, self._client_id, self._num_requests = control, client_id, num_requests
        self._num_preparing, self._num_image_bytes, self.is_kept = num_requests, 0, False
        control.num_preparing += num_requests
        control.num_by_client[client_id] = control.num_by_client.get(client_id, 0) + num_requests

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._control.num_preparing -= self._num_preparing
        if not self.is_kept:
            self.release()

    def reserve_image(self, num_bytes: int, where: str) -> None:
        """Count the bytes of an image of the call until `release`. Errors as `ImageMemory.reserve`."""
        self._control.images.reserve(self._client_id, self._num_image_bytes, num_bytes, where)
        self._num_image_bytes += num_bytes

    def release(self) -> None:
        """Stop counting the requests and their images. Idempotent."""
        if self._num_image_bytes:
            self._control.images.release(self._client_id, self._num_image_bytes)
            self._num_image_bytes = 0
        num_requests, self._num_requests = self._num_requests, 0
        if not num_requests:
            return
        held = self._control.num_by_client
        held[self._client_id] -= num_requests
        assert held[self._client_id] >= 0, f"{self._client_id} has {held[self._client_id]} requests"
        if not held[self._client_id]:
            del held[self._client_id]


class TokenReservation:
    """Prompt tokens x n of a call that is being sent, counted as queued within its context."""

    __slots__ = ("_control", "_unsent")

    def __init__(self, control: QueueReservations, counts: list[int]) -> None:
        self._control, self._unsent = control, counts[::-1]
        control.num_preparing_tokens += sum(counts)

    def __enter__(self) -> Self:
        return self

    def sent(self) -> None:
        """Stop counting the next request, which was sent: from now on the engine's client counts it."""
        self._control.num_preparing_tokens -= self._unsent.pop()

    def __exit__(self, *error: object) -> None:
        self._control.num_preparing_tokens -= sum(self._unsent)


MAX_NAMES_TOLD = 10  # bound on names in the error for an unknown model


@dataclass(slots=True)
class Service:
    """One engine or several behind HTTP. Lives on the event loop; other threads may read only `names` and `options`."""

    client: BaseClient                        # replaced when its only engine is restarted
    options: ServerOptions
    names: tuple[str, ...]                    # names of the model; responses carry the first
    metrics: Metrics
    templates: TemplateRenderer
    admission: QueueReservations = field(init=False)
    adapters: AdapterNames = field(init=False)
    history: History = field(init=False)      # API requests with their tokens and times
    formats: ServedFormats = field(init=False)     # tool calls and reasoning
    grammars: GrammarChecker = field(init=False)
    images: ImageDecoder | None = field(init=False, default=None)  # None: the model reads text alone
    traces: Traces | None = field(init=False, default=None)
    threads: PreparationThreads = field(default_factory=PreparationThreads)
    decode_lanes: Lanes = field(default_factory=Lanes)  # for large bodies, decoded in slices on the event loop
    slices: TimeSlices = field(default_factory=TimeSlices)
    responses: ActiveResponses = field(default_factory=ActiveResponses)
    engine_options: EngineOptions | None = None  # None: no disk, no part in prefill apart from decoding
    can_sleep: bool = False                   # the engine's enable_sleep_mode
    model_source: str | None = None           # folder, file or id that the model was loaded from; None: its first name
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    is_asleep: bool = False                   # from /sleep to /wake_up: calls that compute are refused
    num_open_calls: int = 0                   # calls of routes that compute
    critical_tasks: tuple[asyncio.Task[Any], ...] = ()  # the service is unhealthy once one of them has ended

    def __post_init__(self) -> None:
        """Build what depends on the options. ConfigError if they name a format that does not exist."""
        self.admission = QueueReservations(
            self.options.max_total_body_bytes, self.options.max_total_image_bytes, self.metrics
        )
        self.adapters = AdapterNames(self.names)
        self.history = History(self.options.max_history_bytes)
        self.formats = ServedFormats(self.client.tokenizer, self.options, self.templates)
        self.grammars = GrammarChecker(self.options)
        if (prompts := self.client.inputs.images) is not None:
            self.images = ImageDecoder(prompts.settings, self.options)
        if self.options.enable_debug:
            self.metrics.keep_steps()
        if self.options.traces_url is not None:
            self.traces = Traces(self.options.traces_url, self.metrics.spans_dropped)

    def check_model(self, name: str | None) -> str:
        """Return the model name of a response: the requested one, or the first. ApiError 404 for an unknown one.

        Names are those of the model and of its LoRA adapters.
        """
        if name is None:
            return self.names[0]
        if name not in self.names and self.adapters.find(name) is None:
            served = [*self.names, *(each.name for each in self.adapters.all)]
            more = f", and {len(served) - MAX_NAMES_TOLD} more" if len(served) > MAX_NAMES_TOLD else ""
            message = (
                f"the model {shown(name)} does not exist; this server has {', '.join(served[:MAX_NAMES_TOLD])}{more}"
            )
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def adapter_of(self, name: str) -> Adapter | None:
        """Return the adapter of a name that was checked; None for the model. ApiError 404 if it was unloaded since."""
        if name in self.names:
            return None
        found = self.adapters.find(self.check_model(name))
        return None if found is None else found.adapter

    def check_engine(self) -> None:
        """Raise ApiError 503 when the engine is dead or stalled, or a critical task has ended."""
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
        """Raise ApiError 503 while draining, asleep or without a healthy engine, 429 without room for the requests."""
        if self.is_draining:
            self.metrics.refused("shutting_down")
            raise shutting_down()
        if self.is_asleep:
            self.metrics.refused("asleep")
            raise asleep()
        try:
            self.check_engine()
        except ApiError as error:
            self.metrics.failed(str(error.code))
            raise
        self.admission.check_capacity(self.client, self.options, num_requests, client_id)

    def admit(self, num_requests: int, param: str = "prompt", client_id: str = "") -> AdmittedCall:
        """Reserve places in the queue while a call's requests are tokenized and sent; each prompt is a request.

        Raises before any work is done: as `check_capacity`, or ApiError 400 if so many could never be admitted. The
        reservation may be kept until the requests have finished.
        """
        if not self.is_draining:
            self.admission.check_call(self.client, self.options, num_requests, param)
        self.check_capacity(num_requests, client_id)
        return AdmittedCall(self.admission, client_id, num_requests)

    def to_api_error(self, error: Exception) -> ApiError:
        """Return the error that a client receives for an exception, and count it if the call did not cause it."""
        api_error = as_api_error(error)
        if api_error.status >= 500 and not isinstance(error, ApiError | DeadlineExceededError):
            self.metrics.failed(str(api_error.code))
        return api_error
