"""Rooms: packages that other packages import by one door, and without which generating and serving go on."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import structure
from quire import LLM, BeamSearchParams
from quire.core.errors import ConfigError, InvalidRequestError, ModelError
from quire.engine import assembly, devices
from quire.engine.options import EngineOptions
from quire.execution.device import HostDevice
from support.gguf_files import convert
from support.quantized_folder import awq, awq_config, write_pair
from support.random_model import write_random_model
from support.server import running_server

ROOMS = structure.rooms()
ABOVE = ("quire.cli", "quire.cluster", "quire.sim", "quire.paper")  # nothing rests on these
# These and ABOVE put together what is there.
ASSEMBLIES = (
    "quire.engine.assembly", "quire.engine.devices", "quire.engine.formats", "quire.engine.schedulers", "quire.llm",
    "quire.model.architectures", "quire.server.app", "quire.server.ops.lifecycle", "quire.server.template_worker",
)  # fmt: skip

# Module sitecustomize: every process that a test starts refuses to import the rooms that the environment names.
BLOCK = """
import os, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith(tuple(f"{room}." for room in os.environ["ABSENT_ROOMS"].split())):
            raise ModuleNotFoundError(f"{name} is absent", name=name)
sys.meta_path.insert(0, Absent())
"""
# Loads what is slow and what imports no room once; then a fork for each room that is absent generates some tokens, and
# prints them. That the room is absent is real: it cannot be imported.
GENERATE = """
import importlib, json, os, sys
import fastapi, pydantic.v1, rich.progress, torch, typer
rooms, free = json.load(sys.stdin)
for module in free:
    importlib.import_module(module)
