"""Streams and whole answers that do not end as planned: clients that go, an engine that dies, a server that ends."""

import gc
import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from quire.engine.options import EngineOptions
from quire.server.api import http_responses as responses
from quire.server.errors import shutting_down
from support.openai_server import LIMIT_S, OpenAIServer, events_of, openai_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"max_tokens": 900, "ignore_eos": True, "seed": 0}
NUM_STEPS = 5   # until each answer has text


def connect(server: OpenAIServer, path: str, **body: Any) -> socket.socket:  # noqa: ANN401 (JSON)
    """Send a request on a connection of its own."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), timeout=LIMIT_S)
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


def has_open(server: OpenAIServer, count: int) -> bool:
    return len(server.service.client._streams) == count


def num_aborted(server: OpenAIServer) -> int:
    """Return the requests that have been aborted so far."""
    page = server.http.get("/metrics").text
    (line,) = re.findall(r'^quire:requests_aborted_total\{engine="0"\} (.*)$', page, re.MULTILINE)
    return int(float(line))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_client_that_goes_aborts_all_of_its_branches(server: OpenAIServer, stream: bool) -> None:
    before, client = num_aborted(server), server.service.client
    with server.single_steps() as run_step:     # else the request might be over before its client goes
        connection = connect(server, COMPLETIONS, prompt=["a", "b"], n=2, stream=stream, **LONG)
        server.wait_until(lambda: client.num_queued == 2)
        while server.on_loop(lambda: client.state.num_running == 0):
            run_step()
        if stream:
            assert connection.recv(1)
        connection.close()
        server.wait_until(lambda: has_open(server, 0))
    server.wait_until(server.is_idle)
    assert num_aborted(server) == before + 2  # one for each prompt


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_client_that_goes_while_nothing_is_sent_is_noticed(server: OpenAIServer, stream: bool) -> None:
    """A request that waits for others has nothing to send."""
    with server.held(), connect(server, COMPLETIONS, prompt="a", n=8, stream=True, **LONG):
        waiting = connect(server, CHAT, messages=[{"role": "user", "content": "hi"}], stream=stream, **LONG)
        server.wait_until(lambda: has_open(server, 2))
        waiting.close()
        server.wait_until(lambda: has_open(server, 1))
    server.wait_until(server.is_idle)


@pytest.mark.usefixtures("tests_frozen")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("num_prompts", "prompt"), [(1, lambda: [5] * 997), (2, lambda: [[5] * 997, [6] * 997])], ids=["one", "two"]
)
def test_open_request_holds_no_list_of_its_tokens(
    server: OpenAIServer, num_prompts: int, prompt: Callable[[], object], stream: bool
) -> None:
    """Neither in its engine requests nor in its body: each garbage collection would walk it."""
    with server.held():
        with connect(server, COMPLETIONS, prompt=prompt(), stream=stream, max_tokens=5):
            server.wait_until(lambda: has_open(server, num_prompts))
            gc.collect()
            lists = [found for found in gc.get_objects() if type(found) is list and len(found) == 997]
            assert not [found for found in lists if found[0] in (5, 6)]
        server.wait_until(lambda: has_open(server, 0))


def test_headers_of_a_stream_do_not_wait_for_tokens(server: OpenAIServer) -> None:
    with server.held(), connect(server, COMPLETIONS, prompt="b", stream=True, **LONG) as waiting:
        head = waiting.recv(65536)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"text/event-stream" in head


def test_end_of_the_server_is_the_last_event_of_a_stream(server: OpenAIServer) -> None:
    body = {"prompt": ["a", "b"], "stream": True, **LONG}
    with server.single_steps() as run_step, server.http.stream("POST", COMPLETIONS, json=body) as response:
        server.wait_until(lambda: server.service.client.num_queued == 2)
        for _ in range(NUM_STEPS):
            run_step()
        text, pieces = "", response.iter_text()
        while "data: " not in text:     # a comment may come first
            text += next(pieces)
        server.on_loop(lambda: server.service.responses.cancel_all(shutting_down()))
        events = events_of(text + "".join(pieces))
    assert events.pop()["error"]["code"] == "shutting_down"
    assert events
    assert not any("error" in event for event in events)


def test_end_of_the_server_is_a_status_where_nothing_was_sent(server: OpenAIServer) -> None:
    with server.held(), connect(server, COMPLETIONS, prompt="a", **LONG) as connection:
        server.wait_until(lambda: len(server.service.responses) == 1)
        server.on_loop(lambda: server.service.responses.cancel_all(shutting_down()))
        assert connection.recv(65536).startswith(b"HTTP/1.1 503 ")


def test_fault_in_a_stream_is_its_last_event(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> bytes:
        raise KeyError("a fault of ours")

    monkeypatch.setattr("quire.server.apis.completions.openai_response.CompletionResponseBuilder.chunks", fail)
    (event,) = server.stream(COMPLETIONS, prompt=["a", "b"], **LONG)
    assert (event["error"]["type"], event["error"]["code"]) == ("server_error", "request_failed")
    assert "KeyError" not in event["error"]["message"]


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_any_write_of_a_stream_may_fail(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Its request ends and holds nothing, and the next one is right."""
    server.hand_on_each_output(monkeypatch)
    body = {"prompt": "a", "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    expected, write = server.stream(COMPLETIONS, **body), responses._body
    for nth in count(1):
        num_writes = 0

        def fail(content: bytes, *, more_body: bool = True, nth: int = nth) -> Message:
            nonlocal num_writes
            num_writes += 1
            if num_writes == nth:
                raise error("no route")
            return write(content, more_body=more_body)

        with monkeypatch.context() as patched:
            patched.setattr(responses, "_body", fail)
            with suppress(httpx.HTTPError):
                server.http.post(COMPLETIONS, json=body | {"stream": True})
        server.wait_until(server.is_idle)
        assert _texts(server.stream(COMPLETIONS, **body)) == _texts(expected), f"after write {nth}"
        if num_writes < nth:
            break
    assert nth == 8, "one for each token, one for the end, and a run in which none has failed"


def _texts(events: list[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["text"] for event in events)


@contextmanager
def mortal_server(demo_model: Path) -> Iterator[OpenAIServer]:
    with openai_server(EngineOptions(model=str(demo_model), max_model_len=1024, num_kv_blocks=512)) as server:
        yield server


def test_death_of_the_engine_is_told_to_all(demo_model: Path) -> None:
    """Streams end with an event, whole answers and new requests with a status."""
    with mortal_server(demo_model) as server:
        asked = {"prompt": ["a", "b"], "stream": True, **LONG}
        with server.single_steps() as run_step, server.http.stream("POST", COMPLETIONS, json=asked) as response:
            server.wait_until(lambda: server.service.client.num_queued == 2)
            for _ in range(NUM_STEPS):
                run_step()
            text = next(pieces := response.iter_text())
            with connect(server, COMPLETIONS, prompt="a", **LONG) as whole:
                server.wait_until(lambda: has_open(server, 3))
                server.child.process.kill()
                error = events_of(text + "".join(pieces)).pop()["error"]
                assert whole.recv(65536).startswith(b"HTTP/1.1 503 ")
        assert (error["type"], error["code"]) == ("server_error", "engine_unhealthy")
        for stream in (False, True):
            status, error = server.refusal(COMPLETIONS, prompt="a", stream=stream)
            assert (status, error["code"]) == (503, "engine_unhealthy")
