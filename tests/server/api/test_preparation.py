"""Deadlines through every generating route: fields and header, the error before a token, the end of what has begun."""

import json
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from quire.core.sampling_params import MAX_DEADLINE_MS
from support.metrics_page import read_metrics
from support.openai_server import OpenAIServer

Json = dict[str, Any]

MESSAGES = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0}
ROUTES: dict[str, Json] = {
    "/v1/completions": {"prompt": "def f(", "ignore_eos": True, **GREEDY},
    "/v1/chat/completions": {"messages": MESSAGES, "ignore_eos": True, **GREEDY},
    "/v1/responses": {"input": "hi", "ignore_eos": True, **GREEDY},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 900, **GREEDY},
}
LIMITS = {"/v1/responses": "max_output_tokens"}
DEADLINE_S = 15.0        # for answers that have begun before: longer than a busy machine stops what begins them
BAD = [0, -1, 10**12, 1.5, 5.0, "5", True, [5], {"ms": 5}]
BAD_HEADERS = ["0", "5000,", "5000, five", "-1", str(10**12), "1.5", "NaN", "", "5 6", "five", "9" * 400]


@pytest.mark.parametrize("path", ROUTES)
def test_bad_values_are_refused_with_their_names(server: OpenAIServer, path: str) -> None:
    for field in ("ttft_deadline_ms", "deadline_ms"):
        for value in BAD:
            response = server.http.post(path, json=ROUTES[path] | {field: value})
            assert response.status_code == 400, (field, value)
            assert _names(response, field), (field, value)
        body = json.dumps(ROUTES[path] | {field: float("nan")})
        headers = {"content-type": "application/json"}
        assert server.http.post(path, content=body, headers=headers).status_code == 400
    for text in BAD_HEADERS:
        response = server.http.post(path, json=ROUTES[path], headers={"X-Request-Deadline-Ms": text})
        assert response.status_code == 400, text
        assert _names(response, "x-request-deadline-ms"), text


def _names(response: httpx.Response, field: str) -> bool:
    """Whether an error names a field, where its form has a place for that, and in its text."""
    error = response.json()["error"]
    return error.get("param", field) == field and error["message"].startswith(f"{field} must be ")


@pytest.mark.parametrize("path", ROUTES)
def test_largest_values_and_null_change_nothing(server: OpenAIServer, path: str) -> None:
    body = ROUTES[path] | {LIMITS.get(path, "max_tokens"): 3}
    most = {"ttft_deadline_ms": MAX_DEADLINE_MS, "deadline_ms": MAX_DEADLINE_MS}
    headers = {"x-request-deadline-ms": str(MAX_DEADLINE_MS)}
    for given in (most, dict.fromkeys(most)):
        response = server.http.post(path, json=body | given, headers=headers)
        assert response.status_code == 200, response.text


