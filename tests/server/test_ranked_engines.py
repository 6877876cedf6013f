"""Engines of several ranks behind one server: restarted after the death of a rank, alone and as one of two engines."""

import json
import os
import signal
import time
from pathlib import Path

import httpx

from support.metrics_page import num_restarts
from support.server import ANSWER_LIMIT_S, ServerProcess, engine_pids, is_running, running_server, wait_until
from support.stopping import stopped

SIZES = "--num-kv-blocks", "512", "--max-model-len", "256"
BODY = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def token_ids(server: ServerProcess) -> list[int]:
    answer = server.post("/v1/completions", BODY)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]  # type: ignore[no-any-return]


def ranks_of(engine: int) -> list[int]:
    """Return the processes of an engine's ranks but the first, which is the engine's own."""
    return list(map(int, Path(f"/proc/{engine}/task/{engine}/children").read_text().split()))


def test_all_ranks_are_started_again_when_one_was_killed() -> None:
    with running_server("-tp", "2", "--restart-engine", "1", *SIZES, is_new=False) as server:
        expected = token_ids(server)
        engine = server.engine_pid()
        (rank,) = ranks_of(engine)
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: not is_running(engine))
        wait_until(lambda: num_restarts(server.url) == 1)
        assert server.get("/health").status_code == 200
        (again,) = ranks_of(server.engine_pid())
        assert again != rank
        assert token_ids(server) == expected
        server.stop()
        wait_until(lambda: not is_running(again))


def test_killed_rank_ends_its_engine_alone() -> None:
    with running_server("-dp", "2", "-tp", "2", *SIZES) as server:
        expected = token_ids(server)
        first, second = engine_pids(server)
        ranks = ranks_of(first) + ranks_of(second)
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        wait_until(lambda: not is_running(first))
        wait_until(lambda: "engine 0: " in server.log)      # until then the server may ask the dead one
        assert server.get("/health").status_code == 200
        assert token_ids(server) == expected
        wait_until(lambda: num_restarts(server.url) == 1)
        assert is_running(second)
        assert is_running(ranks[1])
        assert token_ids(server) == expected


def test_server_that_was_stopped_does_not_miss_its_engine() -> None:
    with running_server("-tp", "2", "--stall-limit", "10", "--num-kv-blocks", "512") as server:
        body = BODY | {"max_tokens": 1000, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=ANSWER_LIMIT_S) as response:
            events = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
            next(events)
            with stopped(server.pid):
                time.sleep(5.5)
            *_, last, done = events
        assert (json.loads(last)["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
