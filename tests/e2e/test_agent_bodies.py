"""Request bodies of coding agents: prompts of 30,000 tokens run; whatever is changed in them is answered or refused.

The changed ones have short prompts, but in the long tests.
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema

from support.agent_bodies import NUM_TOOLS, messages_body, responses_body, write_agents_model
from support.clients import LIMIT_S
from support.json_mutations import mutated_body
from support.metrics_page import read_metrics
from support.server import ServerProcess, running_server, wait_until

BODIES: dict[str, Callable[..., dict[str, Any]]] = {"/v1/responses": responses_body, "/v1/messages": messages_body}
LAST = {"/v1/responses": ("response.completed", "response.incomplete"), "/v1/messages": ("message_stop",)}
MIN_PROMPT_TOKENS = 20_000
SHORT = {"num_rules": 2, "num_tools": 2}
FEW, MANY = 40, 400
MANY_MARKS = [pytest.mark.fuzz, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_agents_model(tmp_path_factory.mktemp("agents"))
    flags = ("--served-model-name", "agents", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with running_server(str(folder), *flags) as running:
        yield running


def last_event(response: httpx.Response) -> tuple[str, dict[str, Any]]:
    """Return the kind of the last event of a stream, and its data."""
    *_, last, rest = response.text.split("\n\n")
    assert rest == ""
    kind, _, data = last.partition("\ndata: ")
    return kind.removeprefix("event: "), json.loads(data)


@pytest.mark.parametrize("path", BODIES)
def test_body_of_an_agent_runs(server: ServerProcess, path: str) -> None:
    """The second time, nearly all of the prompt is found in the prefix cache."""
    body = BODIES[path]()
    assert len(body["tools"]) >= NUM_TOOLS
    for _ in range(2):
        response = httpx.post(f"{server.url}{path}", json=body, timeout=LIMIT_S)
        assert response.status_code == 200, response.text
        assert last_event(response)[0] in LAST[path]
    whole = httpx.post(f"{server.url}{path}", json=body | {"stream": False}, timeout=LIMIT_S).json()
    usage = whole["usage"]
    if path == "/v1/messages":
        cached = usage["cache_read_input_tokens"]
        num_tokens = usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]
        counted = {name: body[name] for name in ("model", "system", "messages", "tools", "thinking")}
        count = httpx.post(f"{server.url}{path}/count_tokens", json=counted, timeout=LIMIT_S).json()
        assert count["input_tokens"] == num_tokens
    else:
        num_tokens, cached = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    assert num_tokens > MIN_PROMPT_TOKENS
    assert cached > num_tokens - 64


def check(response: httpx.Response, path: str, body: object) -> None:
    """Check that an answer is whole, or an error of the request."""
    assert response.status_code in (200, 400), f"{response.status_code} {response.text[:500]} for {body!r:.2000}"
    if response.headers["content-type"].startswith("text/event-stream"):
        assert last_event(response)[0] in LAST[path]
    else:
        assert ("error" in response.json() and response.json()["error"] is not None) == (response.status_code == 400)


@pytest.mark.parametrize("num_bodies", [FEW, pytest.param(MANY, marks=MANY_MARKS)])
@pytest.mark.parametrize("path", BODIES)
def test_changed_bodies_are_answered_or_refused(server: ServerProcess, path: str, num_bodies: int) -> None:
    whole, rng = BODIES[path](**(SHORT if num_bodies == FEW else {})), random.Random(num_bodies)
    seats = asyncio.Semaphore(4)

    async def ask_all() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as http:

            async def ask(body: bytes) -> None:
                async with seats:
                    response = await http.post(path, content=body, headers={"Content-Type": "application/json"})
                if response.status_code != 404 or "does not exist" not in response.text:  # a changed name of the model
                    check(response, path, body[-2000:])

            bodies = [json.dumps(mutated_body(rng, whole)).encode() for _ in range(num_bodies)]
            await asyncio.gather(*map(ask, bodies))

    engine = server.engine_pid()
    asyncio.run(ask_all())
    running, waiting = "vllm:num_requests_running", "vllm:num_requests_waiting"  # (pins keep blocks)
    wait_until(lambda: read_metrics(server.url)[running] == read_metrics(server.url)[waiting] == 0)
    assert server.engine_pid() == engine
    assert "Traceback" not in server.log


def config(max_examples: int) -> SchemathesisConfig:
    return SchemathesisConfig.from_dict({
        "seed": 0,
        "request-timeout": LIMIT_S,
        "continue-on-failure": True,
        "max-stream-events": 10_000,
        "generation": {"max-examples": max_examples, "mode": "all", "database": "none"},
        "checks": {"enabled": False, "not_a_server_error": {"enabled": True}},
        "phases": {"stateful": {"enabled": False}, "coverage": {"enabled": max_examples >= MANY}},
        "cache": {"enabled": False},
    })


@pytest.mark.parametrize("max_examples", [4, pytest.param(MANY, marks=MANY_MARKS)])
@pytest.mark.parametrize("path", BODIES)
def test_schemathesis_begins_with_the_body_of_an_agent(server: ServerProcess, path: str, max_examples: int) -> None:
    """The body is the example of the route's schema: it is sent as it is, and in the long test part by part changed."""
    body = BODIES[path](**({} if max_examples == MANY else SHORT)) | {"stream": False}
    spec = httpx.get(f"{server.url}/openapi.json", timeout=LIMIT_S).json()
    operation = spec["paths"][path]["post"]
    operation["requestBody"]["content"]["application/json"]["example"] = body
    spec |= {"paths": {path: {"post": operation}}, "servers": [{"url": server.url}]}
    schema = schemathesis.openapi.from_dict(spec, config=config(max_examples))
    schema.config.update(base_url=server.url)
    was_sent = False
    for event in from_schema(schema).execute():
        assert not isinstance(event, events.NonFatalError | events.FatalError), f"{event}"
        if isinstance(event, events.ScenarioFinished):
            for interaction in event.recorder.interactions.values():
                response, sent = interaction.response, interaction.request.body or b""
                assert response is not None, f"no answer to {sent[:2000]!r}"
                assert response.status_code < 500, f"{response.content!r:.500} to {sent[:2000]!r}"
                was_sent |= len(sent) >= len(json.dumps(body)) // 2
    assert was_sent
    assert "Traceback" not in server.log
