"""Ranks of tensor parallelism on GPUs that are imitated, with gloo in the place of NCCL: answers, memory and faults."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM
from quire.core.config import CacheConfig
from quire.core.errors import ConfigError, RankLostError
from quire.core.plan import GraphCounts
from quire.engine.options import EngineOptions
from quire.engine.parallel import gpu_ranks, rank_messages, starters
from quire.engine.parallel.channel import Channel
from quire.engine.parallel.gpu_ranks import BLOCKING_WAIT, GpuRanks, HostLink, LeadingGraphs, check_gpu_ranks
from quire.engine.parallel.nccl import rank_exchange
from quire.engine.parallel.peer import Peer
from quire.engine.parallel.rank_set import RankSet
from quire.execution.cuda.cuda_graphs import GraphSize
from quire.execution.cuda.cuda_memory import pinned_bytes
from quire.extension.isas import usable_isas
from quire.model.kv_cache import KVGeometry
from quire.model.language_model import ForwardBatch
from quire.model.sharding import Shard
from quire_lab.sim.footprint import PLAIN_PACKING, weight_bytes
from quire_lab.sim.hardware import Hardware
from quire_lab.sim.models import read_model
from quire_lab.sim.planning import plan_memory
from support.faults import raising
from support.imitated_ranks import Answers, Case, Fault, answer, run_imitated
from support.peft_folders import write_adapter
from support.random_model import write_random_model
from support.rank_answers import PROMPTS
from support.server import wait_until

pytestmark = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")

PARAMS: dict[str, Any] = {"temperature": 0.9, "seed": 4, "max_tokens": 8, "prompt_logprobs": 1, "ignore_eos": True}
FEW_BLOCKS = {
    "num_kv_blocks": 14, "block_size": 8, "max_model_len": 96, "max_num_batched_tokens": 24, "dtype": "float32",
    "max_num_seqs": 4,
}  # fmt: skip
ENOUGH = {"num_kv_blocks": 64, "max_num_seqs": 4}
NODES = ENOUGH | {"dtype": "float32", "nnodes": 2, "master_addr": "127.0.0.2"}
SWAP = FEW_BLOCKS | {"preemption_mode": "swap", "num_swap_blocks": 24}
SETTINGS: dict[str, dict[str, Any]] = {
    "swap": SWAP,
    "exact": {"exact": True, "dtype": "float32", "kv_cache_memory": 1 << 20, "max_model_len": 96, "max_num_seqs": 4},
    "8 bits": ENOUGH | {
        "kv_cache_dtype": "int8_per_token_head", "quantization": "int8", "quantization_group_size": -1,
        "speculative_config": {"method": "ngram"},
    },
    "experts": ENOUGH | {"dtype": "float32"},
    "adapters, 2 nodes": NODES | {"enable_lora": True, "max_loras": 2},
}  # fmt: skip
# At the end of an engine
FAULTS: dict[str, Fault] = {"swap": "kill", "exact": "rank 1", "8 bits": "rank 0", "adapters, 2 nodes": "kill"}
OTHERS: dict[str, dict[str, Any]] = {
    "swap again": SWAP,
    "adapters, exact": ENOUGH | {"dtype": "float32", "exact": True, "enable_lora": True, "capture_graphs": True},
    "adapters, 2 nodes of 2": NODES | {"tensor_parallel_size": 4, "enable_lora": True},
    "experts, exact": ENOUGH | {"dtype": "float32", "exact": True},
    "4 ranks": ENOUGH | {"tensor_parallel_size": 4, "dtype": "bfloat16", "capture_graphs": True, "max_num_seqs": 2,
                "cudagraph_capture_sizes": [1, 2, 16]},
}
LIMITS = {"4 ranks": 0.2, "8 bits": 0.1}  # bound on the differences of logprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:  # with adapters
    folder = write_random_model(tmp_path_factory.mktemp("model"))
    write_adapter(folder / "a", folder, 1)
    write_adapter(folder / "b", folder, 2, targets=("k_proj", "up_proj"), rank=3, lora_alpha=7)
    return folder


@pytest.fixture(scope="module")
def models(folder: Path, mixture: Path) -> dict[str, Path]:
    """Return the models of cases."""
    return {name: mixture if name.startswith("experts") else folder for name in SETTINGS | OTHERS}


@pytest.fixture(scope="module")
def answers(models: dict[str, Path]) -> dict[str, Answers]:
    """Return what engines answer, and how they end, by case: one process starts them all."""
    return run_cases(models, SETTINGS)


@pytest.fixture(scope="module")
def more_answers(models: dict[str, Path]) -> dict[str, Answers]:
    return run_cases(models, OTHERS)


def run_cases(models: dict[str, Path], settings: dict[str, dict[str, Any]]) -> dict[str, Answers]:
    pytest.importorskip("triton", reason="Triton is not installed")
    cases = [
        case_of(name, models[name], {"tensor_parallel_size": 2} | own, FAULTS.get(name, ""))
        for name, own in settings.items()
    ]
    return dict(zip(settings, run_imitated(cases), strict=True))


def case_of(name: str, model: Path, settings: dict[str, Any], fault: Fault = "") -> Case:
    """Return a case of two turns, its first and last prompt with adapters if it has some."""
    adapters = [str(model / "a"), "", str(model / "b")] if name.startswith("adapters") else []
    params = PARAMS | ({"max_tokens": 16} if name.startswith("swap") else {})  # as many as want more blocks
    return Case(str(model), settings, PROMPTS, params, adapters, 2, fault)


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_near_those_of_cpus(name: str, models: dict[str, Path], answers: dict[str, Answers]) -> None:
    """With partial sums where GPUs have them, and the outputs of all ranks where they are exact."""
    check_near_those_of_cpus(case_of(name, models[name], SETTINGS[name]), answers[name], LIMITS.get(name))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["4 ranks", "experts, exact", "adapters, exact", "adapters, 2 nodes of 2"])
def test_more_answers_are_near_those_of_cpus(
    name: str, models: dict[str, Path], more_answers: dict[str, Answers]
) -> None:
    check_near_those_of_cpus(case_of(name, models[name], OTHERS[name]), more_answers[name], LIMITS.get(name))


def check_near_those_of_cpus(case: Case, found: Answers, limit: float | None) -> None:
    """With a limit, ranks on CPUs, which round their parts, too; else one CPU, without processes of its own."""
    of_gpus = "exact", "capture_graphs", "nnodes", "master_addr"
    of_cpus = {name: each for name, each in case.settings.items() if name not in of_gpus}
    if limit is not None:
        of_cpus = {"tensor_parallel_size": 2, "tensor_parallel_mode": "reduce"} | of_cpus
    with LLM(case.model, device="cpu", **of_cpus) as llm:
        expected = answer(llm, case)
    assert len(found.prompt_logprobs) == 2
    for turn, others in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True):
        assert [len(each) for each in turn] == [len(each) - 1 for each in PROMPTS]
        for own, near in zip(turn, others, strict=True):
            assert own == pytest.approx(near, abs=limit or 1e-4)
    if limit is None:
        assert found.token_ids == expected.token_ids


@pytest.mark.matrix
def test_answers_are_the_same_every_time(answers: dict[str, Answers], more_answers: dict[str, Answers]) -> None:
    assert answers["swap"].token_ids == more_answers["swap again"].token_ids
    assert answers["swap"].prompt_logprobs == more_answers["swap again"].prompt_logprobs


def test_preempted_sequences_are_swapped(answers: dict[str, Answers]) -> None:
    assert answers["swap"].preemptions["swap"] > 0


def test_ranks_capture_the_graphs_of_steps_together(answers: dict[str, Answers]) -> None:
    assert answers["swap"].graphs, "none was requested often enough"
    assert {has_adapters for *_, has_adapters in answers["adapters, 2 nodes"].graphs} == {True}


@pytest.mark.matrix
def test_ranks_capture_all_graphs_together_at_start(more_answers: dict[str, Answers]) -> None:
    assert set(more_answers["4 ranks"].graphs) == {(1, 1, False), (2, 2, False), (8, 16, False)}
    assert {has_adapters for *_, has_adapters in more_answers["adapters, exact"].graphs} == {False, True}


@pytest.mark.parametrize("name", ["swap", "exact", "experts"])
def test_gpus_hold_what_is_planned(name: str, models: dict[str, Path], answers: dict[str, Answers]) -> None:
    options = EngineOptions(str(models[name]), tensor_parallel_size=2, **SETTINGS[name])
    model, card = read_model(options.model, options.dtype), Hardware("a card", 1 << 30, 1.0, 1.0, device="cuda")
    planned, mode = plan_memory(model, card, options, 2), options.tensor_parallel_mode_on("cuda")
    assert answers[name].num_blocks == planned.cache.num_blocks
    first, second = (
        weight_bytes(model.spec, "float32", PLAIN_PACKING, shard=Shard(rank, 2, mode)) for rank in range(2)
    )
    assert planned.weight_bytes == first
    assert answers[name].weight_bytes == first + second


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("swap", r"RankLostError: rank 1 \(process \d+\) has ended"),
        ("exact", r"EngineError: rank 1: a step has failed: AssertionError\('command 7'\)"),
        ("8 bits", r"RankLostError: rank 0: a step has failed: ArithmeticError\("),
        ("adapters, 2 nodes", r"RankLostError: rank 1 \(127.0.0.1\) has ended"),
    ],
)
def test_fault_of_a_rank_ends_the_engine(name: str, message: str, answers: dict[str, Answers]) -> None:
    with pytest.raises(ValueError, match=message):
        raise ValueError(answers[name].error)


def test_command_of_the_other_node_ends_with_the_reason(answers: dict[str, Answers]) -> None:
    status, output = answers["adapters, 2 nodes"].node
    assert (status, output.splitlines()[-1]) == (1, "quire: the process of rank 1 has ended")


@pytest.mark.matrix
def test_command_of_the_other_node_ends_with_rank_0(more_answers: dict[str, Answers]) -> None:
    status, output = more_answers["adapters, 2 nodes of 2"].node
    assert (status, output.splitlines()[-1]) == (1, "quire: rank 0 was closed")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend 'ray'"),
        ({"attention_backend": "cuda"}, "attention_backend 'cuda'"),
        ({"attention_backend": "flashinfer"}, "attention_backend 'flashinfer'"),
        ({"exact": True, "tensor_parallel_mode": "reduce"}, "exact True with tensor_parallel_mode 'reduce'"),
    ],
)
def test_settings_that_ranks_of_gpus_do_not_serve_are_refused(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is not supported yet with tensor_parallel_size 2 on device cuda"):
        check_gpu_ranks(EngineOptions(tensor_parallel_size=2, **settings), 2)


def test_swap_spaces_of_all_ranks_must_be_free_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = KVGeometry.of(Shard(0, 2).local_spec(read_model(str(folder)).spec), "float32", None)
    cache = CacheConfig(num_blocks=64, num_swap_blocks=64)
    own_bytes = pinned_bytes(geometry.tensor_bytes(64, 16))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda card: None)
    ranks = GpuRanks(EngineOptions(tensor_parallel_size=2))
    monkeypatch.setattr(gpu_ranks, "free_memory_bytes", lambda: 2 * own_bytes)
    ranks.check_swap_space(geometry, cache)
    monkeypatch.setattr(gpu_ranks, "free_memory_bytes", lambda: 2 * own_bytes - 1)
    with pytest.raises(ConfigError, match=f"the swap spaces of 2 ranks take {2 * own_bytes} bytes, but only"):
        ranks.check_swap_space(geometry, cache)


def test_waiting_on_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(tensor_parallel_size=2)
    monkeypatch.setenv(BLOCKING_WAIT, "0")
    check_gpu_ranks(options, 2)
    monkeypatch.setenv(BLOCKING_WAIT, "1")
    with pytest.raises(ConfigError, match="TORCH_NCCL_BLOCKING_WAIT in the environment, which graphs cannot contain"):
        check_gpu_ranks(options, 2)


def test_more_ranks_than_gpus_are_refused_with_both_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starters, "uses_gpu", lambda options: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    message = "tensor_parallel_size 4 needs 4 GPUs of a machine, one for each rank, but torch sees 3"
    with pytest.raises(ConfigError, match=message):
        LLM(folder, device="cuda", tensor_parallel_size=4)
    message = "tensor_parallel_size 8 over 2 nodes needs 4 GPUs of a machine, one for each rank, but torch sees 3"
    with pytest.raises(ConfigError, match=message):
        LLM(folder, device="cuda", tensor_parallel_size=8, nnodes=2)


def test_rank_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    load = rank_messages.Load(EngineOptions(tensor_parallel_size=4, nnodes=2), 3, 4, 0, 8, (0, 0, 0), "")
    with pytest.raises(ConfigError, match="rank 3 needs GPU 1 of its machine, but torch sees 1 there"):
        rank_exchange(load, None)


def test_mode_of_gpus_is_reduce_unless_answers_are_exact() -> None:
    assert EngineOptions().tensor_parallel_mode_on("cuda") == "reduce"
    assert EngineOptions(exact=True).tensor_parallel_mode_on("cuda") == "gather"
    assert EngineOptions(tensor_parallel_mode="gather").tensor_parallel_mode_on("cuda") == "gather"


LARGEST, SMALL = GraphSize(4, 4), GraphSize(2, 2)


class Other:
    """Another rank, which follows commands at the end of its channel, and can capture what `is_able` says."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.peer = Peer(1, Channel(ours, rank_messages.decode_report), None, "a test")
        self.told: list[rank_messages.Command] = []
        self.is_able = True
        self._channel = Channel(theirs, rank_messages.decode_command)
        self._channel.start(handles=self._follow)

    def _follow(self, command: rank_messages.Command) -> bool:
        self.told.append(command)
        if isinstance(command, rank_messages.Capture):
            self._channel.send(rank_messages.Captured(self.is_able))
        return True


