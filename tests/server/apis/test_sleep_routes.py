"""Sleep and wake over HTTP: memory is given back, calls are refused meanwhile, and answers have the same bits."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ConfigError
from quire.engine.options import EngineOptions
from quire.engine.processes.client import EngineClient
from quire.server.options import ServerOptions
from quire.server.start import start
from support.http_app import ask, make_app
from support.openai_server import OpenAIServer, openai_server

OPERATOR = {"Authorization": "Bearer operator"}
BODY: dict[str, Any] = {
    "prompt": "def area(", "max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True, "logprobs": 3
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(demo_model, tmp_path_factory.mktemp("model") / "demo"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[OpenAIServer]:
    engine = EngineOptions(
        model=str(folder), max_num_seqs=4, max_model_len=2048, num_kv_blocks=2048, enable_sleep_mode=True
    )
    with openai_server(engine, api_key=("client",), operator_api_key="operator") as server:
        server.http.headers["Authorization"] = "Bearer client"
        yield server


def resident_bytes(server: OpenAIServer) -> int:
    """Return the memory of the engine's process that is its own."""
    status = Path(f"/proc/{server.child.process.pid}/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def post(server: OpenAIServer, path: str, status: int = 200) -> dict[str, Any]:
    response = server.http.post(path, headers=OPERATOR)
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


def sleep_states(server: OpenAIServer) -> dict[str, float]:
    lines = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith("vllm:engine_sleep_st")]
    return {line.partition('sleep_state="')[2].partition('"')[0]: float(line.split()[-1]) for line in lines}


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_changes_no_answer(server: OpenAIServer, level: int) -> None:
    expected = server.ask("/v1/completions", **BODY)["choices"]
    server.ask("/v1/completions", prompt=[7] * 1900, max_tokens=1)
    kv_bytes = 1900 * server.service.client.ready.kv_bytes_per_token
    weights_bytes = server.service.client.ready.weights_bytes
    awake = resident_bytes(server)
    pinned = server.ask("/v1/prefixes", prompt="def ")["id"]
    assert post(server, f"/sleep?level={level}") == {"is_sleeping": True}
    freed = awake - resident_bytes(server)
    assert freed > kv_bytes + (weights_bytes if level == 2 else 0), f"{freed:,} of {awake:,}"
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    states = {"awake": 0, "weights_offloaded": level == 1, "discard_all": level == 2}
    assert sleep_states(server) == states
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/prefixes", "/tokenize"):
        status, error = server.refusal(path, **BODY)
        assert (status, error["code"]) == (503, "asleep")
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ready").json()["error"]["code"] == "asleep"
    assert "sleeps" in server.http.get("/status").json()["problem"]
    assert server.http.get("/v1/prefixes").json()["data"] == []
    assert post(server, "/wake_up") == {"is_sleeping": False}
    assert server.http.get("/ready").status_code == 200
    assert server.http.get("/status").json()["problem"] is None
    assert sleep_states(server) == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    assert server.ask("/v1/completions", **BODY)["choices"] == expected
    assert server.http.delete(f"/v1/prefixes/{pinned}").status_code == 404


def test_tags_wake_in_parts_and_level_1_may_be_deepened(server: OpenAIServer) -> None:
    expected = server.ask("/v1/completions", **BODY)["choices"]
    post(server, "/sleep")
    at_level_1 = resident_bytes(server)
    post(server, "/sleep?level=2")
    asleep = resident_bytes(server)
    assert at_level_1 - asleep > server.service.client.ready.weights_bytes / 2
    assert post(server, "/wake_up?tags=weights") == {"is_sleeping": True}
    assert resident_bytes(server) - asleep > server.service.client.ready.weights_bytes / 2
    assert server.refusal("/v1/completions", **BODY)[1]["code"] == "asleep"
    assert post(server, "/wake_up?tags=kv_cache&tags=weights") == {"is_sleeping": False}
    assert post(server, "/wake_up") == {"is_sleeping": False}
    assert server.ask("/v1/completions", **BODY)["choices"] == expected


