"""Rooms: packages that other packages import by one door, and without which generating and serving go on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.server import running_server
from support.tools import load_tool

structure = load_tool("structure")
ROOMS = structure.rooms()
ABOVE = ("quire.cli", "quire.sim", "quire.paper")  # nothing rests on these
ASSEMBLIES = ("quire.engine.assembly", "quire.server.app")  # these and ABOVE put together what is there

# Module sitecustomize: every process that a test starts refuses to import the rooms that the environment names.
BLOCK = """
import os, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith(tuple(f"{room}." for room in os.environ["ABSENT_ROOMS"].split())):
            raise ModuleNotFoundError(f"{name} is absent", name=name)
sys.meta_path.insert(0, Absent())
"""
# Loads what is slow once; then a fork for each room that is absent generates some tokens, and prints them.
GENERATE = """
import os, sys
import fastapi, torch
for room in os.environ["ROOMS"].split():
    child = os.fork()
    if child == 0:
        os.environ["ABSENT_ROOMS"] = room
        from quire import LLM, SamplingParams
        with LLM(sys.argv[1], max_model_len=64) as llm:
            (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
        import quire.server.app
        print(room, *output.outputs[0].token_ids, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the environment of processes that lack the rooms in ABSENT_ROOMS."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    path = os.pathsep.join([str(tmp_path), str(structure.SOURCES.parent)])
    return {"PYTHONPATH": path, "ABSENT_ROOMS": "", "ROOMS": " ".join(ROOMS)}


def test_engine_generates_without_any_one_room(demo_model: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", GENERATE, str(demo_model)]
    run = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    lines = [line.split() for line in run.stdout.splitlines()]
    assert [room for room, *_ in lines] == list(ROOMS), run.stderr
    assert len({tuple(token_ids) for _, *token_ids in lines}) == 1


def test_server_answers_without_all_rooms(demo_model: Path, environment: dict[str, str]) -> None:
    """Completions, streams and chats are served; tools are refused, and the routes of the inspection answer 404."""
    environment["ABSENT_ROOMS"] = " ".join(ROOMS)
    with running_server(str(demo_model), "--enable-debug", env=environment) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        completion = server.post("/v1/completions", body).json()
        assert completion["usage"]["completion_tokens"] == 8
        assert server.post("/v1/completions", body | {"stream": True}).text.endswith("data: [DONE]\n\n")
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        assert server.post("/v1/chat/completions", chat).status_code == 200
        tool = {"type": "function", "function": {"name": "f"}}
        refused = server.post("/v1/chat/completions", chat | {"tools": [tool]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_parameter")
        for path in (f"/v1/requests/{completion['id']}/explain", "/debug/kv", "/debug/blocks"):
            assert server.get(path).status_code == 404, path


@pytest.mark.parametrize("room", ROOMS)
def test_absent_room_cannot_be_imported(environment: dict[str, str], room: str) -> None:
    """Absence as the tests above make it is real."""
    command = [sys.executable, "-c", f"import {ROOMS[room]}"]
    environment["ABSENT_ROOMS"] = room
    run = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert f"{room} is absent" in run.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_entered_by_its_door_alone(room: str) -> None:
    for module, imported in structure.import_graph().items():
        if is_in(module, *ROOMS) or is_in(module, *ABOVE):
            continue
        entered = {name for name in imported if is_in(name, room)}
        assert entered <= {ROOMS[room]}, f"{module} imports {entered}"
        assert not entered or module in ASSEMBLIES, f"{module} imports {entered}"


def is_in(module: str, *packages: str) -> bool:
    """Return whether a module is one of the packages or lies in one."""
    return f"{module}.".startswith(tuple(f"{package}." for package in packages))
