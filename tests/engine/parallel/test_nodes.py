"""Two nodes on one machine: answers with the bits of one process, refusals, and clean ends."""

import os
import signal
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.core.errors import ConfigError, InvalidRequestError, RankLostError
from quire.core.version import __version__
from quire.engine.parallel.link import RankedModel
from quire.extension.isas import usable_isas
from quire.model.sharding import ADDED_BYTES
from support.faults import raising
from support.metrics_page import num_restarts
from support.nodes import NodeCommand, as_flags, free_port, running_node
from support.peft_folders import write_adapter
from support.random_model import write_random_model
from support.rank_answers import GREEDY, PROMPTS, SAMPLED, answers
from support.server import running_server, wait_until

pytestmark = [
    pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built"),
    pytest.mark.usefixtures("forked_processes"),
]

SETTINGS: dict[str, Any] = {"num_kv_blocks": 24, "max_model_len": 96, "max_num_batched_tokens": 33}


@contextmanager
def two_nodes(
    model: Path, address: str = "127.0.0.2", *, cwd: Path | None = None, **settings: Any  # noqa: ANN401
) -> Iterator[tuple[LLM, NodeCommand]]:
    settings = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": address} | settings
    settings["master_port"] = free_port(address)
    flags = *as_flags(settings), "--node-rank", "1"
    with running_node(str(model), *flags, cwd=cwd, is_forked=True) as command, LLM(model, **settings) as llm:
        yield llm, command


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [pytest.param("folder", 2, marks=pytest.mark.matrix), ("folder", 4), ("hybrid", 2), ("parallel_hybrid", 2)],
)
def test_answers_have_the_bits_of_one_process(name: str, num_ranks: int, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    with LLM(folder, **SETTINGS) as llm:
        expected = [answers(llm.generate(PROMPTS, params, use_tqdm=False)) for params in (SAMPLED, GREEDY)]
    with two_nodes(folder, **SETTINGS, tensor_parallel_size=num_ranks) as (llm, command):
        found = [answers(llm.generate(PROMPTS, params, use_tqdm=False)) for params in (SAMPLED, GREEDY)]
        assert len(command.pids()) == 1 + num_ranks // 2
        llm.close()
        status, output = command.wait()
        assert not command.pids()
    assert found == expected
    assert (status, output.splitlines()[-1]) == (1, "quire: rank 0 was closed")


@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": "bfloat16", "quantization": "int8"}, pytest.param({"dtype": "float16"}, marks=pytest.mark.matrix)],
    ids=str,
)
def test_experts_have_the_bits_of_one_process(mixture: Path, settings: dict[str, Any]) -> None:
    with LLM(mixture, **SETTINGS, **settings) as llm:
        expected = [answers(llm.generate(PROMPTS, params, use_tqdm=False)) for params in (SAMPLED, GREEDY)]
    with two_nodes(mixture, **SETTINGS, **settings) as (llm, _):
        assert [answers(llm.generate(PROMPTS, params, use_tqdm=False)) for params in (SAMPLED, GREEDY)] == expected


@pytest.mark.parametrize("mode", ["gather", "reduce"])
def test_adapters_have_the_bits_of_one_machine(mode: str, folder: Path, tmp_path: Path) -> None:
    """With `gather` those of one process."""
    settings: dict[str, Any] = {"num_kv_blocks": 64, "enable_lora": True, "max_loras": 2}  # one is evicted, read again
    settings |= {"tensor_parallel_mode": mode}
    written = [write_adapter(tmp_path / f"{seed}", folder, seed, rank=seed + 1) for seed in (1, 2, 3)]
    adapters = [LoRARequest(each.name, number, str(each)) for number, each in enumerate(written, start=1)]

    def run(llm: LLM) -> list[object]:
        mixed = [[*adapters[:2], None], [*adapters[1:], None], [*adapters[:2], None]]
        return [answers(llm.generate(PROMPTS, GREEDY, lora_request=each, use_tqdm=False)) for each in mixed]

    with LLM(folder, tensor_parallel_size=1 if mode == "gather" else 2, **settings) as llm:
        expected = run(llm)
    with two_nodes(folder, **settings) as (llm, _):
        assert run(llm) == expected


