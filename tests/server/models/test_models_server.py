"""Several models behind one server: real processes, and the demo model under several names."""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.core.errors import ConfigError, ModelError
from quire.engine import launcher
from quire.engine.options import EngineOptions
from quire.model.resolve import DEMO_MODEL
from quire.server.errors import ApiError
from quire.server.models.model_folder import ModelFolder
from quire.server.models.model_process import ModelProcess
from quire.server.models.models_app import ModelsApp
from quire.server.models.supervisor import Supervisor
from quire.server.options import ServerOptions
from support.forked_engines import fork_module
from support.gguf_files import convert
from support.server import ANSWER_LIMIT_S, ServerProcess, is_running, running_server, wait_until
from support.stopping import stopped_children

FLAGS = ("--num-kv-blocks", "64", "--max-num-seqs", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as one, two and owner/three, and a model that cannot be loaded."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("one", "two", "owner/three"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(DEMO_MODEL)
    (folder / "broken").mkdir()
    (folder / "broken/config.json").write_text('{"architectures": ["NoSuchModel"]}')
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with running_server("--models-dir", str(folder), *FLAGS) as server:
        yield server


def complete(server: ServerProcess, model: str | None, **fields: Any) -> httpx.Response:  # noqa: ANN401 (JSON)
    body = {"model": model, "prompt": "import os", "max_tokens": 4, "temperature": 0} | fields
    return server.post("/v1/completions", {key: value for key, value in body.items() if value is not None})


def events(stream: httpx.Response) -> Iterator[str]:
    """Yield the lines of a stream's events; a slow one has comments besides."""
    return (line for line in stream.iter_lines() if line.startswith("data: "))


def states(server: ServerProcess) -> dict[str, str]:
    return {each["id"]: each["status"]["value"] for each in server.get("/v1/models").json()["data"]}


def pid_of(server: ServerProcess) -> int:
    """The process of the only loaded model."""
    (pid,) = server.child_pids()
    return pid


def test_each_request_is_answered_by_the_model_that_it_names(server: ServerProcess) -> None:
    names = ["one", "two", "owner/three", "one:latest", "two", "one"] * 2
    with ThreadPoolExecutor(len(names)) as clients:
        answers = [each.json() for each in clients.map(lambda name: complete(server, name), names)]
    named = [each["model"].removesuffix(":latest") for each in answers]
    assert named == [name.removesuffix(":latest") for name in names]
    assert len({each["choices"][0]["text"] for each in answers}) == 1
    assert sorted(states(server).values()) == ["loaded", "unloaded", "unloaded", "unloaded"]
    assert server.get("/v1/models/owner/three").json()["id"] == "owner/three"


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", {"model": "tow"}, 404, "model_not_found"),
        ("/v1/completions", {"model": "../one"}, 404, "model_not_found"),
        ("/v1/completions", {"model": 1}, 400, None),
        ("/v1/completions", {}, 400, "model_required"),
        ("/v1/completions", {"model": "one", "prompt": "x", "max_tokens": -1}, 400, None),
        ("/v1/nothing", {"model": "one"}, 404, "unknown_url"),
        ("/v1/completions", {"model": "broken", "prompt": "x"}, 503, "model_not_loaded"),
        ("/v1/completions", {"model": "one", "prompt": "x" * (5 << 20)}, 413, "request_too_large"),
    ],
)
def test_errors_are_named(
    server: ServerProcess, path: str, body: dict[str, Any], status: int, code: str | None
) -> None:
    answer = server.post(path, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_error_of_a_load_has_its_reason_in_the_form_of_the_api(server: ServerProcess) -> None:
    answer = server.post("/v1/messages", {"model": "broken", "max_tokens": 1, "messages": []})
    assert answer.status_code == 503
    assert answer.json()["type"] == "error"
    assert "broken has no tokenizer" in answer.json()["error"]["message"]
    assert "there are broken, one, owner/three, two" in complete(server, "tow").json()["error"]["message"]


def test_looks_load_nothing_and_go_to_a_loaded_model(server: ServerProcess) -> None:
    assert complete(server, "two").status_code == 200
    assert 'model_name="two"' in server.get("/metrics").text
    assert server.get("/chat").headers["content-type"].startswith("text/html")
    answer = server.get("/metrics?model=one")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_loaded")
    assert states(server)["one"] == "unloaded"
    assert server.get("/health").json() == {}
    assert server.get("/version").json()["version"]


def test_models_are_loaded_and_unloaded_by_name(server: ServerProcess) -> None:
    assert server.post("/models/load", {"model": "one"}).json() == {"success": True}
    assert states(server)["one"] == "loaded"
    server.post("/models/unload", {"model": "one"})
    wait_until(lambda: not server.child_pids())
    assert set(states(server).values()) == {"unloaded"}


def test_open_stream_keeps_its_model_and_is_answered_before_another_is_loaded(server: ServerProcess) -> None:
    body = {"model": "one", "prompt": "import os", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(1) as client:
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=ANSWER_LIMIT_S) as stream:
            lines = events(stream)
            assert "choices" in next(lines)
            other = client.submit(complete, server, "two")
            read = [*lines]
        assert read[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in read[-2]
        assert other.result().json()["model"] == "two"


def test_killed_model_is_an_error_for_what_it_had_and_is_loaded_again(server: ServerProcess) -> None:
    assert server.post("/models/load", {"model": "one"}).status_code == 200
    body = {"model": "one", "prompt": "import os", "max_tokens": 10, "stream": True}
    pid, url = pid_of(server), server.url + "/v1/completions"
    with ThreadPoolExecutor(1) as client, stopped_children(pid):
        with httpx.stream("POST", url, json=body, timeout=ANSWER_LIMIT_S) as stream:
            whole = client.submit(complete, server, "one")
            wait_until(lambda: server.get("/load").json() == {"server_load": 2})
            os.kill(pid, signal.SIGKILL)
            (last,) = events(stream)
        answer = whole.result()
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "model_died"
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "model_died")
    assert complete(server, "one").json()["model"] == "one"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
def test_death_is_told_once_the_next_request_loads_the_model_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, is_stream: bool
) -> None:
    def wait(process: ModelProcess) -> int:
        """Notice the end late, as on a busy machine."""
        time.sleep(0.5)
        return process.process.wait()

    async def killed_and_asked_again() -> tuple[str, httpx.Response]:
        options = ServerOptions(models_dir=str(folder))
        supervisor = Supervisor(EngineOptions(num_kv_blocks=64), options)
        transport = httpx.ASGITransport(ModelsApp(supervisor, options))
        body = {"model": "one", "prompt": "import os", "raw": True, "stream": is_stream}
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=ANSWER_LIMIT_S) as client:
            try:
                async with supervisor.lend("one") as process:
                    pid = process.process.pid
                with stopped_children(pid):
                    killed = asyncio.create_task(client.post(path, json=body))
                    while not process.session.connector._acquired:
                        await asyncio.sleep(0.01)
                    os.kill(pid, signal.SIGKILL)
                    first = await killed
                return first.text, await client.post(path, json=body | {"max_tokens": 1, "stream": False})
            finally:
                await supervisor.close()

    monkeypatch.setattr(ModelProcess, "_wait", wait)
    monkeypatch.setattr(launcher, "start_module", lambda _, env: fork_module("support.forked_server", env=env))
    told, again = asyncio.run(killed_and_asked_again())
    assert "the server of model 'one' has died; the next request loads it again" in told
    assert again.status_code == 200, again.text