@pytest.fixture
def other() -> Iterator[Other]:
    other = Other()
    yield other
    other.peer.end("the test is over", 0.0)
    other._channel.close()


def forward(batch: ForwardBatch) -> Tensor:
    return batch.token_ids[:, None].float()


def graphs_with(other: Other, capture: Callable[..., Any] = lambda call: call) -> LeadingGraphs:
    unused: Any = SimpleNamespace(handles=lambda peer, report: False, interrupt=lambda: None)
    ranks = RankSet(EngineOptions(tensor_parallel_size=2), unused, unused, unused)
    ranks._exchange = unused
    ranks._add(other.peer)
    return LeadingGraphs(HostLink(ranks), forward, 5, torch.device("cpu"), capture, 4)


def test_all_ranks_are_told_of_a_graph_before_it_is_captured(other: Other) -> None:
    graphs = graphs_with(other)
    graphs.capture_all(1)
    captures = [each for each in other.told if isinstance(each, rank_messages.Capture)]
    sizes = [GraphSize(each.num_rows, each.num_tokens) for each in captures]
    assert sizes[:3] == [LARGEST, SMALL, GraphSize(1, 1)]
    assert all(graphs._graphs[size] is not None for size in sizes)
    graphs.clear()
    assert set(graphs._graphs.values()) == {None}


def test_graph_that_another_rank_lacks_is_dropped(other: Other) -> None:
    other.is_able = False
    graphs = graphs_with(other)
    graphs._capture_size(SMALL)
    wait_until(lambda: other.told == [rank_messages.Capture(2, 2, False), rank_messages.DropGraph(2, 2, False)])
    assert graphs._graphs[SMALL] is None
    assert graphs.counts == GraphCounts(0, 1)


def test_graph_that_the_first_rank_lacks_is_dropped(other: Other) -> None:
    graphs = graphs_with(other, raising(torch.OutOfMemoryError))
    graphs._capture_size(SMALL)
    wait_until(lambda: other.told == [rank_messages.Capture(2, 2, False), rank_messages.DropGraph(2, 2, False)])
    assert graphs._graphs[SMALL] is None
    assert graphs.counts == GraphCounts(0, 1)


def test_error_before_the_capture_is_one_of_all_ranks(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait in the exchanges of that pass."""
    graphs = graphs_with(other)
    monkeypatch.setattr(graphs, "_forward", raising(torch.OutOfMemoryError))
    with pytest.raises(RankLostError, match=r"rank 0: a step has failed: OutOfMemoryError"):
        graphs._capture_size(SMALL)
