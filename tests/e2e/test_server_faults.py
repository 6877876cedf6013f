"""What 32 clients see when a part of the server dies or is told to end, and that nothing of it is left behind."""

import asyncio
import json
import os
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.clients import LIMIT_S
from support.held_starts import amid_answers
from support.metrics_page import read_metrics
from support.server import ENTRY, ServerProcess, is_running, is_stopped, running_server, wait_until
from support.stopping import stopped

pytestmark = pytest.mark.usefixtures("demo_model")

NUM_STREAMS = 32
NUM_WHOLE = 4
PROMPT = [5, 6, 7, 8]
ENDLESS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True}
DONE = "[DONE]"
# Until it is told to end: a test that is stopped for seconds still sees it.
STAYS_UNHEALTHY = f"from quire.server import lifecycle; lifecycle.UNHEALTHY_S = 600; {ENTRY}"
STOPS_AMID_ANSWERS = amid_answers(NUM_STREAMS + NUM_WHOLE + 1) + STAYS_UNHEALTHY


class Watched:
    """A server whose processes and temporary files can be told from all others on the machine."""

    def __init__(self, server: ServerProcess, mark: str, temporary: Path) -> None:
        self.server, self._mark, self._temporary = server, mark.encode(), temporary

    def remains(self) -> list[str]:
        """Name what is there of it: processes, the port, files; plans before a fault are kept."""
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        found = [f"process {pid}" for pid in pids if is_running(pid) and self._mark in _environment(pid)]
        found += [f"port {self.server.port}"] if _is_open(self.server.port) else []
        shared = [f"shared memory {path}" for path in Path("/dev/shm").glob("*quire*")]
        files = [path for path in self._temporary.iterdir() if not path.name.startswith("quire-faults-")]
        return found + shared + [f"file {path}" for path in files]

    def assert_gone(self) -> None:
        """Wait until nothing is left."""
        wait_until(lambda: not self.remains())


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    yield from watched_server(tmp_path)


@pytest.fixture
def watched_amid_answers(tmp_path: Path) -> Iterator[Watched]:
    yield from watched_server(tmp_path, entry=STOPS_AMID_ANSWERS)


@pytest.fixture
def watched_ranks(tmp_path: Path) -> Iterator[Watched]:
    yield from watched_server(tmp_path, "-tp", "2", entry=STOPS_AMID_ANSWERS)


def watched_server(tmp_path: Path, *flags: str, entry: str = STAYS_UNHEALTHY) -> Iterator[Watched]:
    mark = f"e2e-{uuid.uuid4().hex}"
    env = {"TMPDIR": str(tmp_path), "E2E_MARK": mark}
    patience = ("--stall-limit", "600", "--shutdown-timeout", "600")
    size = "--num-kv-blocks", "8192", "--swap-space", "4MiB"
    with running_server(*size, *patience, *flags, env=env, entry=entry) as server:
        found = Watched(server, mark, tmp_path)
        assert len(found.remains()) >= 3  # server, engine, port: the test can see them
        yield found


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _is_open(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


class Load:
    """Clients of a server, each with one request open: what their answers were."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self.http = http
        self._url = url
        self._num_begun = 0
        self._all_begun = asyncio.Event()
        self._streams: list[asyncio.Task[list[str]]] = []
        self._wholes: list[asyncio.Task[httpx.Response]] = []

    async def begin(self, body: dict[str, Any]) -> None:
        """Open all requests of an engine that stands still; return when all of them are in its queue."""
        self._streams = [asyncio.create_task(self._read(body)) for _ in range(NUM_STREAMS)]
        self._wholes = [asyncio.create_task(self.http.post("/v1/completions", json=body)) for _ in range(NUM_WHOLE)]
        await self.wait_until_queued(NUM_STREAMS + NUM_WHOLE)

    async def wait_until_queued(self, num_requests: int) -> None:
        """Wait until so many requests are in the engine's queue."""
        await asyncio.to_thread(wait_until, lambda: _num_waiting(self._url) == num_requests)

    async def wait_begun(self) -> None:
        """Wait for the first event of every stream."""
        await self._all_begun.wait()

    async def streams(self) -> list[list[str]]:
        """Wait for all streams; return the events of each."""
        return await asyncio.gather(*self._streams)

    async def wholes(self) -> list[httpx.Response]:
        """Wait for all answers that are no streams."""
        return await asyncio.gather(*self._wholes)

    async def broken(self) -> list[BaseException | object]:
        """Wait for everything, whether it fails or not."""
        return await asyncio.gather(*self._streams, *self._wholes, return_exceptions=True)

    async def _read(self, body: dict[str, Any]) -> list[str]:
        events: list[str] = []
        async with self.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if not line.startswith("data: "):   # a comment keeps a stream alive
                    continue
                if not events:
                    self._note_begin()
                events.append(line.removeprefix("data: "))
        return events

    def _note_begin(self) -> None:
        self._num_begun += 1
        if self._num_begun == NUM_STREAMS:
            self._all_begun.set()


@asynccontextmanager
async def load(server: ServerProcess, body: dict[str, Any]) -> AsyncIterator[Load]:
    """Queue requests in a server whose engine stands still, as in `Load.begin`."""
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as http:
        clients = Load(server.url, http)
        await clients.begin(body)
        yield clients


def _num_waiting(url: str) -> float:
    return read_metrics(url)["vllm:num_requests_waiting"]


def parsed(events: Sequence[str]) -> list[dict[str, Any]]:
    """Return the events of a stream that ended as every stream does."""
    assert events[-1] == DONE
    return [json.loads(event) for event in events[:-1]]


def assert_unhealthy(response: httpx.Response, code: str) -> None:
    """Check a 503, which names a time to come back."""
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (503, "server_error", code)
    assert int(response.headers["Retry-After"]) >= 1


async def first_unhealthy(url: str) -> httpx.Response:
    """Ask for /health, each time on a new connection, until the answer is another than 200; return it."""
    while True:
        async with httpx.AsyncClient(timeout=LIMIT_S) as probe:
            answer = await probe.get(f"{url}/health")
        if answer.status_code != 200:
            return answer
        await asyncio.sleep(0.05)


def test_every_client_is_told_when_the_engine_is_killed(watched_amid_answers: Watched) -> None:
    assert_every_client_is_told_of_the_end_of(watched_amid_answers.server.engine_pid(), watched_amid_answers)


def test_every_client_is_told_when_a_rank_is_killed(watched_ranks: Watched) -> None:
    engine = watched_ranks.server.engine_pid()
    (rank,) = map(int, Path(f"/proc/{engine}/task/{engine}/children").read_text().split())
    assert_every_client_is_told_of_the_end_of(rank, watched_ranks)


def assert_every_client_is_told_of_the_end_of(pid: int, watched: Watched) -> None:
    """Kill a process of the server amid answers; check each answer, the health, and that nothing is left."""
    server, engine = watched.server, watched.server.engine_pid()

    async def kill() -> tuple[list[list[str]], list[httpx.Response], httpx.Response, openai.APIError]:
        async with (
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=LIMIT_S) as client,
            AsyncExitStack() as answering,
        ):
            with stopped(engine):
                clients = await answering.enter_async_context(load(server, ENDLESS))
                stream = await client.completions.create(
                    model=server.name, prompt=PROMPT, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
                )
                await clients.wait_until_queued(NUM_STREAMS + NUM_WHOLE + 1)
            await clients.wait_begun()
            await anext(stream)
            await asyncio.to_thread(wait_until, lambda: is_stopped(engine))
            os.kill(pid, signal.SIGKILL)
            if pid != engine:
                os.kill(engine, signal.SIGCONT)     # it notices that a rank is gone
            with pytest.raises(openai.APIError) as raised:
                async for _ in stream:
                    pass
            await stream.close()
            health = await first_unhealthy(server.url)
            server.signal(signal.SIGTERM)
            return await clients.streams(), await clients.wholes(), health, raised.value

    streams, wholes, health, error = asyncio.run(kill())
    for events in streams:
        *pieces, last = parsed(events)
        assert all("choices" in piece for piece in pieces)
        assert last.keys() == {"error"}
        assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "engine_unhealthy")
    for response in wholes:
        assert_unhealthy(response, "engine_unhealthy")
    assert (error.type, error.code) == ("server_error", "engine_unhealthy")
    assert_unhealthy(health, "engine_unhealthy")
    assert server.wait() == 1
    watched.assert_gone()


