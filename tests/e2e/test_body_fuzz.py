"""Bodies with faults of every kind: an answer or an error in the contract's form, and never a 5xx."""

import asyncio
import json
import random
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest

from quire.server.apis.completions.completion_bodies import (
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    PrefixBody,
    SessionBody,
    TokenizeBody,
)
from quire.server.apis.responses.responses_bodies import ResponsesBody
from support.clients import LIMIT_S
from support.json_mutations import JUNK, places
from support.metrics_page import wait_until_idle
from support.reciting_model import Reciter
from support.server import ServerProcess, running_server

NUM_BODIES = 300
NUM_AT_ONCE = 16
MAX_TOKENS = 128  # together with the prompt
MAX_CHOICES = 8

GENERATION: dict[str, Any] = {
    "n": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "max_tokens": 4,
    "stop": ["x", "yz"],
    "stop_token_ids": [7],
    "logit_bias": {"5": 1.5},
    "bad_words": ["bad"],
    "stream": True,
}
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
TEMPLATE = {"add_generation_prompt": True, "chat_template_kwargs": {"a": 1}}
RESPONSE: dict[str, Any] = {
    "input": [  # as short as the server's limit; tests of input items have calls
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}], "content": None},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
    ],
    "instructions": "i",
    "tools": [{"type": "mcp"}],  # ignored; functions would make the prompt too long
    "tool_choice": "auto",
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"enum": [1, 2]}}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"}, "include": ["message.output_text.logprobs"], "top_logprobs": 2,
    "metadata": {"a": "b"}, "max_output_tokens": 4, "temperature": 0.7, "store": True, "stream": True,
}  # fmt: skip
WHOLE: dict[str, tuple[dict[str, Any], type]] = {
    "/v1/completions": ({"prompt": ["ab", "cd"], "echo": True, "logprobs": 2, **GENERATION}, CompletionBody),
    "/v1/chat/completions": ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **GENERATION}, ChatBody),
    "/v1/responses": (RESPONSE, ResponsesBody),
    "/tokenize": ({"messages": MESSAGES, **TEMPLATE}, TokenizeBody),
    "/detokenize": ({"tokens": [5, 6, 300]}, DetokenizeBody),
    "/v1/prefixes": ({"prompt": [5, 6, 7], "cache_salt": "s"}, PrefixBody),
    "/v1/sessions": ({"prompt": [5, 6, 7], "cache_salt": "s", "ttl": 60}, SessionBody),
}


@pytest.fixture(scope="module")
def small_server(reciter: Reciter) -> Iterator[ServerProcess]:
    """Serve a model for short answers, so that no mutation takes long."""
    arguments = ("--max-model-len", str(MAX_TOKENS), "--max-n", str(MAX_CHOICES))
    with running_server(str(reciter.folder), *arguments) as running:
        yield running


def mutated_fields(rng: random.Random, whole: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return a body with values replaced, dropped and added."""
    required = next(iter(whole))
    body = deepcopy({key: value for key, value in whole.items() if key == required or rng.random() < 0.7})
    for _ in range(rng.choice([0, 1, 1, 3])):
        junk = deepcopy(rng.choice(JUNK))
        action, found = rng.random(), list(places(body))
        if action < 0.2 or not found:
            body[rng.choice(names)] = junk
            continue
        container, key = rng.choice(found)
        if action < 0.8:
            container[key] = junk
        elif isinstance(container, dict):
            container.pop(key, None)
    return body


def mutated_text(rng: random.Random, text: bytes) -> bytes:
    """Return JSON with bytes lost, doubled or changed."""
    at, length, depth = rng.randrange(len(text)), rng.randrange(1, 20), rng.choice([100, 2000, 100_000])
    changes: list[Callable[[], bytes]] = [
        lambda: text[:at],
        lambda: text[:at] + text[at + length :],
        lambda: text[: at + length] + text[at:],
        lambda: text[:at] + rng.randbytes(2) + text[at + 2 :],
        lambda: b"[" + text + b"]",
        lambda: rng.randbytes(length),
        lambda: b"",
        lambda: text + b" x",
        lambda: text[:at] + b"[" * depth + b"]" * depth + text[at:],
        lambda: text.replace(b"1", b"[" * depth + b"]" * depth),
        lambda: b"\xef\xbb\xbf" + text,
        lambda: text.decode().encode("utf-16"),
    ]
    return rng.choice(changes)()


def bodies(path: str, seed: int, count: int) -> Iterator[bytes]:
    """Yield faulty bodies for a route, for one seed always the same."""
    rng, (whole, body_type) = random.Random(seed), WHOLE[path]
    names = [*body_type.model_fields, *UNSUPPORTED, "model", "unknown"]
    for _ in range(count):
        text = json.dumps(mutated_fields(rng, whole, names)).encode()
        yield mutated_text(rng, text) if rng.random() < 0.2 else text


async def ask_all(url: str, path: str, faulty: Iterable[bytes]) -> list[tuple[bytes, httpx.Response]]:
    """Send bodies, several at once; return each with what it was answered."""
    seats = asyncio.Semaphore(NUM_AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, headers={"Content-Type": "application/json"}) as http:

        async def ask(body: bytes) -> tuple[bytes, httpx.Response]:
            async with seats:
                return body, await http.post(path, content=body)

        return await asyncio.gather(*map(ask, faulty))


def check_answer(response: httpx.Response) -> None:
    if response.headers["content-type"].startswith("text/event-stream"):
        *events, rest = response.text.split("\n\n")
        assert rest == ""
        events = [event for event in events if not event.startswith(":")]   # a slow stream has comments
        if events[0].startswith("event: "):
            kinds = [event.partition("\n")[0].removeprefix("event: ") for event in events]
            assert (kinds[0], "error" in kinds) == ("response.created", False)
            assert kinds[-1] in ("response.completed", "response.incomplete")
            return
        assert events.pop() == "data: [DONE]"
        assert not any("error" in json.loads(event.removeprefix("data: ")) for event in events)
    else:
        assert isinstance(response.json(), dict)


def check_error(response: httpx.Response) -> None:
    assert response.status_code in (400, 404)
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(error["message"]) < 1000
    assert error["param"] is None or isinstance(error["param"], str)
    codes = (None, "context_length_exceeded", "unsupported_parameter", "invalid_json", "invalid_session", "answer_gone")
    assert error["code"] in (("model_not_found", "session_not_found") if response.status_code == 404 else codes)


@pytest.mark.parametrize("path", WHOLE)
def test_faulty_bodies_get_an_answer_or_a_clear_error(small_server: ServerProcess, path: str) -> None:
    asked = asyncio.run(ask_all(small_server.url, path, bodies(path, seed=0, count=NUM_BODIES)))
    for body, response in asked:
        try:
            (check_answer if response.status_code == 200 else check_error)(response)
        except AssertionError as error:
            error.add_note(f"{response.status_code} {response.text[:500]!r} for {body[:1000]!r}")
            raise
    assert {response.status_code for _, response in asked} >= {200, 400}
    for prefix in httpx.get(f"{small_server.url}/v1/prefixes", timeout=LIMIT_S).json()["data"]:
        deleted = httpx.delete(f"{small_server.url}/v1/prefixes/{prefix['id']}", timeout=LIMIT_S)
        # A body may give its prefix a second to live, which can end behind the list.
        assert deleted.status_code in (200, 404)
    assert httpx.get(f"{small_server.url}/v1/prefixes", timeout=LIMIT_S).json()["data"] == []
    wait_until_idle(small_server.url)
    assert "Traceback" not in small_server.log
