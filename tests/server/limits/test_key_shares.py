"""Shares of clients over HTTP: requests of a key, priorities, weights, and the order of a fair policy."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.options import EngineOptions
from support.openai_server import LIMIT_S, OpenAIServer, openai_server

PATHS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/prefixes": {"prompt": [1, 2, 3]},
}
KEYS = ("one", "two")


def options(demo_model: Path, **settings: Any) -> EngineOptions:  # noqa: ANN401 (those of EngineOptions)
    return EngineOptions(model=str(demo_model), max_num_seqs=2, max_model_len=1024, num_kv_blocks=512, **settings)


@pytest.fixture(scope="module")
def server(demo_model: Path) -> Iterator[OpenAIServer]:
    """A fair server with two keys and an operator."""
    limits: dict[str, Any] = {"max_requests_per_key": 3, "key_weights": (2.0, 1.0), "operator_api_key": "op"}
    with openai_server(options(demo_model, scheduling_policy="fair"), api_key=KEYS, **limits) as server:
        yield server


def ask(server: OpenAIServer, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:  # noqa: ANN401
    body = {"prompt": "a", "max_tokens": 1} | body if path == "/v1/completions" else PATHS[path] | body
    return server.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})


@contextmanager
def open_requests(server: OpenAIServer, key: str, path: str = "/v1/completions", count: int = 1) -> Iterator[None]:
    """Hold requests of a key open, with the engine: none ends before we have looked. Then they are answered."""
    body, loads = PATHS[path] | {"stream": True, "max_tokens": 9, "ignore_eos": True}, server.service.admission
    headers = {"Authorization": f"Bearer {key}"}
    with ThreadPoolExecutor(count) as pool:
        with server.held():
            asked = [pool.submit(server.http.post, path, json=body, headers=headers) for _ in range(count)]
            server.wait_until(lambda: sum(loads.num_by_client.values()) == count)
            yield
        assert all(each.result().text.endswith("data: [DONE]\n\n") for each in asked)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("held_by", ["/v1/completions", "/v1/chat/completions"])
def test_requests_of_a_key_are_bounded_whatever_they_ask_for(server: OpenAIServer, path: str, held_by: str) -> None:
    loads = server.service.admission.num_by_client
    with ThreadPoolExecutor(1) as other:
        with open_requests(server, "one", held_by, count=3):
            assert loads == {"key:1": 3}
            refused = ask(server, "one", path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_limit")
            assert int(refused.headers["Retry-After"]) >= 1
            admitted = other.submit(ask, server, "two")
            server.wait_until(lambda: loads == {"key:1": 3, "key:2": 1})
        assert admitted.result().status_code == 200
    server.wait_until(lambda: len(loads) == 0)
    assert ask(server, "one", path).status_code == 200
    server.wait_until(lambda: len(loads) == 0)


def test_prompts_of_a_call_count_one_by_one(server: OpenAIServer) -> None:
    assert ask(server, "one", prompt=["a"] * 3).status_code == 200
    response = ask(server, "one", prompt=["a"] * 4)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    with open_requests(server, "one"):
        assert ask(server, "one", prompt=["a"] * 3).json()["error"]["code"] == "key_limit"
    server.wait_until(lambda: len(server.service.admission.num_by_client) == 0)


def test_calls_that_fail_give_their_places_back(server: OpenAIServer) -> None:
    for body in ({"prompt": []}, {"temperature": -1}, {"model": "other"}, {"prompt": [1] * 2000}, {"prompt": [10**9]}):
        assert ask(server, "one", **body).status_code in (400, 404)
    assert len(server.service.admission.num_by_client) == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_priority_below_0_is_the_operators(server: OpenAIServer, path: str) -> None:
    refused = ask(server, "one", path, priority=-1)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "priority", "unsupported_parameter")
    assert "operator_api_key" in error["message"]
    assert "allow_client_priority" in error["message"]
    assert [ask(server, "one", path, priority=priority).status_code for priority in (0, 100)] == [200, 200]
    assert ask(server, "op", path, priority=-100).status_code == 200


def test_server_may_grant_priorities_to_all_clients(demo_model: Path) -> None:
    with openai_server(options(demo_model), allow_client_priority=True) as server:
        assert server.ask("/v1/completions", prompt="a", max_tokens=1, priority=-100)["choices"]


def test_weights_and_clients_reach_the_engine(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[tuple[str, float]] = []
    add = server.service.client.add

    async def note(prepared: Any, **how: Any) -> Any:  # noqa: ANN401 (as `add`)
        added.append((prepared.request.client_id, prepared.request.weight))
        return await add(prepared, **how)

    monkeypatch.setattr(server.service.client, "add", note)
    for key in (*KEYS, "op"):
        assert ask(server, key, "/v1/prefixes").status_code == 200
        assert ask(server, key).status_code == 200
    clients = (("key:1", 2.0), ("key:2", 1.0), ("operator", 1.0))
    assert added == [client for client in clients for _ in range(2)]


def test_few_requests_of_one_key_do_not_wait_behind_many_of_another(demo_model: Path) -> None:
    """Ten of one key are queued first; the single one of another is the next to be admitted."""
    ended: list[str] = []

    async def complete(client: httpx.AsyncClient, key: str) -> None:
        body = {"prompt": "a", "max_tokens": 30, "ignore_eos": True}
        response = await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200
        ended.append(key)

    async def ask_all(server: OpenAIServer) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as client, asyncio.TaskGroup() as group:
            with server.held():
                for number in range(10):
                    group.create_task(complete(client, "one"))
                    await until(server, number + 1)
                group.create_task(complete(client, "two"))
                await until(server, 11)

    async def until(server: OpenAIServer, num_queued: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while server.service.client.num_queued < num_queued:
                await asyncio.sleep(0.005)

    with openai_server(options(demo_model, scheduling_policy="fair"), api_key=KEYS) as server:
        asyncio.run(ask_all(server))
    assert ended.index("two") <= 3, ended


def test_fcfs_refuses_priorities(demo_model: Path) -> None:
    with openai_server(options(demo_model, scheduling_policy="fcfs"), operator_api_key="op") as server:
        refused = ask(server, "op", priority=5)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
        assert "scheduling_policy fcfs" in refused.json()["error"]["message"]
        assert ask(server, "op", priority=0).status_code == 200


def test_share_of_the_kv_blocks_is_told_as_the_reason_of_a_wait(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = set[str | None]()
    with openai_server(options(demo_model, max_kv_share_per_key=0.05), api_key=KEYS) as server:
        set_state = server.service.client._set_state
        monkeypatch.setattr(
            server.service.client, "_set_state", lambda state: (told.add(state.waits_for), set_state(state))
        )
        long = {"prompt": [5] * 400, "max_tokens": 600, "ignore_eos": True, "stream": True}
        headers = {"Authorization": "Bearer one"}
        with ExitStack() as streams:
            with server.held():     # else the first might be over before the second is there
                for _ in range(2):
                    streams.enter_context(server.http.stream("POST", "/v1/completions", json=long, headers=headers))
                server.wait_until(lambda: server.service.client.num_queued == 2)
            server.wait_until(lambda: "kv_share" in told)
            assert ask(server, "two", prompt=[6] * 400).status_code == 200
