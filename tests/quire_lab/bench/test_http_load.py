"""A load on a real server: what is sent when, and what becomes of every request."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import pytest
from aiohttp.test_utils import TestServer

from quire_lab.bench.http_load import (
    HttpLoad,
    LoadRun,
    SentRequest,
    ServerUnusableError,
    Target,
    first_model,
    open_session,
)
from quire_lab.sim.workloads import Schedule, WorkItem
from support.completions_server import DONE, Body, CompletionsServer, Stream, all_tokens, event, token_chunk

ITEMS = [WorkItem([7, index], output_len=2 + index) for index in range(5)]
BURST = Schedule([0.0] * len(ITEMS), max_open=100)


def run_load(
    server: CompletionsServer,
    schedule: Schedule = BURST,
    *,
    stop: asyncio.Event | None = None,
    limit_s: float | None = None,
    timeout_s: float = 60.0,
    is_enough: Callable[[SentRequest], bool] = lambda _: False,
) -> LoadRun:
    async def run() -> LoadRun:
        async with TestServer(server.app) as http, open_session("secret") as session:
            target = Target(str(http.make_url("/")).rstrip("/"), "tiny", timeout_s)
            stops = [] if stop is None else [stop]
            return await HttpLoad(session, target, ITEMS, schedule, is_enough).run(*stops, limit_s=limit_s)

    return asyncio.run(run())


@contextmanager
def deaf_port() -> Iterator[int]:
    """Yield a port without a listener, which no other process can take."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


async def endless(_: Body) -> AsyncIterator[bytes]:
    """One token, and then nothing until the client goes."""
    yield token_chunk()
    await asyncio.Event().wait()


