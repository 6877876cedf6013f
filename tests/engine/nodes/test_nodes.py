"""Two nodes on one machine: answers with the bits of one process, refusals, and clean ends."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.core.errors import ConfigError, RankLostError
from quire.core.version import __version__
from quire.engine.nodes.exchange import ADDED_BYTES
from quire.engine.parallel.leader import RankedModel
from quire.kernels.cpp.back_end import usable_isas
from support.faults import raising
from support.nodes import NodeCommand, free_port, node
from support.random_folder import MIXTURE, write_random_folder
from support.random_model import write_random_model
from support.server import SOURCES, running_server, wait_until

pytestmark = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")

PROMPTS = [[5, 9, 11, 200, 31] * 9, [7] * 40, [5, 9, 11, 200, 31] * 9 + [4, 4]]
SAMPLED = SamplingParams(temperature=0.9, seed=4, max_tokens=12, logprobs=2, prompt_logprobs=1, ignore_eos=True, n=2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SETTINGS: dict[str, Any] = {"num_kv_blocks": 24, "max_model_len": 96, "max_num_batched_tokens": 33}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"))


def answers(outputs: list[RequestOutput]) -> list[object]:
    return [(o.prompt_logprobs, [(c.token_ids, c.logprobs) for c in o.outputs]) for o in outputs]


def as_flags(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@contextmanager
def two_nodes(model: Path, address: str = "127.0.0.2", **settings: Any) -> Iterator[tuple[LLM, NodeCommand]]:  # noqa: ANN401
    settings = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": address} | settings
    settings["master_port"] = free_port(address)
    with node(str(model), *as_flags(settings), "--node-rank", "1") as command, LLM(model, **settings) as llm:
        yield llm, command


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_answers_have_the_bits_of_one_process(folder: Path, num_ranks: int) -> None:
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


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16", "quantization": "int8"}, {"dtype": "float16"}], ids=str)
def test_experts_have_the_bits_of_one_process(tmp_path: Path, settings: dict[str, Any]) -> None:
    mixture = write_random_folder(tmp_path / "mixture", MIXTURE)
    with LLM(mixture, **SETTINGS, **settings) as llm:
        expected = [answers(llm.generate(PROMPTS, params, use_tqdm=False)) for params in (SAMPLED, GREEDY)]
    with two_nodes(mixture, **SETTINGS, **settings) as (llm, _):
        assert [answers(llm.generate(PROMPTS, params, use_tqdm=False)) for params in (SAMPLED, GREEDY)] == expected


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_partial_sums_have_the_bits_of_one_machine(folder: Path, num_ranks: int) -> None:
    """In steps of a few tokens, whose sums every rank adds, and of many, of which each adds a part."""
    settings = {"num_kv_blocks": 96, "tensor_parallel_mode": "reduce", "tensor_parallel_size": num_ranks}
    prompts = PROMPTS + [[token + 1 for token in prompt] for prompt in PROMPTS]
    assert 4 * 72 * sum(map(len, prompts)) > ADDED_BYTES  # of the folder's dimensions, in one step
    with LLM(folder, **settings) as llm:
        expected = answers(llm.generate(prompts, SAMPLED, use_tqdm=False))
    with two_nodes(folder, **settings) as (llm, _):
        assert answers(llm.generate(prompts, SAMPLED, use_tqdm=False)) == expected


def test_a_step_that_fails_on_a_rank_fails_alone_and_a_killed_rank_ends_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_nodes(folder, num_kv_blocks=64) as (llm, command):
        expected = answers(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        model = llm._engine.model
        assert isinstance(model, RankedModel)
        with monkeypatch.context() as patch:
            patch.setattr(model._model, "forward", raising(ArithmeticError))  # while the other rank waits
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
        status, output = command.wait(5)
        assert (status, output.splitlines()[-1]) == (1, "quire: the process of rank 1 has ended")
        assert not command.pids()


def test_rank_that_is_stopped_ends_the_run(folder: Path) -> None:
    with two_nodes(folder, num_kv_blocks=64, stall_limit=2.5) as (llm, command):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        _, member = command.pids()
        os.kill(member, signal.SIGSTOP)
        with pytest.raises(RankLostError, match=r"rank 1 \(127.0.0.1\) gave no sign for 2 s"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        status, output = command.wait()
        message = "quire: the process of rank 1 gave no sign for 2.5 s (stall_limit)"
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
    with node(str(folder), *as_flags(settings | other), "--node-rank", "1") as command:
        message = f"rank 1 (127.0.0.1) has {reason}"
        with pytest.raises(ConfigError) as raised:
            LLM(folder, **settings)
        assert str(raised.value) == message
        status, output = command.wait(10)
        assert (status, output.splitlines()[-1]) == (1, f"quire: {message}")


def test_rank_of_another_version_is_refused_on_both_nodes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import quire.core.version as found\nfound.__version__ = '9.8.7'\n")
    settings = {"tensor_parallel_size": 2, "nnodes": 2, "master_port": free_port()}
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(SOURCES)])}
    with node(str(folder), *as_flags(settings), "--node-rank", "1", env=env) as command:
        message = f"rank 1 runs Quire 9.8.7, rank 0 runs {__version__}"
        with pytest.raises(ConfigError) as raised:
            LLM(folder, **settings)
        assert str(raised.value) == message
        status, output = command.wait(10)
        assert (status, output.splitlines()[-1]) == (1, f"quire: {message}")
        assert not command.pids()


def test_rank_with_another_model_is_refused_on_both_nodes(folder: Path, tmp_path: Path) -> None:
    other = write_random_model(tmp_path)
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    settings = {"tensor_parallel_size": 2, "nnodes": 2, "master_port": free_port()}
    with node(str(other), *as_flags(settings), "--node-rank", "1") as command:
        message = f"rank 1 finds another model than rank 0 at {other}"
        with pytest.raises(ConfigError) as raised:
            LLM(folder, **settings)
        assert str(raised.value) == f"rank 1: {message}"
        status, output = command.wait(10)
        assert (status, output.splitlines()[-1]) == (1, f"quire: {message}")
        assert not command.pids()


def test_server_over_two_nodes_is_restarted(demo_model: Path) -> None:
    flags = ["-tp", "2", "--nnodes", "2", "--master-port", str(free_port()), "--num-kv-blocks", "64"]
    restarts = ["--restart-engine", "1"]
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with (
        node(str(demo_model), *flags, *restarts, "--node-rank", "1") as command,
        running_server(str(demo_model), *flags, *restarts) as server,
    ):

        def token_ids() -> list[int]:
            return server.post("/v1/completions", body).json()["choices"][0]["token_ids"]

        expected = token_ids()
        _, member = command.pids()
        os.kill(member, signal.SIGKILL)
        wait_until(lambda: server.get("/health").status_code == 503)
        wait_until(lambda: server.get("/health").status_code == 200)
        assert token_ids() == expected
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        command.process.send_signal(signal.SIGTERM)
        command.wait(10)
        assert not command.pids()