def test_adapter_that_a_node_lacks_or_has_otherwise_fails_its_own_load_alone(folder: Path, tmp_path: Path) -> None:
    """Each node reads the folder of its own disk: here of its process, by a path below /proc/self."""
    nodes = [tmp_path / "0", tmp_path / "1"]
    for each in nodes:
        each.mkdir()
    adapter = LoRARequest("a", 1, "/proc/self/cwd/a")
    write_adapter(nodes[0] / "a", folder, seed=1)
    with two_nodes(folder, cwd=nodes[1], num_kv_blocks=64, enable_lora=True) as (llm, _), chdir(nodes[0]):
        alone = answers(llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False))
        others = llm.stream(PROMPTS[:1], GREEDY)
        next(others)
        with pytest.raises(InvalidRequestError, match=r"rank 1 \(127.0.0.1\): /proc/self/cwd/a.*adapter_config.json"):
            llm.generate(PROMPTS[:1], GREEDY, lora_request=adapter, use_tqdm=False)
        write_adapter(nodes[1] / "a", folder, seed=2)
        with pytest.raises(InvalidRequestError, match=r"rank 1 .*/proc/self/cwd/a: the files differ from those"):
            llm.generate(PROMPTS[:1], GREEDY, lora_request=adapter, use_tqdm=False)
        write_adapter(nodes[1] / "a", folder, seed=1)
        assert answers(llm.generate(PROMPTS[:1], GREEDY, lora_request=adapter, use_tqdm=False)) != alone
        assert answers(list(others)[-1:]) == alone


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("folder", 4), ("mixture", 2), ("normed_hybrid", 2), pytest.param("folder", 2, marks=pytest.mark.matrix)],
)
def test_partial_sums_have_the_bits_of_one_machine(
    name: str, num_ranks: int, request: pytest.FixtureRequest
) -> None:
    """In steps of a few tokens, whose sums every rank adds, and of many, of which each adds a part."""
    model = request.getfixturevalue(name)
    settings = {"num_kv_blocks": 96, "tensor_parallel_mode": "reduce", "tensor_parallel_size": num_ranks}
    prompts = PROMPTS + [[token + 1 for token in prompt] for prompt in PROMPTS]
    assert 4 * 72 * sum(map(len, prompts)) > ADDED_BYTES  # dimensions as in the folder, in one step
    with LLM(model, **settings) as llm:
        expected = answers(llm.generate(prompts, SAMPLED, use_tqdm=False))
    with two_nodes(model, **settings) as (llm, _):
        assert answers(llm.generate(prompts, SAMPLED, use_tqdm=False)) == expected


