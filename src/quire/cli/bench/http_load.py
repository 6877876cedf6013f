"""Requests over HTTP, each sent when it is due; the times at which its answer came.

Light on purpose, as client and server often share their cores: one session, no read timeouts to arm for each chunk, raw
reads of the body. A request's times count from when it was due: what it waited here for a free connection, or because
this client was late, is waiting too.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from quire.cli.bench.answer_stream import AnswerStream, Failure, refusal
from quire.core.errors import EngineError
from quire.paper.arrivals import Schedule
from quire.paper.statistics import Timeline
from quire.paper.workloads import WorkItem

_CONNECT_S = 10.0
_KEEP_ALIVE_S = 2.0   # below the servers' 5 s and more, else a request meets a connection that is just being closed


class ServerUnusableError(EngineError):
    """There is no OpenAI-compatible server where one was expected."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    url: str
    model_name: str
    timeout_s: float  # for a whole request


@dataclass(slots=True)
class SentRequest:
    """One request and what came of it. Neither finished nor failed: the run ended first."""

    item: WorkItem
    due_s: float
    sent_s: float
    answer: AnswerStream = field(default_factory=AnswerStream)
    failure: Failure | None = None
    is_finished: bool = False

    @property
    def num_output_tokens(self) -> int:
        """Output tokens by the server's count, or as many as chunks came."""
        counted = self.answer.num_usage_tokens
        return len(self.answer.token_times_s) if counted is None else counted

    @property
    def timeline(self) -> Timeline:
        """When it was due and when its chunks came; of a finished request."""
        return Timeline(self.due_s, self.answer.token_times_s, self.num_output_tokens)


@dataclass(slots=True)
class LoadRun:
    """What a load came to. Times are in seconds from its start."""

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
        """Why requests failed."""
        return [request.failure for request in self.requests if request.failure is not None]

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
            if response.status != 200:
                raise ServerUnusableError(f"{url}/v1/models answers {refusal(response.status, body).label}")
            return str(msgspec.json.decode(body)["data"][0]["id"])
    except TimeoutError as error:
        raise ServerUnusableError(f"{url}/v1/models did not answer within {_CONNECT_S:g} s") from error
    except (aiohttp.ClientError, aiohttp.InvalidURL, OSError) as error:
        raise ServerUnusableError(f"no server answers at {url}: {error}") from error
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise ServerUnusableError(f"{url}/v1/models names no model") from error


class HttpLoad:
    """A list of requests on a schedule; `run` sends them once."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        items: Sequence[WorkItem],
        schedule: Schedule,
        on_ended: Callable[[SentRequest], None] = lambda _: None,
    ) -> None:
        self._session = session
        self._target = target
        self._schedule = schedule
        self._num_items = len(items)
        self._waiting: Iterator[tuple[int, WorkItem]] = enumerate(items)
        self._on_ended = on_ended
        self._requests: list[SentRequest] = []
        self._started_s = 0.0

    async def run(self, *stops: asyncio.Event, limit_s: float | None = None) -> LoadRun:
        """Send everything and wait for all answers; cut the rest when one of `stops` is set or `limit_s` is over."""
        cpu_s = time.process_time()
        self._started_s = time.perf_counter()
        num_clients = min(self._schedule.max_open, self._num_items)
        clients = asyncio.gather(*(self._client() for _ in range(num_clients)))
        ends: list[asyncio.Future[Any]] = [clients, *(asyncio.ensure_future(stop.wait()) for stop in stops)]
        try:
            await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            duration_s = self._now()
        finally:
            for end in ends:
                end.cancel()
            with suppress(asyncio.CancelledError):
                await clients
        return LoadRun(self._requests, self._num_items, self._schedule, duration_s, time.process_time() - cpu_s)

    def _now(self) -> float:
        return time.perf_counter() - self._started_s

    async def _client(self) -> None:
        """Take one request after the other, each when it is due."""
        for index, item in self._waiting:
            due_s = self._now() if self._schedule.due_s is None else self._schedule.due_s[index]
            await asyncio.sleep(max(0.0, due_s - self._now()))
            request = SentRequest(item, due_s, self._now())
            self._requests.append(request)
            await self._ask(request)
            self._on_ended(request)

    async def _ask(self, request: SentRequest) -> None:
        """Send the request and take its answer, or note why there is none."""
        try:
            async with asyncio.timeout(self._target.timeout_s):
                await self._exchange(request)
        except TimeoutError:
            request.failure = Failure("timeout", f"not answered within {self._target.timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            request.failure = Failure(type(error).__name__, str(error))

    async def _exchange(self, request: SentRequest) -> None:
        answer = request.answer
        async with self._session.post(
            f"{self._target.url}/v1/completions",
            data=_body(self._target.model_name, request.item),
            headers={"Content-Type": "application/json"},
        ) as response:
            if response.status != 200:
                request.failure = refusal(response.status, await response.read())
                return
            while piece := await response.content.readany():
                answer.feed(piece, time.perf_counter() - self._started_s)
        request.failure = answer.failure
        request.is_finished = answer.is_done
        if not answer.is_over:
            request.failure = Failure("incomplete stream", "the stream ended without [DONE]")


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
