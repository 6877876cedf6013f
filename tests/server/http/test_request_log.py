"""One line for each request, and an answer to any fault."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from quire.server.limits.active_responses import ClientDisconnectedError
from support.http_app import ask, connect, exchange, make_app, serving
from support.server import wait_until

SECRET = "do-not-tell"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Catch what `quire serve` would write."""
    caplog.set_level(logging.INFO, "quire")
    return caplog


def request_lines(log: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.getMessage()) for record in log.records if record.name == "quire.requests"]


def app_with_faults() -> FastAPI:
    app = make_app()

    @app.get("/fault")
    async def fault() -> None:
        raise ValueError(SECRET)

    @app.get("/late-fault")
    async def late_fault() -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"one"
            raise ValueError(SECRET)

        return StreamingResponse(chunks())

    @app.get("/gone")
    async def gone() -> None:
        raise ClientDisconnectedError

    @app.get("/known")
    async def known(request: Request) -> Response:
        record = request.scope["quire.record"]
        record.request_id, record.prompt_tokens, record.finish_reasons = "cmpl-1", 7, ["stop"]
        return Response(b"text")

    return app


def test_each_request_gets_an_id_of_ours(log: pytest.LogCaptureFixture) -> None:
    app = make_app()
    ids = {ask(app, "GET", "/version", headers={"X-Request-Id": "mine"}).headers["X-Request-Id"] for _ in range(5)}
    assert len(ids) == 5
    assert "mine" not in ids
    assert [line["request_id"] in ids for line in request_lines(log)] == [True] * 5


def test_clients_id_is_logged_and_returned_where_that_is_asked_for(log: pytest.LogCaptureFixture) -> None:
    app = make_app(enable_request_id_headers=True)
    for sent, is_taken in (("mine-7", True), ("", False), ("x" * 129, False), ("caf\xe9", False)):
        returned = ask(app, "GET", "/version", headers={"X-Request-Id": sent.encode("latin-1")}).headers["X-Request-Id"]
        assert (returned == sent) == is_taken
    ask(make_app(), "GET", "/version", headers={"X-Request-Id": "other"})
    assert [line.get("client_request_id") for line in request_lines(log)] == ["mine-7", None, None, None, "other"]


@pytest.mark.parametrize(
    ("method", "url", "status"), [("GET", "/x", 404), ("PUT", "/echo", 405), ("GET", "/version", 200)]
)
def test_line_says_what_was_asked_and_what_came_of_it(
    method: str, url: str, status: int, log: pytest.LogCaptureFixture
) -> None:
    ask(make_app(), method, f"{url}?key={SECRET}", headers={"Authorization": f"Bearer {SECRET}"})
    (line,) = request_lines(log)
    assert (line["method"], line["path"], line["status"]) == (method, url, status)
    assert line["duration_s"] >= 0
    assert line["time"].endswith("+00:00")
    assert SECRET not in json.dumps(line)


def test_line_says_what_the_route_knows(log: pytest.LogCaptureFixture) -> None:
    response = ask(app_with_faults(), "GET", "/known")
    (line,) = request_lines(log)
    assert (line["request_id"], line["prompt_tokens"], line["finish_reasons"]) == ("cmpl-1", 7, ["stop"])
    assert response.headers["X-Request-Id"] == "cmpl-1"
    assert "model" not in line


@pytest.mark.parametrize("url", ["/health", "/ready", "/metrics"])
def test_probes_are_not_logged(url: str, log: pytest.LogCaptureFixture) -> None:
    ask(make_app(), "GET", url)
    assert request_lines(log) == []


def test_refused_request_is_logged_without_its_key(log: pytest.LogCaptureFixture) -> None:
    ask(make_app(api_key=("right",)), "GET", "/version", headers={"Authorization": f"Bearer {SECRET}"})
    (line,) = request_lines(log)
    assert line["status"] == 401
    assert not any(SECRET in record.getMessage() for record in log.records)


def test_fault_is_told_to_the_log_and_not_to_the_client(log: pytest.LogCaptureFixture) -> None:
    response = ask(app_with_faults(), "GET", "/fault")
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (500, "server_error", "request_failed")
    assert SECRET not in response.text
    (fault,) = [record for record in log.records if record.exc_info]
    assert SECRET in str(fault.exc_info[1])
    assert response.headers["X-Request-Id"] in fault.getMessage()
    assert request_lines(log)[0]["status"] == 500


def test_fault_in_the_middle_of_an_answer_breaks_it_off(log: pytest.LogCaptureFixture) -> None:
    with serving(app_with_faults()) as port:
        received = exchange(port, b"GET /late-fault HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"one" in received
    assert not received.endswith(b"0\r\n\r\n")
    assert SECRET.encode() not in received
    assert any(record.exc_info for record in log.records)


def test_client_that_has_gone_is_no_fault(log: pytest.LogCaptureFixture) -> None:
    with serving(app_with_faults()) as port, connect(port) as connection:
        connection.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf")
        connection.close()
        wait_until(lambda: bool(request_lines(log)))
    assert request_lines(log)[0]["status"] is None
    assert not any(record.exc_info for record in log.records)
