"""What all routes share: the engine, the limits, who is let in, and what is counted."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from quire.core.checks import shown
from quire.engine.client import EngineClient
from quire.server.errors import ApiError, invalid, overloaded, shutting_down
from quire.server.history import History
from quire.server.metrics import Metrics
from quire.server.open_answers import OpenAnswers
from quire.server.options import ServerOptions
from quire.server.templates import TemplateRenderer

LONG_CHARS = 1 << 17  # a text of more takes a quarter of a second and up to eight to be tokenized


@dataclass(slots=True)
class RequestRecord:
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


def _threads() -> ThreadPoolExecutor:
    """Return the threads that turn prompts into tokens, and tokens into large answers."""
    return ThreadPoolExecutor(2, thread_name_prefix="prepare")


def _long_thread() -> ThreadPoolExecutor:
    """Return the thread for long prompts. One of its own: they may hold up each other, and no short ones."""
    return ThreadPoolExecutor(1, thread_name_prefix="prepare long")


@dataclass(slots=True)
class Service:
    """One engine behind HTTP. Lives on the event loop; only `names` and `options` may be read from elsewhere."""

    client: EngineClient
    options: ServerOptions
    names: tuple[str, ...]                    # of the model, the first is the one that answers carry
    metrics: Metrics
    templates: TemplateRenderer
    history: History = field(default_factory=History)
    answers: OpenAnswers = field(default_factory=OpenAnswers)
    threads: ThreadPoolExecutor = field(default_factory=_threads)
    long_thread: ThreadPoolExecutor = field(default_factory=_long_thread)
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    vital: tuple[asyncio.Task[Any], ...] = ()  # tasks without which the server is not well
    num_preparing: int = 0                    # requests let in and not yet sent to the engine

    def check_model(self, name: str | None) -> str:
        """Return the name that answers carry: the one asked for, or the first. ApiError 404 for another model."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            message = f"the model {shown(name)} does not exist; this server has {', '.join(self.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def threads_for(self, num_chars: int) -> ThreadPoolExecutor:
        """Return where a prompt of so many characters, or token ids, is prepared."""
        return self.threads if num_chars <= LONG_CHARS else self.long_thread

    @contextmanager
    def let_in(self, num_requests: int, param: str = "prompt") -> Iterator[None]:
        """Hold places in the queue while requests are tokenized and sent; raise before any work if there are none.

        A call of several prompts counts as that many. Beyond the queue's bound, so many are let in as there are free
        seats while nobody waits: a burst shall not be turned away from an idle engine.
        ApiError 503 while shutting down, 429 when the queue is full, 400 when it could never take so many.
        """
        limit = self.options.max_queued_requests
        if self.is_draining:
            self.metrics.refused("shutting_down")
            raise shutting_down()
        if num_requests > limit:
            invalid(f"{num_requests} prompts in one call; at most {limit} may wait (max_queued_requests)", param=param)
        num_queued = self.num_preparing + self.client.num_queued
        if num_queued + num_requests > limit + self.client.num_free_seats:
            self.metrics.refused("server_overloaded")
            raise overloaded(num_queued, limit, self.metrics.seconds_until_room(num_queued))
        self.num_preparing += num_requests
        try:
            yield
        finally:
            self.num_preparing -= num_requests
