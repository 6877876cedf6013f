"""Ranks of tensor parallelism as processes: answers, faults of a step, and ranks that end or are stopped."""

import os
import signal
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, LoRARequest, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.core.errors import ConfigError, InvalidRequestError, RankLostError
from quire.engine.loading import LoadedModel
from quire.engine.options import EngineOptions
from quire.engine.parallel.link import RankedModel
from quire.engine.parallel.rank_set import RankSet
from quire.extension.isas import usable_isas
from quire_lab.sim.hardware import Hardware
from quire_lab.sim.models import read_model
from quire_lab.sim.planning import plan_memory
from support.faults import raising
from support.peft_folders import ALL, write_adapter
from support.random_folder import HYBRID, MIXTURE, NORMED_HYBRID, PARALLEL_HYBRID, write_random_folder
from support.rank_answers import GREEDY, PROMPTS, SAMPLED, answers
from support.server import is_running, wait_until
from support.stopping import stopped

pytestmark = [
    pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built"),
    pytest.mark.usefixtures("forked_processes"),
]

CONSTRAINED = SamplingParams(
    temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="one [a-z]+")
)
TOGETHER: dict[str, Any] = {"num_kv_blocks": 24, "max_model_len": 96, "max_num_batched_tokens": 33}


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a mixture with heads of as many dimensions as there are inputs in the smallest group of a scale."""
    config = MIXTURE | {"num_attention_heads": 3, "num_key_value_heads": 3}
    return write_random_folder(tmp_path_factory.mktemp("wide heads"), config)


def pids(llm: LLM) -> list[int]:
    ranks = llm._engine.ranks
    return [] if ranks is None else [peer.process.pid for peer in ranks.peers if peer.process is not None]


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (2, TOGETHER | {"preemption_mode": "swap", "swap_space": "1MiB"}),
        (3, TOGETHER | {"preemption_mode": "recompute", "dtype": "bfloat16"}),
        (2, {"kv_cache_dtype": "int8_per_token_head", "quantization": "int8", "num_kv_blocks": 64}),
        (2, {"dtype": "float16", "speculative_config": {"method": "ngram"}, "num_kv_blocks": 64}),
    ],
    ids=["swap", "recompute", "int8", "float16, drafts"],
)
def test_answers_have_the_bits_of_one_process(folder: Path, num_ranks: int, settings: dict[str, Any]) -> None:
    found, own = [], list[int]()
    for size in (1, num_ranks):
        with LLM(folder, tensor_parallel_size=size, **settings) as llm:
            own = pids(llm)
            assert len(own) == size - 1
            outputs = [answers(llm.generate(PROMPTS, params, use_tqdm=False)) for params in (SAMPLED, GREEDY)]
            again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)  # from the prefix cache
            assert answers(again) == outputs[1]
            found.append((outputs, llm._engine.ready))
        assert not any(map(is_running, own))
    assert found[0][0] == found[1][0]
    assert found[1][1].weights_bytes > found[0][1].weights_bytes  # embeddings and norms are on every rank
    assert found[1][1].num_parameters == found[0][1].num_parameters


def test_embeddings_have_the_bits_of_one_process(folder: Path) -> None:
    found = []
    for size in (1, 2):
        with LLM(folder, runner="pooling", tensor_parallel_size=size) as llm:
            found.append([output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)])
    assert found[0] == found[1]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_experts_are_divided_with_the_bits_of_one_process(mixture: Path, quantization: str | None) -> None:
    settings = TOGETHER | {"quantization": quantization, "preemption_mode": "swap", "swap_space": "1MiB"}
    found = []
    for size in (1, 2):
        with LLM(mixture, tensor_parallel_size=size, **settings) as llm:
            outputs = [answers(llm.generate(PROMPTS, each, use_tqdm=False)) for each in (SAMPLED, GREEDY)]
            found.append((outputs, llm._engine.ready.weights_bytes))
    assert found[0][0] == found[1][0]
    on_each_rank = 4 * 96 * (320 + 5 + 2 * 16)  # the embedding table, norms, and routers, packed in sixteens
    assert found[1][1] - found[0][1] == on_each_rank, "experts are divided, not copied"


@pytest.mark.parametrize(
    ("name", "num_ranks", "settings"),
    [
        ("folder", 2, {}), ("folder", 4, {"dtype": "bfloat16", "quantization": "int8"}), ("mixture", 2, {}),
        ("mixture", 3, {"dtype": "bfloat16", "quantization": "int8"}),
    ],
)  # fmt: skip
def test_partial_sums_give_the_same_bits_every_time(
    name: str, num_ranks: int, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """So it is in any batch, and near the answers of one process."""
    folder = request.getfixturevalue(name)
    settings = settings | {"num_kv_blocks": 64, "quantization_group_size": -1} if settings else {"num_kv_blocks": 64}
    with LLM(folder, **settings) as llm:
        alone = llm.generate(PROMPTS, SAMPLED, use_tqdm=False)
    found = []
    for _ in range(2):
        with LLM(folder, tensor_parallel_size=num_ranks, tensor_parallel_mode="reduce", **settings) as llm:
            together = llm.generate(PROMPTS, SAMPLED, use_tqdm=False)
            found.append(answers(together))
            assert answers(llm.generate(PROMPTS[2:], GREEDY, use_tqdm=False)) == answers(
                llm.generate(PROMPTS, GREEDY, use_tqdm=False)[2:]
            )
    assert found[0] == found[1]
    assert distance(together, alone) < (0.2 if "dtype" in settings else 1e-4)


def distance(outputs: list[RequestOutput], others: list[RequestOutput]) -> float:
    """Return the largest difference of the logprobs of prompts."""
    found = [0.0]
    for output, other in zip(outputs, others, strict=True):
        assert output.prompt_logprobs is not None
        assert other.prompt_logprobs is not None
        pairs = zip(output.prompt_logprobs, other.prompt_logprobs, strict=True)
        for token, (own, near) in zip(output.prompt_token_ids, pairs, strict=True):
            if own is not None and near is not None:
                found.append(abs(own[token].logprob - near[token].logprob))
    return max(found)


@pytest.mark.parametrize(
    ("name", "num_ranks", "settings"),
    [
        ("folder", 2, {}), ("mixture", 2, {}), ("folder", 3, {"quantization": "int4", "dtype": "bfloat16"}),
        ("mixture", 3, {"quantization": "int4", "dtype": "bfloat16"}),
        ("folder", 4, {"tensor_parallel_mode": "reduce"}),  # a model of 6 heads and 3 KV heads
        ("mixture", 2, {"tensor_parallel_mode": "reduce"}),
        ("wide_heads", 3, {"tensor_parallel_mode": "reduce", "quantization": "int4", "quantization_group_size": 32}),
        ("hybrid", 2, {}), ("hybrid", 4, {"quantization": "int8", "dtype": "bfloat16"}),
        ("hybrid", 4, {"tensor_parallel_mode": "reduce"}),  # 3 key heads, 6 value heads
        ("parallel_hybrid", 4, {"quantization": "int8", "dtype": "bfloat16"}),
        ("parallel_hybrid", 3, {"tensor_parallel_mode": "reduce"}),
        ("normed_hybrid", 4, {"tensor_parallel_mode": "reduce"}), ("normed_hybrid", 2, {}),
    ],
)  # fmt: skip
def test_plan_is_what_the_ranks_hold(
    name: str, num_ranks: int, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    settings = settings | {"tensor_parallel_size": num_ranks, "kv_cache_memory": 1 << 20, "max_model_len": 64}
    options = EngineOptions(str(model), **settings)
    machine = Hardware("this machine", 1 << 30, 1.0, 1.0, device="cpu")
    read = read_model(options.model, options.dtype, options.quantization_options)
    planned = plan_memory(read, machine, options, num_ranks)
    with LLM(model, **settings) as llm:
        ready = llm._engine.ready
    assert planned.weight_bytes == ready.weights_bytes
    assert planned.kv_bytes_per_token == ready.kv_bytes_per_token
    assert planned.slot_bytes == ready.slot_bytes
    assert planned.cache.num_blocks == ready.limits.num_blocks
    assert planned.cache.num_state_slots == ready.limits.num_state_slots


SMALL = {
    "vocab_size": 301, "hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip
FUSED: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "single modules": (SMALL | {"architectures": ["LlamaForCausalLM"]}, ALL),
    "fused modules": (
        SMALL | {"architectures": ["Phi3ForCausalLM"]}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    ),
    "rows in groups": (
        SMALL | {"architectures": ["GPTNeoXForCausalLM"], "layer_norm_eps": 1e-5},
        ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    ),
    "norms over all heads": (SMALL | {"architectures": ["Olmo2ForCausalLM"]}, ALL),
    "gated delta nets": (HYBRID, (*ALL, "in_proj_qkv", "in_proj_z", "out_proj")),
    "Mamba-2 beside attention": (PARALLEL_HYBRID, (*ALL, "in_proj", "out_proj")),
    "heads that are normed together": (NORMED_HYBRID, (*ALL, "in_proj", "out_proj")),
}  # fmt: skip


@pytest.mark.parametrize("family", FUSED)
def test_adapters_have_the_bits_of_one_process(family: str, tmp_path: Path) -> None:
    config, targets = FUSED[family]
    model = write_random_folder(tmp_path / "model", config)
    folders = [write_adapter(tmp_path / f"{seed}", model, seed, targets=targets, rank=seed + 1) for seed in (1, 2, 3)]
    adapters = [LoRARequest(each.name, number, str(each)) for number, each in enumerate(folders, start=1)]
    found = []
    for size in (1, 2):
        # With room for two adapters, so that one is evicted on all ranks, and read again.
        with LLM(model, tensor_parallel_size=size, enable_lora=True, max_loras=2, num_kv_blocks=64) as llm:
            mixed = [
                answers(llm.generate(PROMPTS, GREEDY, lora_request=[*others, None], use_tqdm=False))
                for others in (adapters[:2], adapters[1:], adapters[:2])
            ]
            alone = answers(llm.generate(PROMPTS[:1], GREEDY, lora_request=adapters[0], use_tqdm=False))
            assert alone[0] == mixed[0][0] == mixed[2][0] != mixed[1][0]
            found.append(mixed)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("family", "num_ranks", "settings"),
    [
        ("single modules", 2, {}), ("fused modules", 2, {}), ("rows in groups", 3, {}), ("norms over all heads", 2, {}),
        ("single modules", 2, {"dtype": "bfloat16"}), ("single modules", 2, {"dtype": "float16"}),
        ("single modules", 2, {"dtype": "bfloat16", "quantization": "int8"}),
        ("heads that are normed together", 2, {"dtype": "float16"}),
    ],
)  # fmt: skip
def test_adapters_of_partial_sums_give_the_same_bits_every_time(
    family: str, num_ranks: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """So it is alone and beside other rows, those without an adapter as in ranks without any; near one process."""
    config, targets = FUSED[family]
    model = write_random_folder(tmp_path / "model", config)
    folders = [write_adapter(tmp_path / f"{seed}", model, seed, targets=targets, rank=seed + 1) for seed in (1, 2)]
    mixed = [*(LoRARequest(each.name, number, str(each)) for number, each in enumerate(folders, start=1)), None]
    limit, settings = 0.2 if settings else 1e-4, settings | {"num_kv_blocks": 64}
    with LLM(model, enable_lora=True, max_loras=2, **settings) as llm:
        whole = llm.generate(PROMPTS, SAMPLED, lora_request=mixed, use_tqdm=False)
        without = llm.generate(PROMPTS[:1], SAMPLED, use_tqdm=False)
    settings |= {"tensor_parallel_size": num_ranks, "tensor_parallel_mode": "reduce"}
    with LLM(model, **settings) as llm:
        plain = answers(llm.generate(PROMPTS[2:], GREEDY, use_tqdm=False))
    found = []
    for _ in range(2):
        with LLM(model, enable_lora=True, max_loras=2, **settings) as llm:
            together = llm.generate(PROMPTS, SAMPLED, lora_request=mixed, use_tqdm=False)
            chosen = answers(llm.generate(PROMPTS, GREEDY, lora_request=mixed, use_tqdm=False))
            assert chosen[:1] == answers(llm.generate(PROMPTS[:1], GREEDY, lora_request=mixed[0], use_tqdm=False))
            assert chosen[2:] == plain
            found.append((answers(together), chosen))
    assert found[0] == found[1]
    assert distance(together, whole) < limit < distance(without, whole[:1])


def test_adapter_that_one_rank_cannot_read_again_fails_its_requests(folder: Path, tmp_path: Path) -> None:
    """It was named, evicted, and is gone where the other rank reads it: below the folder in which the rank started."""
    (tmp_path / "rank").mkdir()
    for name in ("a", "b"):
        write_adapter(tmp_path / "rank" / name, folder, ord(name))
        write_adapter(tmp_path / name, folder, ord(name))
    first, second = (LoRARequest(name, ord(name), f"/proc/self/cwd/{name}") for name in ("a", "b"))
    with chdir(tmp_path / "rank"):
        llm = LLM(folder, tensor_parallel_size=2, enable_lora=True, max_loras=1, num_kv_blocks=64)
    with llm, chdir(tmp_path):
        plain = answers(llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False))
        for adapter in (first, second):
            llm.generate(PROMPTS[:1], GREEDY, lora_request=adapter, use_tqdm=False)
        (tmp_path / "rank/a/adapter_config.json").unlink()
        with pytest.raises(InvalidRequestError, match="its LoRA adapter cannot be loaded any more"):
            llm.generate(PROMPTS[:1], GREEDY, lora_request=first, use_tqdm=False)
        assert answers(llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)) == plain
        llm.generate(PROMPTS[:1], GREEDY, lora_request=second, use_tqdm=False)


@pytest.fixture
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(demo_model, tensor_parallel_size=2, num_kv_blocks=128) as llm:
        yield llm


def test_a_step_that_fails_on_a_rank_fails_alone(
    llm: LLM, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(engine: LLM) -> list[object]:
        return [answers(engine.generate(["def "], params, use_tqdm=False)) for params in (CONSTRAINED, GREEDY)]

    with LLM(demo_model, num_kv_blocks=128) as alone:
        expected = run(alone)
    assert run(llm) == expected
    model = llm._engine.model
    assert isinstance(model, RankedModel)
    with monkeypatch.context() as patch:
        patch.setattr(model.own, "forward", raising(ArithmeticError))  # while the other rank waits for an exchange
        with pytest.raises(ArithmeticError):
            llm.generate(["def "], GREEDY, use_tqdm=False)
    assert run(llm) == expected
    with monkeypatch.context() as patch:
        wrong = model._link._ranks
        patch.setattr(model._link, "send", lambda kind, rows=None: type(model._link).send(model._link, 7))
        with pytest.raises(RuntimeError, match="a step has failed on rank 1: AssertionError: command 7"):
            llm.generate(["def "], GREEDY, use_tqdm=False)
    assert wrong is model._link._ranks
    assert run(llm) == expected


def test_rank_that_is_killed_ends_the_engine(llm: LLM) -> None:
    (pid,) = pids(llm)
    os.kill(pid, signal.SIGKILL)
    ranks = llm._engine.ranks
    assert ranks is not None
    wait_until(lambda: ranks.lost is not None)  # noticed without a step
    for _ in range(2):
        with pytest.raises(RankLostError, match=rf"rank 1 \(process {pid}\) has ended"):
            llm.generate(["def "], GREEDY, use_tqdm=False)


def test_rank_that_is_killed_in_a_step_ends_it(llm: LLM) -> None:
    (pid,) = pids(llm)
    outputs = llm.stream(["def "], SamplingParams(max_tokens=1000, ignore_eos=True))
    next(outputs)
    with stopped(pid):  # so that the next step cannot end
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankLostError, match=rf"rank 1 \(process {pid}\) has ended"):
            for _ in outputs:
                pass


def test_rank_that_is_stopped_ends_the_engine(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.parallel.rank_set.SILENCE_SHARE", 0.8)
    with LLM(demo_model, tensor_parallel_size=2, num_kv_blocks=128, stall_limit=10) as llm:
        (pid,) = pids(llm)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RankLostError, match=rf"rank 1 \(process {pid}\) gave no sign for 8 s"):
            llm.generate(["def "], GREEDY, use_tqdm=False)
        wait_until(lambda: not is_running(pid))


def test_rank_that_ends_while_it_loads_fails_the_start(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, join = list[RankSet](), RankSet.join

    def killing(self: RankSet, loaded: LoadedModel) -> LoadedModel:
        started.append(self)
        process = self.peers[0].process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        return join(self, join(self, loaded))  # it may have loaded before: what it cannot do is to allocate

    monkeypatch.setattr(RankSet, "join", killing)
    with pytest.raises(RankLostError, match=r"rank 1 .* has ended"):
        LLM(demo_model, tensor_parallel_size=3, num_kv_blocks=128)
    assert not any(is_running(peer.process.pid) for peer in started[0].peers if peer.process is not None)


def test_settings_that_ranks_do_not_serve_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"each 32 inputs of \S+ share a scale, .* ends at input 72; use --"):
        LLM(
            folder, tensor_parallel_size=2, tensor_parallel_mode="reduce", quantization="int4",
            quantization_group_size=32,
        )  # fmt: skip
    with pytest.raises(ConfigError, match="tensor_parallel_size 7 is above the model's 6 attention heads"):
        LLM(folder, tensor_parallel_size=7)
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 needs memory_policy 'paged'"):
        LLM(folder, tensor_parallel_size=2, memory_policy="contiguous-max", num_kv_blocks=64, max_model_len=64)
