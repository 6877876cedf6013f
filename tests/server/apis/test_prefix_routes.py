"""Pinned prefixes over HTTP: answers, refusals, and that nothing of a pin is left behind."""

import json
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.options import EngineOptions
from quire.server.errors import shutting_down
from support.http_app import ask, make_app, read_one
from support.openai_server import LIMIT_S, NAME, OpenAIServer, openai_server

PREFIXES, COMPLETIONS = "/v1/prefixes", "/v1/completions"
PREFIX = [5 + i for i in range(41)]  # two blocks of 16, and nine tokens
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
OCCUPYING: dict[str, Any] = {"prompt": "a", "n": 8, "max_tokens": 900, "ignore_eos": True}


def options(demo_model: Path) -> EngineOptions:
    return EngineOptions(model=str(demo_model), max_num_seqs=8, max_model_len=1024, num_kv_blocks=512)


@pytest.fixture(scope="module")
def running_server(demo_model: Path) -> Iterator[OpenAIServer]:
    with openai_server(options(demo_model), max_queued_requests=20, max_n=8, max_pinned_share=1.0) as server:
        yield server


@pytest.fixture
def server(running_server: OpenAIServer) -> Iterator[OpenAIServer]:
    """Return the server; nothing is left pinned, and nothing else behind."""
    yield running_server
    for prefix in listed(running_server):
        assert delete(running_server, prefix["id"]).status_code == 200
    running_server.wait_until(running_server.is_idle)


def listed(server: OpenAIServer) -> list[dict[str, Any]]:
    answer = server.http.get(PREFIXES).json()
    assert answer["object"] == "list"
    return list(answer["data"])


def delete(server: OpenAIServer, prefix_id: str) -> httpx.Response:
    return server.http.delete(f"{PREFIXES}/{prefix_id}")


def cached_tokens(server: OpenAIServer, prompt: object, **body: object) -> int:
    answer = server.ask(COMPLETIONS, prompt=prompt, **GREEDY | body)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def num_pinned(server: OpenAIServer) -> int:
    return server.service.client.inputs.limits.num_pinned_blocks


