"""Access middleware: API keys, the drain, room in the queue, and what a body may be."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from quire.server.http.application import client_id_of
from support.http_app import ask, make_app

KEYS = ("first-key", "sécond-key")
URLS = ["/ready/", "/version", "/metrics", "/openapi.json", "/echo", "/none", "/health/", "/%68ealth", "/health//"]


def code_of(response: httpx.Response) -> str | None:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["code"]  # type: ignore[no-any-return]


# --- keys -------------------------------------------------------------------------------------------------------------


def test_without_keys_everyone_is_let_in() -> None:
    assert ask(make_app(), "GET", "/version").status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
@pytest.mark.parametrize("url", URLS)
def test_every_url_but_those_of_probes_needs_a_key(url: str, method: str) -> None:
    response = ask(make_app(api_key=KEYS), method, url)
    assert (response.status_code, code_of(response)) == (401, "invalid_api_key")
    assert response.headers["WWW-Authenticate"] == "Bearer"


def test_pages_of_origins_that_are_named_may_call() -> None:
    app = make_app(api_key=("mine",), allowed_origins=("https://a.example",), allow_credentials=True)
    asking = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    headers = asking | {"Access-Control-Request-Headers": "authorization"}
    allowed = ask(app, "OPTIONS", "/v1/completions", headers=headers)
    assert (allowed.status_code, allowed.headers["Access-Control-Allow-Origin"]) == (200, "https://a.example")
    assert "authorization" in allowed.headers["Access-Control-Allow-Headers"]
    assert ask(app, "OPTIONS", "/v1/models", headers=asking | {"Origin": "https://b.example"}).status_code == 400
    refused = ask(app, "GET", "/v1/models", headers={"Origin": "https://a.example"})
    assert (refused.status_code, refused.headers["Access-Control-Allow-Origin"]) == (401, "https://a.example")
    assert "Access-Control-Allow-Origin" not in ask(app, "GET", "/health", headers={"Origin": "https://b.example"}).headers


def test_without_origins_no_page_of_another_origin_may_call() -> None:
    asking = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    answer = ask(make_app(), "OPTIONS", "/v1/completions", headers=asking)
    assert (answer.status_code, "Access-Control-Allow-Origin" in answer.headers) == (405, False)


def test_paths_are_answered_with_and_without_the_root_path() -> None:
    app = make_app(root_path="/llm", api_key=("mine",))
    key = {"Authorization": "Bearer mine"}
    assert [ask(app, "GET", path).status_code for path in ("/health", "/llm/health")] == [200, 200]
    assert [ask(app, "GET", path).status_code for path in ("/version", "/llm/version", "/llm/llm/version")] == [401] * 3
    asked = [ask(app, "GET", path, headers=key).status_code for path in ("/version", "/llm/version", "/llmversion")]
    assert asked == [200, 200, 404]
    for path in ("/%6clm/health", "/llm/%68ealth", "/x/llm/health"):  # no other spelling is an open path
        assert ask(app, "GET", path).status_code == 401
    assert ask(app, "GET", "/llm/openapi.json", headers=key).json()["servers"] == [{"url": "/llm"}]


def test_probes_need_no_key() -> None:
    app = make_app(api_key=KEYS)
    assert [ask(app, "GET", url).status_code for url in ("/health", "/ping", "/ready")] == [200, 200, 200]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(key: str, scheme: str) -> None:
    header = f"{scheme} {key}".encode()
    assert ask(make_app(api_key=KEYS), "GET", "/version", headers={"Authorization": header}).status_code == 200


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_as_anthropics_clients_send_it(key: str) -> None:
    headers = {"X-API-Key": key.encode()}
    app = make_app(api_key=KEYS)
    assert ask(app, "GET", "/version", headers=headers).status_code == 200
    assert ask(app, "GET", "/version", headers=headers | {"Authorization": b"Bearer other"}).status_code == 200
    assert ask(app, "GET", "/version", headers={"X-API-Key": b"Bearer " + key.encode()}).status_code == 401
    twice = [("X-API-Key", key.encode()), ("X-API-Key", key.encode())]
    assert ask(app, "GET", "/version", headers=twice).status_code == 401


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "first-key", "Basic first-key", "Bearer first-ke", "Bearer first-key2",
     "Bearer FIRST-KEY", "Bearer first-key, sécond-key", "Token Bearer first-key"],
)
def test_anything_else_does_not(header: str) -> None:
    response = ask(make_app(api_key=KEYS), "GET", "/version", headers={"Authorization": header.encode()})
    assert response.status_code == 401
    assert "first-key" not in response.text


def test_two_authorizations_are_none() -> None:
    headers = [("Authorization", "Bearer first-key"), ("Authorization", "Bearer wrong")]
    assert ask(make_app(api_key=KEYS), "GET", "/version", headers=headers).status_code == 401


# --- the operator -----------------------------------------------------------------------------------------------------


def client_of(header: str | None, **options: Any) -> tuple[int, str]:  # noqa: ANN401 (those of ServerOptions)
    """Return the status of a request with this header, and the client that it is taken for."""
    app = make_app(**options)

    @app.get("/who")
    async def who(request: Request) -> Response:
        return Response(client_id_of(request.scope))

    response = ask(app, "GET", "/who", headers={} if header is None else {"Authorization": header})
    return response.status_code, response.text


def test_operators_key_opens_what_a_key_opens() -> None:
    options = {"api_key": KEYS, "operator_api_key": "the-operator"}
    assert client_of("Bearer the-operator", **options) == (200, "operator")
    assert client_of(f"Bearer {KEYS[0]}", **options) == (200, "key:1")
    assert client_of("Bearer the-operator", api_key=KEYS)[0] == 401


def test_operators_key_alone_does_not_close_the_server() -> None:
    assert client_of("Bearer the-operator", operator_api_key="the-operator") == (200, "operator")
    assert client_of(None, operator_api_key="the-operator")[1].startswith("connection:")
    assert client_of("Bearer another", operator_api_key="the-operator")[1].startswith("connection:")


# --- shares of the queue ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/prefixes", "/tokenize"])
def test_client_with_too_many_requests_is_refused_before_its_body_is_read(path: str) -> None:
    app = make_app(max_requests_per_key=3, api_key=KEYS)
    held = app.state.service.admit(3, client_id="key:1")
    mine, other = ({"Authorization": b"Bearer " + key.encode()} for key in KEYS)
    response = ask(app, "POST", path, content=b"no JSON", headers=mine)
    assert (response.status_code, code_of(response)) == (429, "key_limit")
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert int(response.headers["Retry-After"]) >= 1
    assert "at most 3 may (max_requests_per_key)" in response.text
    assert ask(app, "POST", path, content=b"no JSON", headers=other).status_code == 400
    page = ask(app, "GET", "/metrics", headers=mine).text
    assert re.search(r'^quire:requests_refused_total\{.*reason="key_limit".*\} 1.0$', page, re.MULTILINE)
    held.release()
    assert ask(app, "POST", path, content=b"no JSON", headers=mine).status_code == 400


# --- a full queue -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/prefixes", "/tokenize"])
def test_where_there_is_no_place_the_body_is_not_even_read(path: str) -> None:
    app = make_app(max_queued_requests=4)
    app.state.service.client.num_queued = 4
    for headers, content in ({"content-type": "text/plain"}, b""), ({}, b"no JSON"):
        response = ask(app, "POST", path, content=content, headers=headers)
        assert (response.status_code, code_of(response)) == (429, "server_overloaded")
        assert int(response.headers["Retry-After"]) >= 1
    assert ask(app, "GET", "/version").status_code == 200
    app.state.service.client.num_queued = 3
    assert ask(app, "POST", path, content=b"no JSON").status_code == 400


def test_strangers_learn_nothing_of_a_full_queue() -> None:
    app = make_app(max_queued_requests=4, api_key=KEYS)
    app.state.service.client.num_queued = 4
    assert ask(app, "POST", "/v1/completions", json={}).status_code == 401


# --- draining ---------------------------------------------------------------------------------------------------------


def test_nothing_new_is_taken_while_the_server_drains() -> None:
    app = make_app()
    app.state.service.is_draining = True
    response = ask(app, "POST", "/echo", json={})
    assert (response.status_code, code_of(response)) == (503, "shutting_down")
    assert int(response.headers["Retry-After"]) >= 1
    page = ask(app, "GET", "/metrics").text
    assert re.search(r'^quire:requests_refused_total\{.*reason="shutting_down".*\} 1.0$', page, re.MULTILINE)


def test_probes_are_answered_while_the_server_drains() -> None:
    app = make_app()
    app.state.service.is_draining = True
    statuses = {url: ask(app, "GET", url).status_code for url in ("/health", "/ready", "/metrics", "/version")}
    assert statuses == {"/health": 200, "/ready": 503, "/metrics": 200, "/version": 200}


# --- methods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["/health", "/ready", "/version", "/metrics", "/openapi.json"])
def test_head_is_answered_like_get(url: str) -> None:
    app = make_app()
    got, head = ask(app, "GET", url), ask(app, "HEAD", url)
    assert head.status_code == got.status_code == 200
    assert head.headers["content-type"] == got.headers["content-type"]


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON ;x=y"])
def test_json_is_taken(kind: str) -> None:
    response = ask(make_app(), "POST", "/echo", content=b"{}", headers={"Content-Type": kind})
    assert (response.status_code, response.text) == (200, "{}")


def test_body_without_a_type_is_taken_for_json() -> None:
    assert ask(make_app(), "POST", "/echo", content=b"{}").text == "{}"


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "application/jsonp"],
)
def test_other_types_are_refused(kind: str) -> None:
    response = ask(make_app(max_body_bytes=100), "POST", "/echo", content=b"{}", headers={"Content-Type": kind})
    assert (response.status_code, code_of(response)) == (415, "unsupported_media_type")


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("br, gzip", 415), ("", 415), ("Identity", 200)])
def test_compressed_bodies_are_refused(encoding: str, status: int) -> None:
    response = ask(make_app(), "POST", "/echo", content=b"{}", headers={"Content-Encoding": encoding})
    assert response.status_code == status
    assert status == 200 or code_of(response) == "unsupported_media_type"


def test_body_that_announces_too_much_is_refused_unread() -> None:
    num_sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal num_sent
        num_sent += 1
        yield b" " * 101

    headers = {"Content-Length": "101", "Content-Type": "application/json"}
    response = ask(make_app(max_body_bytes=100), "POST", "/echo", content=pieces(), headers=headers)
    assert (response.status_code, code_of(response)) == (413, "request_too_large")
    assert num_sent == 0


def test_body_in_pieces_is_counted_and_not_read_to_its_end() -> None:
    num_sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal num_sent
        for num_sent in range(1, 1000):  # noqa: B007 (counted outside)
            yield b" " * 10

    headers = {"Content-Type": "application/json"}
    response = ask(make_app(max_body_bytes=100), "POST", "/echo", content=pieces(), headers=headers)
    assert (response.status_code, code_of(response)) == (413, "request_too_large")
    assert num_sent <= 12


def test_body_of_exactly_the_limit_is_taken() -> None:
    content = b'"' + b"x" * 98 + b'"'
    assert ask(make_app(max_body_bytes=100), "POST", "/echo", content=content).content == content


def test_body_that_does_not_come_is_a_timeout() -> None:

    async def pieces() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    headers = {"Content-Type": "application/json"}
    response = ask(make_app(receive_timeout=0.02), "POST", "/echo", content=pieces(), headers=headers)
    assert (response.status_code, code_of(response)) == (408, "request_timeout")
    assert response.headers["Connection"] == "close"


@pytest.mark.parametrize(("method", "url", "status"), [("POST", "/nowhere", 404), ("POST", "/health", 405)])
def test_body_that_nobody_reads_is_not_looked_at(method: str, url: str, status: int) -> None:
    response = ask(
        make_app(max_body_bytes=1), method, url, content=b"much too long", headers={"Content-Type": "text/plain"}
    )
    assert response.status_code == status


# --- clients ----------------------------------------------------------------------------------------------------------


def test_a_client_is_its_key_or_else_its_connection() -> None:
    scope = {"type": "http", "client": ("127.0.0.1", 40000), "quire.key_number": 0}
    assert client_id_of(Request(scope)) == "connection:127.0.0.1:40000"
    assert client_id_of(Request(scope | {"quire.key_number": 2})) == "key:2"
    assert client_id_of(Request(scope | {"client": None})) == "connection::0"