def test_nothing_outlives_a_killed_server(watched: Watched) -> None:
    server = watched.server

    async def kill() -> list[BaseException | object]:
        with stopped(server.engine_pid()):      # else all might be over before
            async with load(server, ENDLESS) as clients:
                await asyncio.to_thread(wait_until, lambda: len(server.child_pids()) == 2)  # with the template worker
                server.process.kill()
                return await clients.broken()

    assert all(isinstance(answer, httpx.TransportError) for answer in asyncio.run(kill()))
    watched.assert_gone()


def test_open_requests_end_in_peace_when_the_server_is_told_to(watched: Watched) -> None:
    server = watched.server

    async def drain() -> tuple[list[list[str]], list[httpx.Response], httpx.Response, openai.APIError]:
        async with (
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=LIMIT_S) as client,
            AsyncExitStack() as answering,
        ):
            with stopped(server.engine_pid()):  # else all might be over before we have looked
                clients = await answering.enter_async_context(load(server, ENDLESS | {"max_tokens": 300}))
                server.signal(signal.SIGTERM)
                while (await clients.http.get("/ready")).status_code == 200:
                    pass
                refused = await clients.http.post("/v1/completions", json={"prompt": "x"})
                with pytest.raises(openai.InternalServerError) as raised:
                    await client.completions.create(model=server.name, prompt="x")
            return await clients.streams(), await clients.wholes(), refused, raised.value

    streams, wholes, refused, error = asyncio.run(drain())
    for events in streams:
        (*_, last) = parsed(events)
        assert last["choices"][0]["finish_reason"] == "length"
    for response in wholes:
        assert response.status_code == 200
        assert response.json()["usage"]["completion_tokens"] == 300
    assert_unhealthy(refused, "shutting_down")
    assert (error.type, error.code) == ("server_error", "shutting_down")
    assert server.wait() == 0
    watched.assert_gone()


def test_second_signal_ends_all_at_once(watched: Watched) -> None:
    server = watched.server

    async def end() -> None:
        with stopped(server.engine_pid()):
            async with load(server, ENDLESS) as clients:
                server.signal(signal.SIGTERM)
                while (await clients.http.get("/ready")).status_code == 200:
                    pass
                server.signal(signal.SIGTERM)
                await clients.broken()

    asyncio.run(end())
    assert server.wait() == 128 + signal.SIGTERM
    watched.assert_gone()
