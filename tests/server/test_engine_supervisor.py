"""Restarts of a dead engine: as many as were granted; its requests end with an error."""

import asyncio
import json
import os
import signal
from typing import Any

import httpx

from quire.core.errors import ConfigError
from quire.engine.launcher import EngineProcess
from quire.engine.messages import EngineDeadError
from quire.engine.metrics.page import Metrics
from quire.engine.options import EngineOptions
from quire.server.lifecycle import supervise_engine
from quire.server.options import ServerOptions
from support.held_starts import EACH_BUT_THE_FIRST, held_engine
from support.metrics_page import read_metrics
from support.server import ANSWER_LIMIT_S, ServerProcess, is_running, running_server, wait_until
from support.stopping import stopped

SMALL = ("--num-kv-blocks", "512")
BODY = {"prompt": "def area(", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def counters(url: str) -> dict[str, float]:
    samples = read_metrics(url)
    return {name: value for name, value in samples.items() if "_total" in name and not name.startswith("process")}


def text_of(server: ServerProcess) -> str:
    answer = server.post("/v1/completions", BODY)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def health(server: ServerProcess) -> int:
    return server.get("/health").status_code


def lose_engine_under_a_stream(server: ServerProcess, number: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return what the stream said."""
    url, body, pid = f"{server.url}/v1/completions", BODY | {"stream": True}, server.engine_pid()
    with stopped(pid), httpx.stream("POST", url, json=body, timeout=ANSWER_LIMIT_S) as response:
        os.kill(pid, number)    # it has not come any further, and SIGSTOP changes nothing
        return [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]


def test_new_engine_takes_the_place_of_a_dead_one_as_often_as_granted() -> None:
    with running_server(*SMALL, "--restart-engine", "1", "--stall-limit", "20", entry=EACH_BUT_THE_FIRST) as server:
        expected = text_of(server)
        pinned = server.post("/v1/prefixes", {"prompt": [5] * 40}).json()
        before, first_pid = counters(server.url), server.engine_pid()

        *_, error, done = lose_engine_under_a_stream(server)
        assert (json.loads(error)["error"]["code"], done) == ("engine_unhealthy", "[DONE]")
        held = held_engine(server)      # until we have looked, it does not come any further
        assert health(server) == 503
        refused = server.post("/v1/completions", BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unhealthy")
        amid = counters(server.url)

        os.kill(held, signal.SIGCONT)
        wait_until(lambda: health(server) == 200)
        assert server.engine_pid() != first_pid
        assert text_of(server) == expected
        after = counters(server.url)
        assert all(before[name] <= amid[name] <= after[name] for name in before)
        restarts, failures = "quire:engine_restarts_total", 'quire:requests_failed_total{reason="engine_unhealthy"}'
        assert (before[restarts], amid[restarts], after[restarts]) == (0, 0, 1)
        assert (before[failures], amid[failures]) == (0, 2)
        name = "vllm:prefix_cache_queries_total"
        assert before[name] < after[name]
        assert server.get("/v1/prefixes").json()["data"] == []
        gone = httpx.delete(f"{server.url}/v1/prefixes/{pinned['id']}", timeout=ANSWER_LIMIT_S)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "prefix_not_found")
        wait_until(lambda: "cached and pinned prefixes are lost" in server.log)

        pids = server.child_pids()
        *_, error, done = lose_engine_under_a_stream(server, signal.SIGSTOP)    # ended like a dead one
        assert (json.loads(error)["error"]["code"], done) == ("engine_unhealthy", "[DONE]")
        assert "made no progress for 20 s (stall_limit)" in error
        assert server.wait() == 1
        wait_until(lambda: not any(map(is_running, pids)))


def test_server_that_waits_for_an_engine_can_be_stopped() -> None:
    with running_server(*SMALL, "--restart-engine", "1", entry=EACH_BUT_THE_FIRST) as server:
        pids = {server.engine_pid(), *server.child_pids()}
        os.kill(server.engine_pid(), signal.SIGKILL)
        pids.add(held_engine(server))
        assert server.stop() == 1
        wait_until(lambda: not any(map(is_running, pids)))


class Dead:
    """A client whose engine has died."""

    request_ids = iter(range(10))

    @property
    def engines(self) -> tuple["Dead"]:
        return (self,)

    async def wait_dead(self) -> EngineDeadError:
        return EngineDeadError("it was killed")


def test_pauses_grow_and_the_last_reason_is_told() -> None:
    class Service:
        client, options, metrics = Dead(), ServerOptions(restart_engine=9), Metrics("tiny")

    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    def spawn(_: EngineOptions) -> EngineProcess:
        raise ConfigError(f"no memory {len(pauses)}")

    service: Any = Service()
    why = asyncio.run(supervise_engine(service, EngineOptions(), service, pause=pause, spawn=spawn))
    assert str(why) == "no memory 9"
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
