"""Every error, on every route, in one form."""

from typing import Annotated, Any

import pytest
from fastapi import FastAPI, Query

from quire.core.errors import ContextLengthError
from quire.engine.messages import EngineDeadError
from quire.server.errors import ApiError
from support.http_app import ask, make_app


def app_that_raises(error: Exception) -> FastAPI:
    app = make_app()

    @app.get("/raise")
    async def fail() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (
            ApiError(400, "why", param="n"),
            400,
            {"message": "why", "type": "invalid_request_error", "param": "n", "code": None},
        ),
        (
            ContextLengthError("too long"),
            400,
            {
                "message": "too long",
                "type": "invalid_request_error",
                "param": "prompt",
                "code": "context_length_exceeded",
            },
        ),
        (
            EngineDeadError("gone"),
            503,
            {"message": "gone", "type": "server_error", "param": None, "code": "engine_unhealthy"},
        ),
    ],
)
def test_errors_on_purpose_carry_what_they_know(error: Exception, status: int, expected: dict[str, Any]) -> None:
    response = ask(app_that_raises(error), "GET", "/raise")
    assert (response.status_code, response.json()) == (status, {"error": expected})
    assert ("Retry-After" in response.headers) == (status == 503)


def test_unknown_url_is_told() -> None:
    response = ask(make_app(), "GET", "/v1/nothing?key=secret")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")
    assert "/v1/nothing" in response.json()["error"]["message"]
    assert "secret" not in response.text


def test_long_url_is_not_given_back_whole() -> None:
    assert len(ask(make_app(), "GET", "/" + "x" * 5000).content) < 500


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_wrong_method_names_the_right_ones(method: str) -> None:
    app = make_app()
    for url, allowed in (("/health", "GET, HEAD"), ("/echo", "POST")):
        response = ask(app, method, url)
        assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
        assert response.headers["Allow"] == allowed


def test_head_where_nothing_can_be_read_is_not_allowed() -> None:
    assert ask(make_app(), "HEAD", "/echo").status_code == 405


def test_parameter_of_the_url_is_named() -> None:
    app = make_app()

    @app.get("/asked")
    async def asked(page: Annotated[int, Query()]) -> int:
        return page

    response = ask(app, "GET", "/asked?page=x")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "page")


def test_openapi_promises_no_422() -> None:
    page = ask(make_app(), "GET", "/openapi.json")
    assert page.status_code == 200
    assert "422" not in page.text
    assert {"/health", "/ready", "/version", "/metrics"} <= set(page.json()["paths"])
