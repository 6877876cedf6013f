"""Health means progress: an engine that stands still with work pending is unwell until it goes on."""

import threading
from typing import Any

import httpx

from support.server import ServerProcess, running_server, wait_until
from support.stopping import stopped

BODY = {"prompt": "def f(", "max_tokens": 400, "ignore_eos": True, "temperature": 0}

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PREFIX = {"prompt": "def f("}


def wait_for_health(server: ServerProcess, status: int) -> dict[str, Any]:
    wait_until(lambda: server.get("/health").status_code == status)
    return server.get("/health").json()  # type: ignore[no-any-return]


def test_engine_that_is_stopped_is_unwell_until_it_goes_on() -> None:
    answers: list[httpx.Response] = []
    with running_server("--stall-limit", "1") as server:
        ask = lambda: answers.append(server.post("/v1/completions", BODY))  # noqa: E731
        ask()
        asking = threading.Thread(target=ask)
        with stopped(server.engine_pid()):
            wait_for_health(server, 200)  # nothing was asked of it
            asking.start()
            error = wait_for_health(server, 503)["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_unhealthy")
            assert "stall_limit" in error["message"]
            wait_until(lambda: "made no progress for 1 seconds" in server.log)
            for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT), ("/v1/prefixes", PREFIX)):
                refused = server.post(path, body)  # at once: the engine does not come any further until we have it
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unhealthy")
                assert int(refused.headers["retry-after"]) >= 1
            assert server.get("/metrics").status_code == 200
        wait_for_health(server, 200)
        asking.join()
        first, second = (answer.json()["choices"][0]["text"] for answer in answers)
        assert first == second
        wait_until(lambda: "the engine makes progress again" in server.log)
        wait_until(lambda: server.log.count("most recent call first") >= 2)  # stacks of the server and of the engine
