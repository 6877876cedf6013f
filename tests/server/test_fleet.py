"""`quire serve -dp 2`: what clients and operators see of two engines, and of one that dies."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from support.metrics_page import num_restarts, read_metrics
from support.server import ANSWER_LIMIT_S, ServerProcess, engine_pids, is_running, running_server, wait_until
from support.stopping import stopped

NUM_BLOCKS = 512        # memory of the machine
BODY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server of two engines, which all end with it: also the one that took the place of a dead one."""
    sizes = "--num-kv-blocks", str(NUM_BLOCKS), "--max-model-len", "1024"
    with running_server("-dp", "2", *sizes, "--enable-debug") as server:
        yield server
        pids = server.child_pids()
        assert len(engine_pids(server)) == 2
        assert server.stop() == 0
        wait_until(lambda: not any(map(is_running, pids)))


def complete(server: ServerProcess, prompt: list[int], **body: Any) -> dict[str, Any]:  # noqa: ANN401 (JSON)
    answer = server.post("/v1/completions", BODY | {"prompt": prompt} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def engine_of(server: ServerProcess, completion: dict[str, Any]) -> int:
    (explained,) = server.get(f"/v1/requests/{completion['id']}/explain").json()["prompts"]
    return int(explained["engine"])


def num_waiting(server: ServerProcess) -> float:
    samples = read_metrics(server.url)
    return samples["vllm:num_requests_waiting"] + samples['vllm:num_requests_waiting{engine="1"}']


def test_banner_says_that_sizes_are_of_each_engine(server: ServerProcess) -> None:
    assert f"{NUM_BLOCKS // 2:,} blocks of 16" in server.out
    assert "2, each with the weights, KV cache and swap above" in server.out


def test_explanation_tells_the_engine_and_that_another_one_had_the_prefix(server: ServerProcess) -> None:
    prefix = list(range(5, 69))
    first = complete(server, [*prefix, 100])
    number = engine_of(server, first)
    again = complete(server, [*prefix, 101])
    assert engine_of(server, again) == number
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prefix)
    assert engine_of(server, complete(server, list(range(200, 300)))) != number


def test_block_map_is_of_the_engine_that_is_asked_for(server: ServerProcess) -> None:
    used = complete(server, list(range(400, 500)))
    number = engine_of(server, used)
    maps = [server.get(f"/debug/kv?engine={each}").json() for each in range(2)]
    assert all(len(each["blocks"]) == NUM_BLOCKS // 2 for each in maps)
    assert server.get("/debug/kv").json()["stats"] == maps[0]["stats"]
    assert maps[number]["stats"]["cached_blocks"] >= 6
    refused = server.get("/debug/kv?engine=2")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "engine")


def test_steps_of_all_engines_are_shown_side_by_side(server: ServerProcess) -> None:
    before = server.get("/debug/top").json()["next"]
    number = engine_of(server, complete(server, list(range(600, 700))))
    shown = server.get(f"/debug/top?since={before}").json()
    assert [each["engine"] for each in shown["engines"]] == [0, 1]
    assert [bool(each["steps"]["number"]) for each in shown["engines"]] == [each == number for each in range(2)]
    assert sum(shown["engines"][number]["steps"]["tokens"]) >= 100


def test_metrics_have_a_series_for_each_engine(server: ServerProcess) -> None:
    samples = read_metrics(server.url)         # engine "0" is left out of the names
    for name in ('quire:kv_blocks{state="free"}', 'quire:kv_blocks{engine="1",state="free"}'):
        assert 0 < samples[name] <= NUM_BLOCKS / 2
    assert samples["vllm:prompt_tokens_total"] + samples['vllm:prompt_tokens_total{engine="1"}'] > 0


def test_pins_are_listed_and_unpinned_wherever_they_are(server: ServerProcess) -> None:
    pins = [server.post("/v1/prefixes", {"prompt": [number] * 40}).json()["id"] for number in range(600, 604)]
    assert [pin["id"] for pin in server.get("/v1/prefixes").json()["data"]] == pins
    samples = read_metrics(server.url)
    pinned = [samples["quire:kv_blocks_pinned"], samples['quire:kv_blocks_pinned{engine="1"}']]
    assert sum(pinned) == 4 * 3
    assert all(pinned)
    for pin in pins:
        assert httpx.delete(f"{server.url}/v1/prefixes/{pin}", timeout=ANSWER_LIMIT_S).status_code == 200
    assert server.get("/v1/prefixes").json()["data"] == []


def test_dead_engine_comes_back_and_the_others_serve_meanwhile(server: ServerProcess) -> None:
    before = engine_pids(server)
    assert len(before) == 2
    expected = complete(server, [5, 6, 7])["choices"][0]["text"]
    with ThreadPoolExecutor(8) as pool:
        with stopped(before[0]), stopped(before[1]):    # else requests might be over before one is killed
            bodies = [BODY | {"stream": True, "prompt": [each] * 30} for each in range(700, 708)]
            streams = [pool.submit(server.post, "/v1/completions", body) for body in bodies]
            wait_until(lambda: num_waiting(server) == 8)    # the engines have them, not only the server
            os.kill(before[0], signal.SIGKILL)
        texts = [stream.result().text for stream in streams]
    failed = [text for text in texts if '"engine_unhealthy"' in text]
    assert 0 < len(failed) < len(texts)
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert server.get("/health").status_code == 200
    assert complete(server, [5, 6, 7])["choices"][0]["text"] == expected
    wait_until(lambda: len(engine_pids(server)) == 2)
    wait_until(lambda: num_restarts(server.url) == 1)
    assert {engine_of(server, complete(server, [each] * 40)) for each in range(800, 806)} == {0, 1}