def post(server: OpenAIServer, path: str, **body: object) -> socket.socket:
    """Send a body on a connection of its own."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), timeout=LIMIT_S)
    connection.sendall(b"POST %s HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(content)))
    connection.sendall(content)
    return connection


@contextmanager
def occupied(server: OpenAIServer) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """Let one request take all places of a batch, so that a pin has to wait for its turn.

    The engine stands still, however slow the test is; the yielded function runs steps until a condition holds.
    """
    with server.single_steps() as run_step, post(server, COMPLETIONS, **OCCUPYING):

        def run_until(condition: Callable[[], bool]) -> None:
            while not server.on_loop(condition):
                run_step()

        server.wait_until(lambda: server.service.client.num_queued == 1)
        run_until(lambda: server.service.client.state.num_running == 1)
        yield run_until


def test_pin_is_made_listed_found_and_deleted(server: OpenAIServer) -> None:
    pinned = server.ask(PREFIXES, prompt=PREFIX)
    assert pinned["id"].startswith("prefix-")
    assert pinned["created"] > 0
    shape = {"id": pinned["id"], "object": "prefix", "created": pinned["created"], "num_tokens": 41, "num_blocks": 3}
    assert pinned == shape | {"expires": pinned["expires"]}
    assert pinned["expires"] - pinned["created"] in (3600, 3601)
    assert listed(server) == [pinned]
    assert num_pinned(server) == 3
    assert 'quire:kv_blocks_pinned{engine="0"} 3.0\n' in server.http.get("/metrics").text
    assert [cached_tokens(server, [*PREFIX, 900, last]) for last in (1, 2)] == [41, 42]

    response = delete(server, pinned["id"])
    assert (response.status_code, response.json()) == (
        200, {"id": pinned["id"], "object": "prefix.deleted", "deleted": True},
    )  # fmt: skip
    assert (listed(server), num_pinned(server)) == ([], 0)
    assert cached_tokens(server, [*PREFIX, 901]) >= 32, "full blocks stay cached"


def test_same_prefix_twice_has_two_ids_and_one_set_of_blocks(server: OpenAIServer) -> None:
    first, second = server.ask(PREFIXES, prompt=PREFIX), server.ask(PREFIXES, prompt=PREFIX)
    assert first["id"] != second["id"]
    assert listed(server) == [first, second]
    assert num_pinned(server) == 3
    delete(server, first["id"])
    assert cached_tokens(server, [*PREFIX, 902]) == 41


def test_text_is_what_a_prompt_of_that_text_begins_with(server: OpenAIServer) -> None:
    text = "import os\nimport sys\n\n\ndef main("
    pinned = server.ask(PREFIXES, prompt=text)
    tokens = server.ask("/tokenize", prompt=text)["tokens"]
    assert pinned["num_tokens"] == len(tokens)
    assert cached_tokens(server, [*tokens, 903]) == len(tokens)


def test_salted_pin_serves_its_salt_only(server: OpenAIServer) -> None:
    prefix = [100 + i for i in range(20)]
    pinned = server.ask(PREFIXES, prompt=prefix, cache_salt="mine")
    assert "mine" not in json.dumps([pinned, *listed(server)])
    found = [cached_tokens(server, [*prefix, 9], **salt) for salt in ({}, {"cache_salt": "x"}, {"cache_salt": "mine"})]
    assert found == [0, 0, 20]


@pytest.mark.parametrize("prefix_id", ["prefix-0", "-1", "0", "x" * 3000, "%00", "..."])
def test_unknown_prefix_is_not_found(server: OpenAIServer, prefix_id: str) -> None:
    server.ask(PREFIXES, prompt=PREFIX)
    response = delete(server, prefix_id)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (404, "invalid_request_error", "prefix_not_found")
    assert error["param"] == "id"
    assert len(listed(server)) == 1


def test_prefix_is_deleted_once(server: OpenAIServer) -> None:
    pinned = server.ask(PREFIXES, prompt=PREFIX)
    assert [delete(server, pinned["id"]).status_code for _ in range(2)] == [200, 404]


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({}, 400, "prompt", None),
        ({"prompt": None}, 400, "prompt", None),
        ({"prompt": []}, 400, "prompt", None),
        ({"prompt": ["a", "b"]}, 400, "prompt", None),
        ({"prompt": {"prompt": "x"}}, 400, "prompt", None),
        ({"prompt": [4096]}, 400, "prompt", None),
        ({"prompt": "x", "cache_salt": ""}, 400, "cache_salt", None),
        ({"prompt": "x", "cache_salt": 5}, 400, "cache_salt", None),
        ({"prompt": "x", "model": "other"}, 404, "model", "model_not_found"),
        ({"prompt": [1] * 1024}, 400, "prompt", "context_length_exceeded"),
    ],
)
def test_bad_body_is_refused(
    server: OpenAIServer, body: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    got, error = server.refusal(PREFIXES, **body)
    assert (got, error["type"], error["param"], error["code"]) == (status, "invalid_request_error", param, code)
    assert (listed(server), num_pinned(server)) == ([], 0)


def test_pin_that_would_break_a_promise_is_refused_with_the_numbers(server: OpenAIServer) -> None:
    """Of 512 blocks the longest request keeps 64, or eight branches that run already 8 x 57 and one."""
    for salt in range(7):
        server.ask(PREFIXES, prompt=[7] * 1023, cache_salt=str(salt))
    status, error = server.refusal(PREFIXES, prompt=[7] * 1023, cache_salt="8")
    assert (status, error["param"], error["code"]) == (400, "prompt", None)
    told = "a prefix of 1023 tokens takes 64 KV blocks of 16 tokens, but of all 512 (num_kv_blocks) 448 are pinned and"
    assert error["message"] == f"{told} max_model_len 1024 needs 64"
    status, error = server.refusal(COMPLETIONS, **OCCUPYING)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "448 of them pinned" in error["message"]
    for prefix in listed(server):
        delete(server, prefix["id"])
    with ThreadPoolExecutor(1) as pool, occupied(server) as run_until:
        refused = pool.submit(server.refusal, PREFIXES, prompt=[7] * 1023)
        run_until(refused.done)
        status, error = refused.result()
        assert status == 400
        assert "a request that was let in needs 456" in error["message"]


def test_pins_are_bounded(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = replace(server.service.options, max_pinned_prefixes=1)
    monkeypatch.setattr(server.service, "options", limited)
    pinned = server.ask(PREFIXES, prompt=PREFIX)
    status, error = server.refusal(PREFIXES, prompt=PREFIX[:20])
    assert (status, error["param"]) == (400, "prompt")
    assert "at most 1 may be (max_pinned_prefixes)" in error["message"]
    delete(server, pinned["id"])
    server.ask(PREFIXES, prompt=PREFIX[:20])


def test_pins_are_those_of_a_key(demo_model: Path) -> None:
    with openai_server(options(demo_model), api_key=("a", "b")) as server:
        ours, theirs = ({"Authorization": f"Bearer {key}"} for key in "ab")
        pinned = server.http.post(PREFIXES, json={"prompt": PREFIX}, headers=ours).json()
        assert server.http.get(PREFIXES, headers=theirs).json()["data"] == []
        refused = server.http.delete(f"{PREFIXES}/{pinned['id']}", headers=theirs)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "prefix_not_found")
        assert server.http.get(PREFIXES, headers=ours).json()["data"] == [pinned]
        assert server.http.delete(f"{PREFIXES}/{pinned['id']}", headers=ours).json()["deleted"] is True
        assert server.http.get(PREFIXES, headers=ours).json()["data"] == []


# --- bounds over all clients, and the operator ------------------------------------------------------------------------


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def pin(server: OpenAIServer, key: str | None = None, *, num_tokens: int = 320, first: int = 5) -> httpx.Response:
    """Pin a prefix of its own: 20 blocks."""
    body = {"prompt": [first, *[7] * (num_tokens - 1)]}
    return server.http.post(PREFIXES, json=body, headers={} if key is None else bearer(key))


def test_shares_of_the_cache_bound_the_pins_of_a_key_and_of_all(demo_model: Path) -> None:
    """Of 512 blocks 51 may be pinned by one key, and 102 by all; the operator has no share of its own."""
    limits = {"max_pinned_share": 0.2, "max_pinned_share_per_key": 0.1, "operator_api_key": "op"}
    with openai_server(options(demo_model), api_key=("a", "b"), **limits) as server:
        assert [pin(server, "a", first=first).status_code for first in (1, 2, 3)] == [200, 200, 400]
        error = pin(server, "a", first=3).json()["error"]
        assert error["param"] == "prompt"
        assert error["message"] == (
            "the prefix takes 20 KV blocks, and pins of this key hold 40 already, but of all 512 (num_kv_blocks) they "
            "may hold 51 (max_pinned_share_per_key 0.1)"
        )
        assert [pin(server, "b", first=first).status_code for first in (4, 5)] == [200, 200]
        assert [pin(server, "op", first=first).status_code for first in (6, 7)] == [200, 400]
        assert "102 (max_pinned_share 0.2)" in pin(server, "op", first=7).json()["error"]["message"]
        assert pin(server, "op", first=7, num_tokens=16).status_code == 200, "a block"
        server.wait_until(lambda: len(server.service.admission.num_by_client) == 0)


def test_pins_under_way_count_towards_the_share(demo_model: Path) -> None:
    with openai_server(options(demo_model), max_n=8, max_pinned_share=0.05) as server:
        with occupied(server) as run_until, post(server, PREFIXES, prompt=[7] * 320):
            run_until(lambda: num_pinned(server) == 20)
            status, error = server.refusal(PREFIXES, prompt=[8] * 160)
            assert (status, error["param"]) == (400, "prompt")
            assert "pins hold 20 already" in error["message"]
        server.wait_until(lambda: num_pinned(server) == 0)


def test_pins_that_wait_count_towards_the_queued_tokens(demo_model: Path) -> None:
    """A pin is refused for what waits, and what waits behind it for the pin; a pin that is computed waits no more."""
    with openai_server(options(demo_model), max_n=8, max_queued_tokens=100) as server:
        too_long = pin(server, num_tokens=101)
        assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "prompt")
        assert "101; at most 100 may wait (max_queued_tokens)" in too_long.json()["error"]["message"]
        service = server.service
        with server.held(), post(server, PREFIXES, prompt=[5] * 60):
            server.wait_until(lambda: service.client.num_queued_tokens == 60)
            assert service.admission.num_preparing_tokens == 0, "it is counted once"
            refused = pin(server, num_tokens=41)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "server_overloaded")
            assert "60 prompt tokens x n wait already" in refused.json()["error"]["message"]
            refused = server.http.post(COMPLETIONS, json={"prompt": [6] * 41})
            assert refused.status_code == 429
        server.wait_until(lambda: service.client.num_queued_tokens == 0)
        assert pin(server, num_tokens=100).status_code == 200
        assert (service.admission.num_preparing_tokens, service.client.num_queued_tokens) == (0, 0)


def test_operator_lists_and_deletes_the_pins_of_all_keys(demo_model: Path) -> None:
    with openai_server(options(demo_model), api_key=("a", "b"), operator_api_key="op") as server:
        pins = [pin(server, key, first=first).json() for first, key in enumerate(("a", "b", "op"), 1)]
        seen = server.http.get(PREFIXES, headers=bearer("op")).json()["data"]
        assert seen == [
            pinned | {"owner": owner} for pinned, owner in zip(pins, ("key-1", "key-2", "operator"), strict=True)
        ]
        assert server.http.get(PREFIXES, headers=bearer("a")).json()["data"] == [pins[0]]
        assert server.http.delete(f"{PREFIXES}/{pins[2]['id']}", headers=bearer("a")).status_code == 404
        for pinned in pins:
            assert server.http.delete(f"{PREFIXES}/{pinned['id']}", headers=bearer("op")).status_code == 200
        server.wait_until(lambda: num_pinned(server) == 0)


def test_pin_expires_although_no_request_looks_for_it(demo_model: Path) -> None:
    with openai_server(options(demo_model), pin_ttl=0.2) as server:
        assert pin(server).json()["num_blocks"] == 20
        server.wait_until(lambda: num_pinned(server) == 0 and server.service.client.state.pins == ())
        assert listed(server) == []
        assert server.service.client.pinned._on_removal == {}


def test_pin_without_a_time_limit_has_no_timer(demo_model: Path) -> None:
    with openai_server(options(demo_model), pin_ttl=0) as server:
        pinned = pin(server).json()
        assert pinned["expires"] is None
        assert server.service.client.pinned._on_removal == {}
        assert delete(server, pinned["id"]).status_code == 200


def test_timer_goes_with_its_pin(server: OpenAIServer) -> None:
    pinned = server.ask(PREFIXES, prompt=PREFIX)
    assert list(server.service.client.pinned._on_removal) == [pinned["id"]]
    delete(server, pinned["id"])
    assert server.service.client.pinned._on_removal == {}


def test_routes_can_be_switched_off() -> None:
    app = make_app(max_pinned_prefixes=0)
    for method, path in (("POST", PREFIXES), ("GET", PREFIXES), ("DELETE", PREFIXES + "/x")):
        response = ask(app, method, path, json={} if method == "POST" else None)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")
    assert PREFIXES not in ask(app, "GET", "/openapi.json").json()["paths"]


def test_client_that_goes_leaves_nothing_pinned(server: OpenAIServer) -> None:
    with occupied(server) as run_until:
        connection = post(server, PREFIXES, prompt=PREFIX)
        run_until(lambda: num_pinned(server) == 3)
        connection.close()
        server.wait_until(lambda: len(server.service.responses) == 1)
        run_until(lambda: num_pinned(server) == 0)
    assert listed(server) == []


def test_client_that_goes_at_any_moment_leaves_what_is_listed(server: OpenAIServer) -> None:
    client, answers = server.service.client, server.service.responses
    moments: list[Callable[[], bool]] = [
        lambda: True,
        lambda: len(answers) > 0,
        lambda: num_pinned(server) > len(client.state.pins),
        lambda: client.state.num_running > 0,
        lambda: len(client.state.pins) > 0,
    ]
    for index, has_come in enumerate(moments * 2):
        connection = post(server, PREFIXES, prompt=[20 + index, *[7] * 900])
        server.wait_until(lambda has_come=has_come: has_come() or len(client.state.pins) > 0)  # type: ignore[misc]
        connection.close()
        for prefix in listed(server):
            delete(server, prefix["id"])
    server.wait_until(lambda: len(server.service.responses) + len(server.service.client._streams) == 0)
    server.wait_until(lambda: len(server.service.client.state.pins) == len(server.service.client.pinned))
    num_listed = sum(prefix["num_blocks"] for prefix in listed(server))
    server.wait_until(lambda: num_pinned(server) == num_listed)


def test_end_of_the_server_unpins_what_is_under_way(server: OpenAIServer) -> None:
    with occupied(server) as run_until, post(server, PREFIXES, prompt=PREFIX) as connection:
        run_until(lambda: num_pinned(server) == 3)
        server.on_loop(lambda: server.service.responses.cancel_all(shutting_down()))
        assert connection.recv(65536).startswith(b"HTTP/1.1 503 ")
    server.wait_until(lambda: num_pinned(server) == 0)


def test_pin_that_ends_in_the_moment_in_which_its_client_goes_is_undone(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(work: Coroutine[None, None, object], scope: object, receive: object) -> object:
        await work
        assert client.state.pins != ()
        raise shutting_down()

    client = server.service.client
    with monkeypatch.context() as patch:
        patch.setattr(server.service.responses, "run", run)
        status, error = server.refusal(PREFIXES, prompt=PREFIX)
    assert (status, error["code"]) == (503, "shutting_down")
    server.wait_until(lambda: client.state.pins == ())
    assert (listed(server), num_pinned(server)) == ([], 0)


def test_log_tells_what_a_pin_has_cost(server: OpenAIServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quire.requests"):
        server.ask(PREFIXES, prompt=PREFIX)
        server.wait_until(lambda: bool(caplog.messages))
    line = json.loads(caplog.messages[0])
    told = {name: line[name] for name in ("path", "status", "model", "num_prompts", "prompt_tokens")}
    assert told == {"path": PREFIXES, "status": 200, "model": NAME, "num_prompts": 1, "prompt_tokens": 41}


def test_openapi_describes_the_routes(server: OpenAIServer) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    schema = paths[PREFIXES]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert (set(schema["properties"]), schema["required"]) == ({"model", "prompt", "cache_salt"}, ["prompt"])
    assert set(paths[PREFIXES]) == {"get", "post"}
    assert set(paths[PREFIXES + "/{prefix_id}"]) == {"delete"}


def test_other_methods_are_not_allowed(server: OpenAIServer) -> None:
    assert server.http.head(PREFIXES).status_code == 200
    for method, path in (("GET", PREFIXES + "/x"), ("DELETE", PREFIXES)):
        response = server.http.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize(("method", "path"), [("POST", PREFIXES), ("GET", PREFIXES), ("DELETE", PREFIXES + "/x")])
def test_routes_ask_for_a_key_and_for_little(method: str, path: str) -> None:
    app = make_app(api_key=("secret",), max_body_bytes=100)
    response = ask(app, method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    if method == "POST":
        headers = {"Authorization": "Bearer secret"}
        response = ask(app, method, path, headers=headers, json={"prompt": "x" * 100})
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


def test_death_of_the_engine_ends_who_waits(demo_model: Path) -> None:
    with openai_server(options(demo_model), max_n=8) as server:
        pinned = server.ask(PREFIXES, prompt=PREFIX)
        with occupied(server) as run_until, post(server, PREFIXES, prompt=PREFIX) as pinning:
            run_until(lambda: num_pinned(server) == 3 + 3)
            address = "127.0.0.1", httpx.URL(server.url).port or 0
            with socket.create_connection(address, timeout=LIMIT_S) as deleting:
                path = f"{PREFIXES}/{pinned['id']}".encode()
                deleting.sendall(b"DELETE %s HTTP/1.1\r\nHost: test\r\n\r\n" % path)
                server.wait_until(lambda: len(server.service.responses) == 3)
                server.child.process.kill()
                for connection in (pinning, deleting):
                    answer = read_one(connection)
                    assert answer.startswith(b"HTTP/1.1 503 ")
                    assert b"engine_unhealthy" in answer
        assert delete(server, pinned["id"]).status_code == 503
