"""Profiles of the engines over HTTP: for the operator, in files that speedscope reads; they change no answer."""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.options import EngineOptions
from quire.engine.processes import profiler
from quire.engine.processes.profiler import Profiler
from quire.server.apis.profile_routes import speedscope
from support.http_app import ask, make_app
from support.openai_server import OpenAIServer, openai_server

OPERATOR = {"Authorization": "Bearer operator"}
BODY: dict[str, Any] = {"prompt": "def area(", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles") / "new"


@pytest.fixture(scope="module")
def server(demo_model: Path, folder: Path) -> Iterator[OpenAIServer]:
    engine = EngineOptions(model=str(demo_model), max_num_seqs=4, max_model_len=512, num_kv_blocks=64)
    options = {"api_key": ("client",), "operator_api_key": "operator", "profile_dir": str(folder)}
    with openai_server(engine, **options) as server:
        server.http.headers["Authorization"] = "Bearer client"
        yield server


def check_speedscope(content: dict[str, Any]) -> None:
    """Check what the schema of the file format asks for."""
    assert content["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = content["shared"]["frames"]
    assert all(frame["name"] for frame in frames)
    for each in content["profiles"]:
        assert (each["type"], each["unit"], each["startValue"]) == ("sampled", "seconds", 0)
        assert len(each["samples"]) == len(each["weights"]) > 0
        assert all(0 <= frame < len(frames) for sample in each["samples"] for frame in sample)
        assert each["endValue"] == pytest.approx(sum(each["weights"]))


def test_profile_has_the_ops_and_the_stacks_and_changes_no_answer(server: OpenAIServer, folder: Path) -> None:
    expected = server.ask("/v1/completions", **BODY)["choices"]
    assert server.http.post("/start_profile", headers=OPERATOR).json() == {"status": "started", "engines": 1}
    assert server.http.post("/start_profile", headers=OPERATOR).json()["error"]["code"] == "profile_running"
    assert server.ask("/v1/completions", **BODY | {"cache_salt": "a"})["choices"] == expected
    stopped = server.http.post("/stop_profile", headers=OPERATOR)
    assert server.http.post("/stop_profile", headers=OPERATOR).json()["error"]["code"] == "no_profile"
    assert server.ask("/v1/completions", **BODY)["choices"] == expected
    (told,) = stopped.json()["engines"]
    whole, scope = (json.loads(Path(file).read_text()) for file in told["files"])
    assert {Path(file).parent for file in told["files"]} == {folder}
    assert {os.stat(file).st_mode & 0o777 for file in told["files"]} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    seconds = {op["name"]: op["seconds"] for op in whole["ops"]}
    assert seconds["layers.0.qkv"] > 0
    assert 0 < sum(seconds.values()) < whole["seconds"] == told["seconds"]
    assert sum(told["kinds"].values()) == pytest.approx(sum(op["seconds"] for op in whole["ops"]))
    assert {"LinearOp", "AttentionOp"} <= told["kinds"].keys()
    assert told["ops"][0]["seconds"] == max(op["seconds"] for op in whole["ops"])
    check_speedscope(scope)
    assert scope["profiles"][-1]["name"] == "ops of the layers"
    assert not any(text in json.dumps(whole) for text in (BODY["prompt"], expected[0]["text"]))


@pytest.mark.parametrize("route", ["/start_profile", "/stop_profile"])
def test_only_the_operator_takes_profiles(server: OpenAIServer, route: str) -> None:
    refused = server.http.post(route)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_only")
    assert ask(make_app(), "POST", route).status_code == 404


def test_stacks_of_a_thread_are_seen_for_as_long_as_it_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "INTERVAL_S", 0.001)
    is_over = threading.Event()

    def waits_here() -> None:
        is_over.wait()

    waiting = threading.Thread(target=waits_here, name="one that waits")
    waiting.start()
    while not is_over._cond._waiters:  # type: ignore[attr-defined]
        time.sleep(0)
    taken = Profiler()
    while not any(thread == waiting.name for thread in taken._threads):
        time.sleep(0)
    profile = taken.stop()
    is_over.set()
    waiting.join()
    *_, (stack, seconds) = profile.threads["one that waits"]    # after one of just before it waits, if any
    names = [profile.frames[frame][0].rpartition(".")[2] for frame in profile.stacks[stack]]
    assert "waits_here" in names
    assert names.index("run") < names.index("waits_here") < names.index("wait")
    assert 0 < seconds <= profile.seconds
    assert profile.ops == []
    assert "profiler" not in profile.threads
    check_speedscope(speedscope("x", profile))


def test_profile_that_cannot_be_written_is_told(server: OpenAIServer, folder: Path) -> None:
    server.http.post("/start_profile", headers=OPERATOR)
    folder.mkdir(exist_ok=True)     # a test that runs alone is the first to use it
    folder.rename(folder.with_name("moved"))
    folder.write_text("a file")
    try:
        failed = server.http.post("/stop_profile", headers=OPERATOR)
    finally:
        folder.unlink()
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "profile_failed")
    assert failed.json()["error"]["message"] == "the profile cannot be written: File exists"