for room, door in rooms.items():
    assert not [name for name in sys.modules if f"{name}.".startswith(f"{room}.")], room
    child = os.fork()
    if child == 0:
        os.environ["ABSENT_ROOMS"] = room
        from quire import LLM, SamplingParams
        with LLM(sys.argv[1], max_model_len=64) as llm:
            (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
        import quire.server.app
        from quire.cli.main import make_app
        make_app()
        try:
            importlib.import_module(door)
        except ModuleNotFoundError as error:
            assert str(error) == f"{room} is absent", error
            print(room, *output.outputs[0].token_ids, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""

# The same, but each child loads a model that needs the room, and prints the error.
REFUSE = """
import os, sys
import torch
for room, path in zip(sys.argv[1::2], sys.argv[2::2]):
    child = os.fork()
    if child == 0:
        os.environ["ABSENT_ROOMS"] = room
        from quire import LLM
        from quire.core.errors import ModelError
        try:
            LLM(path)
        except ModelError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the environment of processes that lack the rooms in ABSENT_ROOMS."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    path = os.pathsep.join([str(tmp_path), str(structure.SOURCES.parent)])
    return {"PYTHONPATH": path, "ABSENT_ROOMS": ""}


@pytest.fixture(scope="module")
def import_graph() -> Mapping[str, set[str]]:
    """Return the modules that each module imports."""
    return structure.import_graph()


def modules_without_rooms(import_graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules that import no room, nor a module that does: without a room they are as with it."""
    touched = {module for module in import_graph if is_in(module, *ROOMS)}
    while more := {module for module, imported in import_graph.items() if imported & touched} - touched:
        touched |= more
    return sorted(import_graph.keys() - touched)


def test_engine_generates_without_any_one_room(
    demo_model: Path, environment: dict[str, str], import_graph: Mapping[str, set[str]]
) -> None:
    command = [sys.executable, "-c", GENERATE, str(demo_model)]
    run = subprocess.run(
        command, env=os.environ | environment, input=json.dumps([ROOMS, modules_without_rooms(import_graph)]),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    lines = [line.split() for line in run.stdout.splitlines()]
    assert [room for room, *_ in lines] == list(ROOMS), run.stderr
    assert len({tuple(token_ids) for _, *token_ids in lines}) == 1


def test_model_that_needs_an_absent_room_is_refused_by_name(environment: dict[str, str], tmp_path: Path) -> None:
    for name in ("floats", "pair"):
        (tmp_path / name).mkdir()
    file = convert(write_random_model(tmp_path / "floats"), tmp_path / "model.gguf")
    folder = write_pair(tmp_path / "pair", awq(32), awq_config(32)).folder
    words = shutil.copytree(tmp_path / "floats", tmp_path / "words")
    (words / "tokenizer.json").unlink(missing_ok=True)
    (words / "tokenizer.model").touch()
    base = shutil.copytree(tmp_path / "floats", tmp_path / "base")
    config = (base / "config.json").read_text()
    (base / "config.json").write_text(config.replace("ForCausalLM", "Model"))
    needs = {
        "quire.formats.gguf": (file, f"{file}: a GGUF file"),
        "quire.formats.gguf_architectures": (file, f"{file}: a GGUF file"),
        "quire.formats.gguf_tensors": (file, f"{file}: reading tensors of a GGUF file"),
        "quire.formats.gguf_tokenizer": (file, f"{file}: reading the tokenizer of a GGUF file"),
        "quire.formats.quantized": (folder, f"{folder}: quantized weights"),
        "quire.formats.quantized_tensors": (folder, f"{folder}: reading awq weights"),
        "quire.formats.sentence_transformers": (base, f"{base}: pooling"),
        "quire.text.tokenizer_formats": (words, f"{words}: the tokenizer in tokenizer.model"),
    }
    assert set(needs) == {room for room in ROOMS if room.startswith(("quire.formats.", "quire.text."))}
    command = [sys.executable, "-c", REFUSE, *(str(word) for room, (path, _) in needs.items() for word in (room, path))]
    run = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    expected = [
        f"{words} needs the package {room}, which is not in this installation" for room, (_, words) in needs.items()
    ]
    assert run.stdout.splitlines() == expected, run.stderr


@pytest.mark.parametrize(
    ("room", "settings"),
    [
        ("quire.engine.adapters", {"enable_lora": True}),
        ("quire.engine.draft_model", {"speculative_config": {"method": "draft_model", "model": "."}}),
        ("quire.engine.nodes", {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1"}),
        ("quire.engine.offline_fleet", {"data_parallel_size": 2}),
        ("quire.engine.parallel", {"tensor_parallel_size": 2}),
        ("quire.engine.transformers_model", {"model_impl": "transformers"}),
        ("quire.model.dummy_weights", {"load_format": "dummy"}),
        ("quire.scheduling.client_shares", {"scheduling_policy": "fair"}),
        ("quire.scheduling.client_shares", {"max_kv_share_per_key": 0.5}),
        ("quire.kernels.cuda", {"attention_backend": "cuda"}),
        ("quire.kernels.flashinfer", {"attention_backend": "flashinfer"}),
        ("quire.execution.drafting", {"speculative_config": {"method": "ngram"}}),
    ],
)
def test_setting_that_needs_an_absent_room_is_refused_by_name(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, room: str, settings: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, ROOMS[room], None)
    with pytest.raises(ConfigError, match=f"needs the package {room}, which is not in this installation"):
        LLM(demo_model, num_kv_blocks=64, max_model_len=64, **settings)


def test_replicas_that_need_the_absent_prefix_cache_are_refused_by_its_name(
    demo_model: Path, environment: dict[str, str]
) -> None:
    """A router has a tree of its own, from the room of the prefix cache."""
    command = [sys.executable, "-c", "from quire.cli.main import main; main()", "simulate", str(demo_model)]
    run = subprocess.run(
        [*command, "--hardware", "H100", "--replicas", "2"], capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | environment | {"ABSENT_ROOMS": "quire.cache.prefix_cache"},
    )  # fmt: skip
    assert "--replicas needs the package quire.cache.prefix_cache, which is not in" in " ".join(run.stderr.split())


def test_gpu_without_its_room_is_refused_by_name_and_auto_is_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_what_cuda_lacks", lambda: None)
    monkeypatch.setitem(sys.modules, ROOMS["quire.execution.cuda"], None)
    with pytest.raises(ConfigError, match=r"device cuda needs the package quire\.execution\.cuda, which is not"):
        devices.open_device(EngineOptions(device="cuda"))
    assert isinstance(devices.open_device(EngineOptions(device="auto")), HostDevice)


@pytest.mark.parametrize(("room", "num_nodes"), [("quire.engine.gpu_ranks", 1), ("quire.engine.gpu_nodes", 2)])
def test_ranks_on_gpus_that_need_an_absent_room_are_refused_by_name(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, room: str, num_nodes: int
) -> None:
    monkeypatch.setattr(assembly, "uses_gpu", lambda options: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setitem(sys.modules, ROOMS[room], None)
    with pytest.raises(ConfigError, match=f"on device cuda needs the package {room}, which is not"):
        LLM(demo_model, tensor_parallel_size=2, nnodes=num_nodes)


def test_beam_search_that_needs_an_absent_room_is_refused_by_name(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, ROOMS["quire.scheduling.beam_search"], None)
    with LLM(demo_model, num_kv_blocks=64, max_model_len=64) as llm:
        with pytest.raises(InvalidRequestError, match=r"needs the package quire\.scheduling\.beam_search"):
            llm.beam_search([[5, 6, 7]], BeamSearchParams(beam_width=2, max_tokens=4), use_tqdm=False)
        assert llm.generate([[5, 6, 7]], use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("room", "architecture"),
    [("quire.model.encoders", "BertModel"), ("quire.model.families", "GPT2LMHeadModel")],
)
def test_architecture_that_needs_an_absent_room_is_refused_by_name(
    environment: dict[str, str], room: str, architecture: str
) -> None:
    config = f"from quire.model import config; config.spec_from_config({{'architectures': ['{architecture}']}})"
    environment["ABSENT_ROOMS"] = room
    run = subprocess.run(
        [sys.executable, "-c", config], env=os.environ | environment, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert f"unknown architecture '{architecture}'" in run.stderr
    assert f"others need the package {room}, which is not in this installation" in run.stderr


def test_prefixes_are_not_cached_without_the_room(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, ROOMS["quire.cache.prefix_cache"], None)
    with LLM(demo_model, num_kv_blocks=64, max_model_len=64, block_size=8) as llm:
        assert "prefixes are not cached: the package quire.cache.prefix_cache is not in" in caplog.text
        for _ in range(2):
            llm.generate([list(range(5, 30))], use_tqdm=False)
        stats = llm.kv_stats()
        assert (stats.cached_blocks, stats.prefix_queries_tokens) == (0, 0)
        with pytest.raises(InvalidRequestError, match="nothing can be pinned: prefix caching is off"):
            llm.pin_prefix(list(range(5, 30)))


def test_vectors_that_need_an_absent_room_are_refused_by_name(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, ROOMS["quire.engine.pooling"], None)
    with (
        LLM(demo_model, num_kv_blocks=64, max_model_len=64) as llm,
        pytest.raises(ModelError, match=r"needs the package quire\.engine\.pooling"),
    ):
        llm.embed([[5, 6, 7]])


def test_metrics_that_need_an_absent_room_are_refused_by_name(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.llm.Metrics", None)
    with LLM(demo_model, num_kv_blocks=64, max_model_len=64) as llm:
        llm.generate([[5, 6, 7]], use_tqdm=False)
        with pytest.raises(ModelError, match=r"needs the package quire\.engine\.metrics"):
            llm.get_metrics()


def test_server_answers_without_all_rooms(demo_model: Path, environment: dict[str, str]) -> None:
    """Completions, streams and chats are served; tools are refused, and the other routes of rooms answer 404."""
    environment["ABSENT_ROOMS"] = " ".join(ROOMS)
    with running_server(str(demo_model), "--enable-debug", env=environment, is_new=True) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        completion = server.post("/v1/completions", body).json()
        assert completion["usage"]["completion_tokens"] == 8
        assert server.post("/v1/completions", body | {"stream": True}).text.endswith("data: [DONE]\n\n")
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        assert server.post("/v1/chat/completions", chat).status_code == 200
        tool = {"type": "function", "function": {"name": "f"}}
        refused = server.post("/v1/chat/completions", chat | {"tools": [tool]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_parameter")
        assert server.post("/v1/embeddings", {"input": "a"}).status_code == 404
        for path in (f"/v1/requests/{completion['id']}/explain", "/debug/kv", "/debug/blocks", "/metrics"):
            assert server.get(path).status_code == 404, path
        assert server.post("/v1/messages", chat).status_code == 404


def test_server_without_the_writer_of_grammars_refuses_them_by_name(
    demo_model: Path, environment: dict[str, str]
) -> None:
    environment["ABSENT_ROOMS"] = "quire.grammar_writing"
    with running_server(str(demo_model), env=environment, is_new=True) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 8}
        refused = server.post("/v1/completions", body | {"structured_outputs": {"choice": ["a", "b"]}})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_parameter")
        assert server.post("/v1/completions", body).status_code == 200


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_entered_by_its_door_alone(room: str, import_graph: Mapping[str, set[str]]) -> None:
    for module, imported in import_graph.items():
        if is_in(module, *ROOMS) or is_in(module, *ABOVE):
            continue
        entered = {name for name in imported if is_in(name, room)}
        assert entered <= {ROOMS[room]}, f"{module} imports {entered}"
        assert not entered or module in ASSEMBLIES, f"{module} imports {entered}"


def is_in(module: str, *packages: str) -> bool:
    """Return whether a module is one of the packages or lies in one."""
    return f"{module}.".startswith(tuple(f"{package}." for package in packages))