def test_a_step_that_fails_on_a_rank_fails_alone_and_a_killed_rank_ends_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_nodes(folder, num_kv_blocks=64) as (llm, command):
        expected = answers(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        model = llm._engine.model
        assert isinstance(model, RankedModel)
        with monkeypatch.context() as patch:
            patch.setattr(model.own, "forward", raising(ArithmeticError))  # while the other rank waits
            with pytest.raises(ArithmeticError):
                llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
        assert answers(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
        with monkeypatch.context() as patch:
            patch.setattr(model._link, "send", lambda kind, rows=None: type(model._link).send(model._link, 7))
            with pytest.raises(RuntimeError, match="a step has failed on rank 1: AssertionError: command 7"):
                llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
        assert answers(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
        outputs = llm.stream(PROMPTS[:1], SamplingParams(max_tokens=1000, ignore_eos=True))
        next(outputs)
        _, member = command.pids()
        os.kill(member, signal.SIGKILL)
        with pytest.raises(RankLostError, match=r"rank 1 \(127.0.0.1\) has ended"):
            for _ in outputs:
                pass
        status, output = command.wait()
        assert (status, output.splitlines()[-1]) == (1, "quire: the process of rank 1 has ended")
        assert not command.pids()


def test_rank_that_is_stopped_ends_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.parallel.rank_set.SILENCE_SHARE", 0.8)
    with two_nodes(folder, num_kv_blocks=64, stall_limit=10) as (llm, command):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        _, member = command.pids()
        os.kill(member, signal.SIGSTOP)
        with pytest.raises(RankLostError, match=r"rank 1 \(127.0.0.1\) gave no sign for 8 s"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        status, output = command.wait()
        message = "quire: the process of rank 1 gave no sign for 10 s (stall_limit)"
        assert (status, output.splitlines()[-1]) == (1, message)
        assert not command.pids()


@pytest.mark.parametrize(
    ("other", "reason"),
    [({"block_size": 32}, "block_size 32, rank 0 has 16"),
     ({"tensor_parallel_mode": "reduce"}, "tensor_parallel_mode 'reduce', rank 0 has 'auto'")],
    ids=["block_size", "tensor_parallel_mode"],
)  # fmt: skip
def test_rank_with_other_settings_is_refused_on_both_nodes(folder: Path, other: dict[str, Any], reason: str) -> None:
    port = free_port()
    settings = {"tensor_parallel_size": 2, "nnodes": 2, "master_port": port}
    with running_node(str(folder), *as_flags(settings | other), "--node-rank", "1", is_forked=True) as command:
        message = f"rank 1 (127.0.0.1) has {reason}"
        with pytest.raises(ConfigError) as raised:
            LLM(folder, **settings)
        assert str(raised.value) == message
        status, output = command.wait()
        assert (status, output.splitlines()[-1]) == (1, f"quire: {message}")


def test_rank_of_another_version_is_refused_on_both_nodes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import quire.core.version as found\nfound.__version__ = '9.8.7'\n")
    settings = {"tensor_parallel_size": 2, "nnodes": 2, "master_port": free_port()}
    env = {"PYTHONPATH": str(tmp_path)}
    with running_node(str(folder), *as_flags(settings), "--node-rank", "1", env=env) as command:
        message = f"rank 1 runs Quire 9.8.7, rank 0 runs {__version__}"
        with pytest.raises(ConfigError) as raised:
            LLM(folder, **settings)
        assert str(raised.value) == message
        status, output = command.wait()
        assert (status, output.splitlines()[-1]) == (1, f"quire: {message}")
        assert not command.pids()


def test_rank_with_another_model_is_refused_on_both_nodes(folder: Path, tmp_path: Path) -> None:
    other = write_random_model(tmp_path)
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    settings = {"tensor_parallel_size": 2, "nnodes": 2, "master_port": free_port()}
    with running_node(str(other), *as_flags(settings), "--node-rank", "1", is_forked=True) as command:
        message = f"the model at {other} is another one than that of rank 0"
        with pytest.raises(ConfigError) as raised:
            LLM(folder, **settings)
        assert str(raised.value) == f"rank 1: {message}"
        status, output = command.wait()
        assert (status, output.splitlines()[-1]) == (1, f"quire: {message}")
        assert not command.pids()


def test_server_over_two_nodes_is_restarted(demo_model: Path, tmp_path: Path) -> None:
    """With an adapter that was loaded while it ran, which is read again."""
    write_adapter(tmp_path / "sql", demo_model, seed=1)
    flags = [
        "-tp", "2", "--nnodes", "2", "--master-port", str(free_port()), "--num-kv-blocks", "64", "--enable-lora",
        "--allow-runtime-lora", "--lora-root", str(tmp_path), "--stall-limit", "600",
    ]  # fmt: skip
    restarts = ["--restart-engine", "1"]
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with (
        running_node(str(demo_model), *flags, *restarts, "--node-rank", "1", is_forked=True) as command,
        running_server(str(demo_model), *flags, *restarts, is_new=False) as server,
    ):

        def token_ids() -> list[list[int]]:
            models = {}, {"model": "sql"}
            return [server.post("/v1/completions", body | each).json()["choices"][0]["token_ids"] for each in models]

        names = {"lora_name": "sql", "lora_path": "sql"}
        assert server.post("/v1/load_lora_adapter", names).status_code == 200
        expected = token_ids()
        assert expected[0] != expected[1]
        _, member = command.pids()
        os.kill(member, signal.SIGKILL)
        wait_until(lambda: num_restarts(server.url) == 1)
        assert token_ids() == expected
        assert server.post("/v1/unload_lora_adapter", names).status_code == 200
        assert server.post("/v1/completions", body | {"model": "sql"}).status_code == 404
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        command.process.send_signal(signal.SIGTERM)
        command.wait()
        assert not command.pids()