def test_client_that_goes_gives_up_its_place_and_its_wait(server: ServerProcess) -> None:
    body = {"model": "one", "prompt": "import os", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=ANSWER_LIMIT_S) as stream:
        assert "choices" in next(events(stream))
        with socket.create_connection(("127.0.0.1", server.port)) as waiting:
            text = json.dumps(body | {"model": "owner/three"}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(text)
            waiting.sendall(head + text)
    assert complete(server, "two").status_code == 200
    server.post("/models/unload", {"model": "two"})
    wait_until(lambda: not server.child_pids())


def test_idle_model_is_unloaded_and_keys_are_asked_for_before_a_load(folder: Path) -> None:
    with running_server("--models-dir", str(folder), "--api-key", "k", "--idle-unload", "0.05", *FLAGS) as server:
        assert complete(server, "one").status_code == 401
        assert not server.child_pids()
        headers = {"Authorization": "Bearer k"}
        body = {"model": "one", "prompt": "x", "max_tokens": 1}
        answer = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=ANSWER_LIMIT_S)
        assert answer.status_code == 200
        wait_until(lambda: not server.child_pids())
        assert server.get("/health").status_code == 200


def test_stop_answers_what_is_open_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    with running_server("--models-dir", str(folder), *FLAGS, env={"TMPDIR": str(tmp_path)}) as server:
        body = {"model": "one", "prompt": "import os", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=ANSWER_LIMIT_S) as stream:
            lines = events(stream)
            assert "choices" in next(lines)
            assert [*tmp_path.iterdir()]
            server.signal(signal.SIGTERM)
            assert [*lines][-1] == "data: [DONE]"
        assert server.wait() == 0
        assert [*tmp_path.iterdir()] == []


def test_killed_server_leaves_no_process_and_no_file(folder: Path, tmp_path: Path) -> None:
    with running_server("--models-dir", str(folder), *FLAGS, env={"TMPDIR": str(tmp_path)}) as server:
        complete(server, "one")
        pid = pid_of(server)
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        wait_until(lambda: not is_running(pid))
        wait_until(lambda: [*tmp_path.iterdir()] == [])


def test_folder_may_change_and_hub_caches_are_read(tmp_path: Path) -> None:
    models = ModelFolder(tmp_path)
    with pytest.raises(ApiError, match="there is no model 'one'"):
        models.served_name("one")
    (tmp_path / "one").symlink_to(DEMO_MODEL)
    assert models.served_name("one:latest") == "one"
    (tmp_path / ".hidden").symlink_to(DEMO_MODEL)
    (tmp_path / "text.gguf").write_text("")
    (tmp_path / "notes").mkdir()
    convert(DEMO_MODEL, tmp_path / "small-Q8_0.gguf")
    snapshot = tmp_path / "models--a--b/snapshots/c0"
    snapshot.mkdir(parents=True)
    (snapshot / "x-Q4_0.gguf").write_bytes(b"GGUF")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("c0")
    assert list(models.names()) == ["a/b:Q4_0", "one", "small-Q8_0", "text"]
    assert models.path("a/b:Q4_0") == snapshot / "x-Q4_0.gguf"
    (tmp_path / "one").unlink()
    for name in ("one", "..", "../" + tmp_path.name, ".hidden", ""):
        with pytest.raises(ModelError, match="there is no model"):
            models.path(name)


def test_settings_of_one_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="served_model_name is of one model, and models_dir has several"):
        ServerOptions(models_dir="x", served_model_name=("a",))
    with pytest.raises(ConfigError, match="is no folder"):
        ModelFolder(tmp_path / "none")
