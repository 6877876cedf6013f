"""HTTP load: requests that are each sent when due, and the times at which their answers arrive.

Light, since client and server often share their cores: one session, no read timeouts to arm for each chunk, raw
reads of the body, one split and one typed JSON parse for each. A request's times count from when it was due: what it
waited here for a free connection, or because this client was late, counts too.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from quire.cli import openai_stream
from quire.core.errors import EngineError
from quire_lab.sim.statistics import Timeline
from quire_lab.sim.workloads import Schedule, WorkItem

_CONNECT_S = 10.0
_KEEP_ALIVE_S = 2.0   # below the servers' 5 s and more, else a request meets a connection that is just being closed
_TIMER_S = 1e-9       # a late request waits on a timer too, or it would overtake earlier ones with expired timers


class ServerUnusableError(EngineError):
    """There is no OpenAI-compatible server where one was expected."""


@dataclass(frozen=True, slots=True)
class Target:
    """Server and model that requests are sent to."""

    url: str
    model_name: str
    timeout_s: float  # for a whole request


class Failure(msgspec.Struct, frozen=True):
    """Reason why a request has no answer: a short label to count by, and the message."""

    label: str
    message: str = ""


class AnswerStream:
    """One answer, as far as it has arrived.

    A chunk with text, or with token ids, is an arrival, however many tokens it has: the stream does not say, only
    the usage at its end does. An answer of which no chunk has text (a lone byte of a character) arrives with its last.
    """

    def __init__(self) -> None:
        self.token_times_s: list[float] = []
        self.num_chunks = 0
        self.num_usage_tokens: int | None = None
        self.num_cached_tokens: int | None = None
        self.failure: Failure | None = None
        self.is_done = False
        self._events = openai_stream.EventDecoder()

    def feed(self, piece: bytes, now_s: float) -> None:
        """Take what was read at `now_s`. What follows an error or the end is ignored."""
        try:
            for event in self._events.feed(piece):
                if not self.is_over:
                    self._take_event(event, now_s)
        except openai_stream.BrokenStreamError as error:
            self.failure = Failure("malformed stream", str(error))

    @property
    def is_over(self) -> bool:
        """True once the answer has ended or failed."""
        return self.is_done or self.failure is not None

    def _take_event(self, event: bytes, now_s: float) -> None:
        self.num_chunks += 1
        if event == openai_stream.DONE:
            self.is_done = True
            self.token_times_s = self.token_times_s or [now_s]
            return
        frame = openai_stream.read_frame(event)
        if (error := openai_stream.error_of(frame)) is not None:
            self.failure = _failure("in the stream", error)
        if frame.usage is not None:
            self._take_usage(frame.usage)
        if any(choice.text or choice.token_ids for choice in frame.choices):
            self.token_times_s.append(now_s)

    def _take_usage(self, usage: openai_stream.Usage) -> None:
        self.num_usage_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.num_cached_tokens = usage.prompt_tokens_details.cached_tokens


def refusal(status: int, body: bytes) -> Failure:
    """Return the failure that an answer with another status than 200 means, whatever its form."""
    error = openai_stream.read_error(body) or openai_stream.ErrorBody(body[:500].decode(errors="replace"))
    return _failure(str(status), error)


def _failure(where: str, error: openai_stream.ErrorBody) -> Failure:
    reason = error.code or error.type
    return Failure(f"{where} {reason}" if reason else where, error.message)


@dataclass(slots=True)
class SentRequest:
    """One request and its answer. Neither finished nor failed: the run ended first."""

    item: WorkItem
    due_s: float
    sent_s: float
    answer: AnswerStream = field(default_factory=AnswerStream)

    @property
    def is_finished(self) -> bool:
        """True if it was answered in full."""
        return self.answer.is_done and self.answer.failure is None

    @property
    def num_output_tokens(self) -> int:
        """Output tokens by the server's count, else the number of chunks."""
        counted = self.answer.num_usage_tokens
        return len(self.answer.token_times_s) if counted is None else counted

    @property
    def timeline(self) -> Timeline:
        """Due time and arrival times of the chunks; of a finished request."""
        return Timeline(self.due_s, self.answer.token_times_s, self.num_output_tokens)


