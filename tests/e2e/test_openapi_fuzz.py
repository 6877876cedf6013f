"""openapi.json is true, and whatever schemathesis makes of it gets an answer, or an error in the contract's form.

Valid and invalid data, NUL bytes among it, other methods and media types; the server and its engine must not feel any.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema

from support.clients import LIMIT_S
from support.metrics_page import wait_until_idle
from support.reciting_model import Reciter
from support.server import ServerProcess, running_server

SMALL = (
    "--max-model-len", "128", "--num-kv-blocks", "256", "--max-num-seqs", "16", "--max-n", "4", "--runner", "pooling",
)  # fmt: skip
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "negative_data_rejection", "unsupported_method", "contracts_form",
)
ERROR_TYPES = ("invalid_request_error", "rate_limit_error", "server_error")
ANTHROPICS = "/v1/messages"  # has a form of its own, as all below it
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize", "/v1/prefixes",
    "/v1/sessions", ANTHROPICS, f"{ANTHROPICS}/count_tokens", "/v1/embeddings", "/v2/embed", "/pooling", "/score",
    "/rerank",
)
MANY, FEW = 500, 4


@schemathesis.check
def contracts_form(_: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case) -> None:
    """Errors have the form that the contract says; a stream ends as one."""
    is_anthropics = case.path.startswith(ANTHROPICS)
    if response.status_code >= 400 and case.method.upper() != "HEAD":
        body = json.loads(response.content)
        if is_anthropics:
            assert body.keys() == {"type", "error"}
            assert (body["type"], body["error"].keys()) == ("error", {"type", "message"})
            assert 0 < len(body["error"]["message"]) < 1000
            return
        (error,) = body.values()
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] in ERROR_TYPES
        assert 0 < len(error["message"]) < 1000
    elif response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        last = response.content.split(b"\n\n")[-2]
        ends = (b"event: message_stop",) if is_anthropics else (b"data: [DONE]", b"event: response.")
        assert last.startswith(ends)


@pytest.fixture(scope="module")
def server(reciter: Reciter) -> Iterator[ServerProcess]:
    """Serve a model for short answers, with every route that there is."""
    with running_server(str(reciter.folder), *SMALL, "--enable-debug") as running:
        yield running


def config(max_examples: int) -> SchemathesisConfig:
    return SchemathesisConfig.from_dict({
        "seed": 0,
        "request-timeout": LIMIT_S,
        "continue-on-failure": True,
        "max-stream-events": 10_000,           # else a stream is cut by the client
        "generation": {"max-examples": max_examples, "mode": "all", "database": "none", "allow-x00": True},
        "checks": {"enabled": False} | {name: {"enabled": True} for name in CHECKS},
        "phases": {"stateful": {"enabled": False}, "coverage": {"enabled": max_examples >= MANY}},
        "cache": {"enabled": False},
    })


def failures(url: str, max_examples: int) -> tuple[Counter[str], list[str]]:
    """Ask with all that is made of the schema; return how often each route was, and what is wrong with its answers."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", config=config(max_examples))
    num_asked, found = Counter[str](), list[str]()
    for event in from_schema(schema).execute():
        if isinstance(event, events.NonFatalError | events.FatalError):
            found.append(f"{event}")
        if isinstance(event, events.ScenarioFinished):
            num_asked[str(event.label)] += len(event.recorder.interactions)
            for case_id, checks in event.recorder.checks.items():
                found += [
                    f"{event.label} {check.name}: {check.failure_info.failure} "
                    f"{told(event.recorder.interactions[case_id])}"
                    for check in checks if check.failure_info is not None
                ]
    return num_asked, found


def told(interaction: Any) -> str:  # noqa: ANN401 (schemathesis')
    request, response = interaction.request, interaction.response
    return f"{request.method} {request.uri} {request.body!r:.500} -> {response and response.content!r:.500}"


@pytest.mark.parametrize(
    "max_examples", [FEW, pytest.param(MANY, marks=[pytest.mark.fuzz, pytest.mark.timeout(7200)])]
)
def test_whatever_is_made_of_the_schema_is_answered(
    server: ServerProcess, reciter: Reciter, max_examples: int
) -> None:
    url, engine = server.url, server.engine_pid()
    body = {"prompt": reciter.prompt(), "max_tokens": 30, "temperature": 0}
    before = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S).json()["choices"]
    num_asked, found = failures(url, max_examples)
    assert not found, "\n\n".join(found[:10])
    assert min(num_asked[f"POST {path}"] for path in PATHS) >= max_examples
    for prefix in httpx.get(f"{url}/v1/prefixes", timeout=LIMIT_S).json()["data"]:
        assert httpx.delete(f"{url}/v1/prefixes/{prefix['id']}", timeout=LIMIT_S).status_code == 200
    wait_until_idle(url)
    assert server.engine_pid() == engine
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S).json()["choices"] == before
    assert "Traceback" not in server.log