def test_sleep_aborts_the_calls_that_run_or_waits_for_them(server: OpenAIServer) -> None:
    long = BODY | {"max_tokens": 600, "logprobs": None}
    answers, told, client = list[Any](), list[Any](), server.service.client
    for mode, status in (("wait", 200), ("abort", 503)):
        calls = [
            threading.Thread(target=lambda: answers.append(server.http.post("/v1/completions", json=long)))
            for _ in range(6)
        ]
        sleeping = threading.Thread(target=lambda mode=mode: told.append(post(server, f"/sleep?mode={mode}")))
        with server.held():     # else calls might be over before the others are there
            for call in calls:
                call.start()
            server.wait_until(lambda: client.num_open == 6)
            sleeping.start()
            server.wait_until(lambda: server.service.is_asleep)
        for thread in (sleeping, *calls):
            thread.join()
        assert told.pop() == {"is_sleeping": True}
        assert [answer.status_code for answer in answers] == [status] * 6
        if mode == "abort":
            assert {answer.json()["error"]["code"] for answer in answers} == {"asleep"}
        post(server, "/wake_up")
        answers.clear()
    server.wait_until(server.is_idle)


def test_waking_up_ends_a_sleep_that_waits(server: OpenAIServer) -> None:
    call = threading.Thread(target=lambda: server.http.post("/v1/completions", json=BODY | {"max_tokens": 200}))
    told = list[Any]()
    sleeping = threading.Thread(target=lambda: told.append(server.http.post("/sleep?mode=wait", headers=OPERATOR)))
    with server.held():
        call.start()
        server.wait_until(lambda: server.service.client.num_open == 1)
        sleeping.start()
        server.wait_until(lambda: server.service.is_asleep)
        assert post(server, "/sleep", status=409)["error"]["code"] == "sleep_running"
        assert post(server, "/wake_up") == {"is_sleeping": False}
        sleeping.join()
    assert (told[0].status_code, told[0].json()["error"]["code"]) == (409, "woken_up")
    call.join()


def test_weights_that_are_gone_leave_the_engine_asleep(server: OpenAIServer, folder: Path) -> None:
    expected = server.ask("/v1/completions", **BODY)["choices"]
    weights = folder / "model.safetensors"
    post(server, "/sleep?level=2")
    weights.rename(weights.with_suffix(".away"))
    try:
        error = post(server, "/wake_up", status=500)["error"]
        assert (error["code"], "neither model.safetensors nor" in error["message"]) == ("wake_failed", True)
        assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert server.http.get("/health").status_code == 200
    finally:
        weights.with_suffix(".away").rename(weights)
    assert post(server, "/wake_up") == {"is_sleeping": False}
    assert server.ask("/v1/completions", **BODY)["choices"] == expected


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [("/sleep?level=0", "level", "0"), ("/sleep?mode=keep", "mode", "keep"), ("/wake_up?tags=all", "tags", "all")],
)
def test_bad_values_are_refused(server: OpenAIServer, path: str, field: str, value: str) -> None:
    error = post(server, path, status=400)["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"{field} must be ")
    assert repr(value) in error["message"]
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}


def test_only_the_operator_sends_engines_to_sleep(server: OpenAIServer) -> None:
    for path in ("/sleep", "/wake_up"):
        refused = server.http.post(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_only")
        assert ask(make_app(), "POST", path).status_code == 404


def test_servers_with_keys_need_an_operators_to_sleep() -> None:
    with pytest.raises(ConfigError, match="enable_sleep_mode needs operator_api_key"):
        start(EngineOptions(enable_sleep_mode=True), ServerOptions(api_key=("client",), port=0))


def test_stalls_are_not_seen_in_an_engine_that_sleeps(server: OpenAIServer) -> None:
    post(server, "/sleep")

    async def stalled_s() -> float:
        client = server.service.client
        assert isinstance(client, EngineClient)
        client._last_progress_s = 0.0
        return client.stalled_s

    assert asyncio.run_coroutine_threadsafe(stalled_s(), server._loop).result() == 0
    post(server, "/wake_up")