@pytest.fixture
def unmeasured(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict that any deadline is met: on a slow machine 150 ms would be refused, or be over before the prediction."""
    monkeypatch.setattr(server.service.client, "first_token_s", lambda *_: -math.inf)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_request_without_a_token_in_time_is_a_504(server: OpenAIServer, path: str, stream: bool) -> None:
    before = _count(server, "requests_late", state="prompt")
    answers: list[httpx.Response] = []
    headers = {"x-request-deadline-ms": "90000, 150"}   # two lines, joined by a proxy: the smallest of all wins
    body = ROUTES[path] | {"stream": stream, "deadline_ms": 80_000}

    def ask() -> None:
        answers.append(server.http.post(path, json=body, headers=headers))

    asking = threading.Thread(target=ask)
    with server.held():
        asking.start()
        server.wait_until(lambda: server.service.client.num_queued == 1 or bool(answers))
        assert not answers
        until_s = time.monotonic() + 0.15
        server.wait_until(lambda: time.monotonic() > until_s)
    asking.join()
    (answer,) = answers
    assert "the first token was not there within 150 ms (x-request-deadline-ms)" in answer.text
    assert answer.status_code == (200 if stream else 504)
    assert ("timeout_error" if path == "/v1/messages" else "deadline_exceeded") in answer.text
    server.wait_until(server.is_idle)
    assert _count(server, "requests_late", state="prompt") == before + 1


@pytest.mark.usefixtures("unmeasured")
def test_answer_that_has_begun_ends_with_what_is_there(server: OpenAIServer) -> None:
    streams, texts = {}, dict.fromkeys(ROUTES, "")

    def begin(path: str) -> None:
        asked = ROUTES[path] | {"stream": True, LIMITS.get(path, "max_tokens"): 900}
        asked["deadline_ms"] = int(1000 * DEADLINE_S)
        response = stack.enter_context(server.http.stream("POST", path, json=asked))
        assert response.status_code == 200
        streams[path] = response.iter_text()
        while "content" not in texts[path] and "text" not in texts[path]:
            texts[path] += next(streams[path])

    with ExitStack() as stack, ExitStack() as held, ThreadPoolExecutor(1) as pool:
        run_step, client = held.enter_context(server.single_steps()), server.service.client
        for path in ROUTES:     # the engine goes on until each has begun, and no longer: none may end by itself
            begun = pool.submit(begin, path)
            server.wait_until(lambda: client.num_queued == 1)
            while server.on_loop(lambda: client.num_queued):
                run_step()
            begun.result()
        until_s = time.monotonic() + DEADLINE_S
        server.wait_until(lambda: time.monotonic() > until_s)
        held.close()
        for path, pieces in streams.items():
            texts[path] += "".join(pieces)
    for path in ("/v1/completions", "/v1/chat/completions"):
        *_, last = [json.loads(data) for data in _data(texts[path]) if data != "[DONE]"]
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["choices"][0]["stop_reason"] == "deadline"
    *_, last = (json.loads(data) for data in _data(texts["/v1/responses"]))
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "deadline"}
    assert last["response"]["output"][0]["content"][0]["text"]
    ended = [json.loads(data) for data in _data(texts["/v1/messages"])]
    (delta,) = (each["delta"] for each in ended if each["type"] == "message_delta")
    assert delta == {"stop_reason": "max_tokens", "stop_sequence": None}
    server.wait_until(server.is_idle)
    assert _count(server, "requests_late", state="decoding") >= 4


def _count(server: OpenAIServer, name: str, **label: str) -> float:
    """A counter of the server."""
    ((key, value),) = label.items()
    return read_metrics(server.url)[f'quire:{name}_total{{{key}="{value}"}}']


def _data(text: str) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: "))


@pytest.mark.parametrize("path", ROUTES)
def test_deadline_that_cannot_be_met_is_refused_at_once(server: OpenAIServer, path: str) -> None:
    server.ask("/v1/completions", prompt="def f(" * 60, max_tokens=40, ignore_eos=True)     # steps are measured
    assert server.service.client.engines[0].state.step_times is not None
    before = _count(server, "requests_refused", reason="deadline_unmeetable")
    long: Json = {"prompt": list(range(3, 203)), "max_tokens": 1}
    waiting = [threading.Thread(target=server.http.post, args=("/v1/completions",), kwargs={"json": long})]
    with server.held():
        for thread in waiting:
            thread.start()
        server.wait_until(lambda: server.service.client.num_queued == 1)
        answer = server.http.post(path, json=ROUTES[path] | {"ttft_deadline_ms": 1, "stream": True})
        by_header = server.http.post(path, json=ROUTES[path], headers={"X-Request-Deadline-Ms": "1"})
    waiting[0].join()
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    assert error.get("code", "deadline_unmeetable") == "deadline_unmeetable"
    assert error.get("param", "ttft_deadline_ms") == "ttft_deadline_ms"
    assert "ms, and is asked for within 1 ms (ttft_deadline_ms)" in error["message"]
    assert by_header.status_code == 429
    error = by_header.json()["error"]
    assert error.get("param", "x-request-deadline-ms") == "x-request-deadline-ms"
    assert "ms, and is asked for within 1 ms (x-request-deadline-ms)" in error["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert _count(server, "requests_refused", reason="deadline_unmeetable") == before + 2
