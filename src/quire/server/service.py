"""Service: the engine's client and what all routes share around it."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from quire.core.checks import shown
from quire.core.errors import DeadlineExceededError
from quire.core.lora import Adapter
from quire.engine.metrics.page import Metrics
from quire.engine.processes.base_client import BaseClient
from quire.server.adapter_names import AdapterNames
from quire.server.errors import ApiError, as_api_error, engine_unhealthy, shutting_down
from quire.server.grammars.grammar_checker import GrammarChecker
from quire.server.history import History
from quire.server.limits.active_responses import ActiveResponses
from quire.server.limits.fair_semaphore import Lanes, PreparationThreads
from quire.server.limits.queue_reservations import AdmittedCall, QueueReservations
from quire.server.limits.time_slices import TimeSlices
from quire.server.options import ServerOptions
from quire.server.templates.template_renderer import TemplateRenderer
from quire.server.tools.served_formats import ServedFormats

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
    threads: PreparationThreads = field(default_factory=PreparationThreads)
    decode_lanes: Lanes = field(default_factory=Lanes)  # for large bodies, decoded in slices on the event loop
    slices: TimeSlices = field(default_factory=TimeSlices)
    responses: ActiveResponses = field(default_factory=ActiveResponses)
    model_source: str | None = None           # folder, file or id that the model was loaded from; None: its first name
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    num_open_calls: int = 0                   # calls of routes that compute
    critical_tasks: tuple[asyncio.Task[Any], ...] = ()  # the service is unhealthy once one of them has ended

    def __post_init__(self) -> None:
        """Build what depends on the options. ConfigError if they name a format that does not exist."""
        self.admission = QueueReservations(self.options.max_total_body_bytes, self.metrics)
        self.adapters = AdapterNames(self.names)
        self.history = History(self.options.max_history_bytes)
        self.formats = ServedFormats(self.client.tokenizer, self.options, self.templates)
        self.grammars = GrammarChecker(self.options)

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
        """Raise ApiError 503 while draining or without a healthy engine, 429 without room for so many requests."""
        if self.is_draining:
            self.metrics.refused("shutting_down")
            raise shutting_down()
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
