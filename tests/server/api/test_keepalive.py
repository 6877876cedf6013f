"""Comments keep a quiet stream open, and never stand within an event."""

import asyncio
import math
import signal
from pathlib import Path
from typing import Any

import pytest

from quire.engine.options import EngineOptions
from quire.server.api.http_responses import KEEPALIVE, Keepalive
from support.openai_server import OpenAIServer, events_of, openai_server


def test_comments_come_while_nothing_else_does() -> None:
    num_sent = 0

    async def run() -> None:
        has_two = asyncio.Event()

        async def send() -> None:
            nonlocal num_sent
            num_sent += 1
            if num_sent == 2:
                has_two.set()

        async with Keepalive(0.01, send):
            await has_two.wait()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert num_sent >= 2


def test_no_comment_stands_within_an_event() -> None:
    async def run() -> None:
        async def send() -> None:
            raise AssertionError("within an event")

        async def event() -> None:
            keepalive._last_s = -math.inf  # long due
            keepalive._send_if_idle()
            assert keepalive._sending is None

        async with Keepalive(3600.0, send) as keepalive:
            await keepalive.write(event())

    asyncio.run(run())


def test_events_put_comments_off() -> None:
    """Due after the last event, not after the last look."""

    async def run() -> None:
        async def send() -> None:
            raise AssertionError("not due")

        async with Keepalive(3600.0, send) as keepalive:
            first = keepalive._timer
            assert first is not None
            await keepalive.write(asyncio.sleep(0))
            keepalive._send_if_idle()
            assert keepalive._sending is None
            assert keepalive._timer is not None
            assert keepalive._timer.when() >= first.when()

    asyncio.run(run())


def test_zero_is_never() -> None:
    async def run() -> None:
        async def send() -> None:
            raise AssertionError("never")

        async with Keepalive(0.0, send) as keepalive:
            assert keepalive._timer is None

    asyncio.run(run())


def test_writer_that_waits_for_its_reader_is_ended() -> None:
    async def run() -> None:
        is_writing = asyncio.Event()

        async def send() -> None:
            is_writing.set()
            await asyncio.Event().wait()

        async with Keepalive(0.001, send) as keepalive:
            await is_writing.wait()
        assert keepalive._sending is not None
        assert keepalive._sending.cancelled()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.fixture(scope="module")
def quick_server(demo_model: Path) -> Any:  # noqa: ANN401 (a generator)
    engine = EngineOptions(model=str(demo_model), max_model_len=1024, num_kv_blocks=512)
    with openai_server(engine, stream_keepalive=0.05) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_of_a_request_that_waits_has_comments_before_its_events(quick_server: OpenAIServer, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": "a"} if path == "/v1/completions" else {
        "messages": [{"role": "user", "content": "a"}]
    }
    body = prompt | {"stream": True, "max_tokens": 3, "ignore_eos": True, "temperature": 0}
    quick_server.ask(path, **body | {"stream": False})
    with quick_server.held(), quick_server.http.stream("POST", path, json=body) as response:
        pieces = response.iter_raw()
        text = b""
        while text.count(KEEPALIVE) < 2:
            text += next(pieces)
        assert text == KEEPALIVE * text.count(KEEPALIVE)
        quick_server.child.process.send_signal(signal.SIGCONT)
        text += b"".join(pieces)
    events = events_of(text.replace(KEEPALIVE, b"").decode())
    assert len(events) >= 1
    assert events[-1]["choices"][0]["finish_reason"] == "length"
