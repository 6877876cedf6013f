"""What openapi.json says of routes that take no body: each status and schema of each is reached by a real call.

schemathesis makes little of routes without inputs, so their answers are gone through here.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema_rs
import pytest

from quire.engine.options import EngineOptions
from support.http_app import ask, make_app
from support.openai_server import LIMIT_S, NAME, OpenAIServer, openai_server

OWN = {"Authorization": "Bearer mine"}
# Options of the engine.
SURVIVORS = {
    "/", "/status", "/version", "/load", "/metrics", "/v1/models", "/v1/models/{model_id}", "/v1/prefixes",
    "/v1/requests/{request_id}/explain", "/debug/top", "/kv_event_sources", "/v1/sessions", "/v1/sessions/{session_id}",
}  # fmt: skip


@pytest.fixture(scope="module")
def server(demo_model: Path) -> Iterator[OpenAIServer]:
    engine = EngineOptions(model=str(demo_model), max_model_len=128, num_kv_blocks=64)
    with openai_server(engine, api_key=("mine",), enable_debug=True, max_pinned_share=1.0) as running:
        running.http.headers.update(OWN)
        yield running


def documented_responses(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the documented responses of each GET."""
    return {path: methods["get"]["responses"] for path, methods in schema["paths"].items() if "get" in methods}


def hold(response: httpx.Response, responses: dict[str, Any]) -> None:
    """Hold an answer to what is told of its status: the type of its content, and the schema."""
    status = str(response.status_code)
    (kind,) = (each for each in responses if each in (status, f"{status[0]}XX"))
    content_type = response.headers["content-type"].partition(";")[0]
    schema = responses[kind]["content"][content_type].get("schema", {})
    jsonschema_rs.validate(schema, response.json() if content_type == "application/json" else response.text)


def test_every_answer_of_a_get_is_as_it_is_told(server: OpenAIServer) -> None:
    routes = documented_responses(server.http.get("/openapi.json").json())
    assert routes.keys() >= SURVIVORS | {"/health", "/ping", "/ready", "/debug/kv"}
    answer = server.ask("/v1/completions", prompt=[1, 2, 3], max_tokens=2)
    session = server.ask("/v1/sessions", prompt=[1, 2, 3])
    ids = {"request_id": answer["id"], "model_id": NAME, "session_id": session["id"]}
    paths = {path: path.format(**ids) for path in routes}
    for path, responses in routes.items():
        assert responses.keys() == {"200", "4XX", "5XX"}
        well = server.http.get(paths[path])
        hold(well, responses)
        assert well.status_code == 200, path
        refused = httpx.get(server.url + paths[path], headers={"x": "x" * 100_000}, timeout=LIMIT_S)
        hold(refused, responses)
        assert refused.status_code == 431, path
        stranger = httpx.get(server.url + paths[path], timeout=LIMIT_S)
        hold(stranger, responses)
        assert stranger.status_code == (200 if path in ("/", "/health", "/ping", "/ready") else 401), path
    os.kill(server.child.process.pid, signal.SIGKILL)
    server.wait_until(lambda: not server.service.client.is_alive)
    for path, responses in routes.items():
        dead = server.http.get(paths[path])
        hold(dead, responses)
        assert dead.status_code == (200 if path in SURVIVORS else 503), path


def test_a_fault_of_ours_has_the_form_that_is_told() -> None:
    app = make_app(enable_debug=True)
    routes = documented_responses(ask(app, "GET", "/openapi.json").json())
    app.state.service = SimpleNamespace(to_api_error=app.state.service.to_api_error)  # all else is missing
    app.state.sessions = SimpleNamespace()
    for path, responses in routes.items():
        response = ask(app, "GET", path)
        hold(response, responses)
        assert response.status_code == (200 if path in ("/", "/version") else 500), path