def test_requests_ask_for_exactly_their_tokens_streamed_with_usage() -> None:
    server = CompletionsServer()
    run_load(server)
    assert sorted(server.bodies, key=lambda body: body["max_tokens"])[1] == {
        "model": "tiny", "prompt": [7, 1], "max_tokens": 3, "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }
    assert set(server.keys) == {"Bearer secret"}


def test_every_request_is_answered_and_timed() -> None:
    run = run_load(CompletionsServer())
    assert len(run.finished) == run.num_due == len(ITEMS)
    assert run.failures == []
    for request in run.requests:
        times = request.answer.token_times_s
        assert len(times) == request.num_output_tokens == request.item.output_len
        assert request.due_s <= request.sent_s <= times[0]
        assert times == sorted(times)
        assert times[-1] <= run.duration_s
    assert run.client_cpu_s > 0


def test_tokens_are_counted_by_chunks_where_the_server_sends_no_usage() -> None:
    async def without_usage(_: Body) -> AsyncIterator[bytes]:
        yield token_chunk()
        yield token_chunk()
        yield DONE

    assert [request.num_output_tokens for request in run_load(CompletionsServer(without_usage)).requests] == [2] * 5


def test_requests_are_sent_in_the_order_of_their_times_and_not_before() -> None:
    schedule = Schedule([0.0, 0.01, 0.02, 0.03, 0.04], max_open=100)
    run = run_load(CompletionsServer(), schedule)
    assert [request.item for request in run.requests] == ITEMS
    assert [request.due_s for request in run.requests] == schedule.due_s
    assert all(request.sent_s >= request.due_s for request in run.requests)


@pytest.mark.parametrize("due_s", [None, BURST.due_s], ids=["closed loop", "burst"])
def test_open_requests_are_bounded(due_s: list[float] | None) -> None:
    server = CompletionsServer()

    async def crowded(body: Body) -> AsyncIterator[bytes]:
        while server.num_open < 2 and len(server.bodies) < len(ITEMS):  # answer when as many are here as may be
            await asyncio.sleep(0)
        async for piece in all_tokens(body):
            yield piece

    server.stream = crowded
    run = run_load(server, Schedule(due_s, max_open=2))
    assert len(run.finished) == len(ITEMS)
    assert server.most_open == 2


def test_clients_of_a_closed_loop_ask_when_they_are_answered() -> None:
    run = run_load(CompletionsServer(), Schedule(None, max_open=1))
    for earlier, later in zip(run.requests, run.requests[1:], strict=False):
        assert later.due_s >= earlier.answer.token_times_s[-1]


def test_wait_for_a_free_connection_counts() -> None:
    run = run_load(CompletionsServer(), Schedule(BURST.due_s, max_open=1))
    assert [request.due_s for request in run.requests] == [0.0] * 5
    assert run.requests[-1].timeline.ttft_s >= run.requests[0].timeline.e2e_s


async def breaks_off(_: Body) -> AsyncIterator[bytes]:
    yield token_chunk()


async def errs(_: Body) -> AsyncIterator[bytes]:
    yield token_chunk()
    yield event({"error": {"message": "gone", "type": "server_error", "code": "engine_unhealthy"}})
    yield DONE


@pytest.mark.parametrize(
    ("stream", "label"), [(breaks_off, "incomplete stream"), (errs, "in the stream engine_unhealthy")]
)
def test_stream_that_ends_badly_is_a_failure(stream: Stream, label: str) -> None:
    run = run_load(CompletionsServer(stream))
    assert [failure.label for failure in run.failures] == [label] * 5
    assert run.finished == []


def test_refused_request_is_a_failure_and_the_others_go_on() -> None:
    server = CompletionsServer()
    error = {"error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "server_overloaded"}}
    server.refusals = iter([None, (429, error), None, (503, {}), None])
    run = run_load(server, Schedule(None, max_open=1))
    assert [failure.label for failure in run.failures] == ["429 server_overloaded", "503"]
    assert run.failures[0].message == "full"
    assert len(run.finished) == 3


def test_server_that_is_not_there_is_a_failure_of_every_request() -> None:
    async def run(url: str) -> LoadRun:
        async with open_session(None) as session:
            return await HttpLoad(session, Target(url, "m", 60.0), ITEMS, BURST).run()

    with deaf_port() as port:
        failures = asyncio.run(run(f"http://127.0.0.1:{port}")).failures
    assert {failure.label for failure in failures} == {"ClientConnectorError"}


def test_request_that_takes_too_long_is_a_failure() -> None:
    run = run_load(CompletionsServer(endless), timeout_s=0.05)
    assert {failure.label for failure in run.failures} == {"timeout"}
    assert len(run.failures) == 5


@pytest.mark.parametrize("is_interrupted", [True, False], ids=["interrupted", "enough"])
def test_stopped_load_keeps_what_came_and_cuts_the_rest(is_interrupted: bool) -> None:
    stop = asyncio.Event()

    async def some(body: Body) -> AsyncIterator[bytes]:
        async for piece in all_tokens(body) if body["max_tokens"] < 4 else endless(body):
            yield piece

    def is_second(request: SentRequest) -> bool:
        ended.append(request)
        if is_interrupted and len(ended) == 2:
            stop.set()
        return not is_interrupted and len(ended) == 2

    ended: list[SentRequest] = []
    run = run_load(CompletionsServer(some), stop=stop, is_enough=is_second)
    assert len(run.finished) == 2
    assert run.failures == []
    assert run.num_due == 5


def test_load_ends_at_its_limit() -> None:
    run = run_load(CompletionsServer(endless), limit_s=0.05)
    assert run.finished == []
    assert run.failures == []
    assert run.duration_s >= 0.05


def test_request_of_the_far_future_is_cut_before_it_is_sent() -> None:
    run = run_load(CompletionsServer(), Schedule([0.0, 1e6, 1e6, 1e6, 1e6], max_open=9), limit_s=0.3)
    assert run.num_due == 5
    assert len(run.requests) <= 1


def test_first_model_is_the_default() -> None:
    async def run() -> str:
        async with TestServer(CompletionsServer().app) as http, open_session(None) as session:
            return await first_model(session, str(http.make_url("/")).rstrip("/"))

    assert asyncio.run(run()) == "tiny"


@pytest.mark.parametrize("url", ["ftp://x", "nonsense", "http://127.0.0.1:{unused}"])
def test_url_without_a_server_is_refused(url: str) -> None:
    async def run() -> None:
        async with open_session(None) as session:
            await first_model(session, url.format(unused=port))

    with deaf_port() as port, pytest.raises(ServerUnusableError, match="no server answers"):
        asyncio.run(run())


def test_server_without_models_is_refused() -> None:
    async def run() -> None:
        async with TestServer(CompletionsServer().app) as http, open_session(None) as session:
            await first_model(session, str(http.make_url("/elsewhere")))

    with pytest.raises(ServerUnusableError, match="answers 404"):
        asyncio.run(run())