@dataclass(slots=True)
class LoadRun:
    """Result of a load. Times are in seconds from its start."""

    requests: list[SentRequest]
    num_due: int               # requests there were to send
    schedule: Schedule
    duration_s: float
    client_cpu_s: float

    @property
    def finished(self) -> list[SentRequest]:
        """Requests that were answered in full."""
        return [request for request in self.requests if request.is_finished]

    @property
    def failures(self) -> list[Failure]:
        """Failures of requests."""
        return [request.answer.failure for request in self.requests if request.answer.failure is not None]

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all requests, finished or not."""
        return sum(request.num_output_tokens for request in self.requests)

    @property
    def timelines(self) -> list[Timeline]:
        """Timelines of the finished requests."""
        return [request.timeline for request in self.finished]


def open_session(api_key: str | None) -> aiohttp.ClientSession:
    """Return the one session of a benchmark. The load bounds its connections."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        auto_decompress=False,
        skip_auto_headers=("Accept-Encoding",),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
    )


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the first name of /v1/models. Raises ServerUnusableError when that cannot be had."""
    try:
        async with asyncio.timeout(_CONNECT_S), session.get(f"{url}/v1/models") as response:
            body = await response.read()
    except TimeoutError as error:
        raise ServerUnusableError(f"{url}/v1/models did not answer within {_CONNECT_S:g} s") from error
    except (aiohttp.ClientError, aiohttp.InvalidURL, OSError) as error:
        raise ServerUnusableError(f"no server answers at {url}: {error}") from error
    if response.status != 200:
        raise ServerUnusableError(f"{url}/v1/models answers {refusal(response.status, body).label}")
    if (name := openai_stream.first_model_name(body)) is None:
        raise ServerUnusableError(f"{url}/v1/models names no model")
    return name


@dataclass(slots=True)
class HttpLoad:
    """A list of requests on a schedule; `run` sends them once, or until one that has ended `is_enough`."""

    session: aiohttp.ClientSession
    target: Target
    items: Sequence[WorkItem]
    schedule: Schedule
    is_enough: Callable[[SentRequest], bool] = lambda _: False
    _enough: asyncio.Event = field(default_factory=asyncio.Event)
    _requests: list[SentRequest] = field(default_factory=list)
    _started_s: float = 0.0

    async def run(self, *stops: asyncio.Event, limit_s: float | None = None) -> LoadRun:
        """Send everything and wait for all answers; cut the rest when one of `stops` is set or `limit_s` is over."""
        cpu_s = time.process_time()
        self._started_s = time.perf_counter()
        waiting, num_clients = enumerate(self.items), min(self.schedule.max_open, len(self.items))
        clients = asyncio.gather(*(self._client(waiting) for _ in range(num_clients)))
        waits = [asyncio.ensure_future(stop.wait()) for stop in (*stops, self._enough)]
        ends: list[asyncio.Future[Any]] = [clients, *waits]
        try:
            await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            duration_s = self._now()
        finally:
            for end in ends:
                end.cancel()
            with suppress(asyncio.CancelledError):
                await clients
        return LoadRun(self._requests, len(self.items), self.schedule, duration_s, time.process_time() - cpu_s)

    def _now(self) -> float:
        return time.perf_counter() - self._started_s

    async def _client(self, waiting: Iterator[tuple[int, WorkItem]]) -> None:
        """Take one request after the other, each when it is due."""
        for index, item in waiting:
            due_s = self._now() if self.schedule.due_s is None else self.schedule.due_s[index]
            await asyncio.sleep(max(_TIMER_S, due_s - self._now()))
            request = SentRequest(item, due_s, self._now())
            self._requests.append(request)
            await self._ask(request)
            if self.is_enough(request):
                self._enough.set()

    async def _ask(self, request: SentRequest) -> None:
        """Send the request and take its answer, or note why there is none."""
        answer = request.answer
        try:
            async with asyncio.timeout(self.target.timeout_s):
                await self._exchange(request.item, answer)
        except TimeoutError:
            answer.failure = Failure("timeout", f"not answered within {self.target.timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            answer.failure = Failure(type(error).__name__, str(error))
        if not answer.is_over:
            answer.failure = Failure("incomplete stream", "the stream ended without [DONE]")

    async def _exchange(self, item: WorkItem, answer: AnswerStream) -> None:
        async with self.session.post(
            f"{self.target.url}/v1/completions",
            data=_body(self.target.model_name, item),
            headers={"Content-Type": "application/json"},
        ) as response:
            if response.status != 200:
                answer.failure = refusal(response.status, await response.read())
                return
            while piece := await response.content.readany():
                answer.feed(piece, self._now())


def _body(model_name: str, item: WorkItem) -> bytes:
    """Return the request: greedy, of exactly the workload's length where the server knows ignore_eos."""
    return msgspec.json.encode(
        {
            "model": model_name,
            "prompt": item.prompt_token_ids,
            "max_tokens": item.output_len,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
