"""Routes about the server itself."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import quire
from quire.server import lifecycle
from support.http_app import ask, make_app
from support.openai_server import OpenAIServer


def test_healthy_server_is_ready() -> None:
    app = make_app()
    for url in ("/health", "/ready"):
        response = ask(app, "GET", url)
        assert (response.status_code, response.json()) == (200, {})


def test_server_without_an_engine_is_neither() -> None:
    app = make_app()
    app.state.service.client.is_alive = False
    for url in ("/health", "/ready"):
        response = ask(app, "GET", url)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unhealthy")
        assert response.json()["error"]["message"] == "the engine process ended"
        assert int(response.headers["Retry-After"]) >= 1


def test_server_whose_engine_stands_still_is_neither_until_it_goes_on() -> None:
    app = make_app(stall_limit=2.0)
    for stalled_s, status in ((1.9, 200), (2.1, 503), (0.0, 200)):
        app.state.service.client.stalled_s = stalled_s
        assert {ask(app, "GET", url).status_code for url in ("/health", "/ready")} == {status}


def test_server_with_a_dead_task_is_neither() -> None:
    app = make_app()

    async def watch() -> None:
        raise RuntimeError("no more")

    async def die() -> "asyncio.Task[None]":
        task = asyncio.create_task(watch(), name="stall watch")
        await asyncio.wait((task,))
        lifecycle._log_end(task)
        return task

    app.state.service.critical_tasks = (asyncio.run(die()),)
    for url in ("/health", "/ready"):
        response = ask(app, "GET", url)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unhealthy")
        assert "stall watch has ended" in response.json()["error"]["message"]


def test_draining_server_is_healthy_and_not_ready() -> None:
    app = make_app()
    app.state.service.is_draining = True
    assert ask(app, "GET", "/health").status_code == 200
    response = ask(app, "GET", "/ready")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")


def test_version_is_the_packages() -> None:
    assert ask(make_app(), "GET", "/version").json() == {"version": quire.__version__}


def test_metrics_are_prometheus_text() -> None:
    app = make_app()
    app.state.service.client.num_queued = 3
    response = ask(app, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "vllm:num_requests_waiting" in response.text


def test_ping_is_health_without_a_key() -> None:
    app = make_app(api_key=("mine",))
    assert [ask(app, method, "/ping").status_code for method in ("GET", "POST", "HEAD")] == [200, 200, 200]
    app.state.service.client.is_alive = False
    assert ask(app, "GET", "/ping").status_code == 503


def test_load_counts_calls_under_way(server: OpenAIServer) -> None:
    def load() -> int:
        found: int = server.http.get("/load").json()["server_load"]
        return found

    assert load() == 0
    with server.held(), ThreadPoolExecutor() as threads:
        asked = [threads.submit(server.ask, "/v1/completions", prompt=[1, 2], max_tokens=2) for _ in range(3)]
        server.wait_until(lambda: server.service.client.num_queued == 3)
        assert load() == 3
        os.kill(server.child.process.pid, signal.SIGCONT)
        assert [each.result()["usage"]["completion_tokens"] for each in asked] == [2, 2, 2]
    assert load() == 0
