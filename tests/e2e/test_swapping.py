"""Swapping on real models: whatever way a victim comes back, its answer is the one that it gives alone."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, KVStats, RequestOutput, SamplingParams
from quire.core.errors import ConfigError
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.scheduler import Scheduler
from support.answers import answers_of
from support.random_folder import write_random_folder

MODES = ("recompute", "swap", "auto")
NUM_TOKENS = 88
MAX_MODEL_LEN = 120
POOL = MAX_MODEL_LEN // 8 * 3 // 2  # blocks of 8 tokens: one sequence and a half


class Long:
    """32 long generations, each of them alone and all together in a pool for one and a half."""

    def __init__(self, model: Path, dtype: str) -> None:
        rng = random.Random(5)
        self.model, self.dtype = model, dtype
        self.prompts = [[rng.randrange(3, 500) for _ in range(rng.randint(1, 30))] for _ in range(32)]
        self.prompts[9][:20] = self.prompts[4][:20]
        kinds: Sequence[dict[str, Any]] = ({"temperature": 0.0}, {"temperature": 0.9}, {"top_p": 0.9})
        self.params = [
            SamplingParams(
                max_tokens=NUM_TOKENS - 8 * (i % 4), ignore_eos=True, logprobs=1, seed=i, **kinds[i % len(kinds)]
            )
            for i in range(32)
        ]
        with LLM(model, dtype=dtype, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False) as llm:
            self.alone = [
                answers_of(llm.generate([prompt], params, use_tqdm=False)[0])
                for prompt, params in zip(self.prompts, self.params, strict=True)
            ]

    def together(self, **options: Any) -> tuple[list[RequestOutput], KVStats]:  # noqa: ANN401 (of LLM)
        with LLM(
            self.model, dtype=self.dtype, max_model_len=MAX_MODEL_LEN, num_kv_blocks=POOL, block_size=8, **options
        ) as llm:
            return llm.generate(self.prompts, self.params, use_tqdm=False), llm.kv_stats()


@pytest.fixture(scope="module")
def long(demo_model: Path) -> Long:
    return Long(demo_model, "float32")


@pytest.mark.parametrize(
    ("mode", "num_swap_blocks"),
    [pytest.param("recompute", 0, marks=pytest.mark.matrix), ("swap", 500), ("swap", 20), ("auto", 500)],
)
def test_long_generations_in_a_pool_for_one_and_a_half(long: Long, mode: str, num_swap_blocks: int) -> None:
    outputs, stats = long.together(preemption_mode=mode, num_swap_blocks=num_swap_blocks)
    assert [answers_of(output) for output in outputs] == long.alone
    preemptions = [output.metrics.num_preemptions for output in outputs if output.metrics]
    assert max(preemptions) <= 4
    assert sum(preemptions) == sum(stats.preemptions.values()) > 32
    assert (stats.used_blocks, stats.swap_used_blocks) == (0, 0)
    assert (stats.swapped_out_blocks > 0) == (stats.swap_s > 0) == (stats.preemptions["swap"] > 0)
    assert (stats.recomputed_tokens > 0) == (stats.recompute_s > 0)
    if num_swap_blocks == 500 and mode == "swap":
        assert stats.preemptions["recompute"] == 0
        assert stats.recomputed_tokens == 0


def preempting(scheduler: Scheduler, num_steps: int) -> Callable[[PlanBuilder], None]:
    """Return what opens a step as before, but preempts the latest request in the step after so many."""
    inner, left = scheduler.planner.start_step, [num_steps]

    def preempt_latest(step: PlanBuilder) -> None:
        inner(step)
        left[0] -= 1
        if left[0] == -1:
            scheduler.planner.preempt(step, scheduler.queues.running[-1])

    return preempt_latest


CASES = [("float32", False, 1), ("bfloat16", False, 3), ("float32", True, 3)]


@pytest.mark.parametrize(("dtype", "caching", "n"), CASES)
def test_request_swapped_at_any_position_goes_on_as_if_alone(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, caching: bool, n: int
) -> None:
    """In the prompt, in chunks of 4 beside another request; at its end; before and after a block is full."""
    params = SamplingParams(n=n, max_tokens=20, temperature=0.8, seed=7, ignore_eos=True, logprobs=1)
    others = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompt = [40 + i for i in range(19)]
    with LLM(
        demo_model, dtype=dtype, max_model_len=64, block_size=8, max_num_batched_tokens=5,
        enable_prefix_caching=caching, num_kv_blocks=40, num_swap_blocks=40, preemption_mode="swap",
    ) as llm:  # fmt: skip
        alone = answers_of(llm.generate([prompt], params, use_tqdm=False)[0])
        scheduler = llm._engine.engine.scheduler
        llm._engine.engine._max_steps_in_flight = 1  # a victim is not planned ahead
        for num_steps in range(2, 24):
            unseen = {"prompt_token_ids": prompt, "cache_salt": str(num_steps)}
            with monkeypatch.context() as patched:
                patched.setattr(scheduler.planner, "start_step", preempting(scheduler, num_steps))
                output = llm.generate([[30, 31, 32], unseen], [others, params], use_tqdm=False)[1]
            assert answers_of(output) == alone, f"swapped after {num_steps} steps"
            assert output.metrics is not None
            assert output.metrics.num_preemptions == 1
        assert scheduler.preemption.stats.num_preemptions["swap"] == 22


def test_swapped_request_can_be_left(demo_model: Path) -> None:
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    with LLM(
        demo_model, max_model_len=64, block_size=8, num_kv_blocks=10, num_swap_blocks=20, preemption_mode="swap"
    ) as llm:
        first, victim = llm.stream([[5]], params), llm.stream([[6]], params)
        next(first)
        next(victim)
        while llm.kv_stats().swap_used_blocks == 0:
            next(first)
        victim.close()  # type: ignore[attr-defined]
        assert llm.kv_stats().swap_used_blocks == 0
        *_, last = first
        assert len(last.outputs[0].token_ids) == 50


def test_too_little_room_for_the_swap_space_is_one_clear_error(demo_model: Path, tmp_path: Path) -> None:
    where = "the host's memory" if torch.cuda.is_available() else f"swap_dir '{tmp_path}'"
    with pytest.raises(ConfigError, match=rf"the swap space takes \d+ bytes, .* free in {where}"):
        LLM(demo_model, swap_space="900000TiB", swap_dir=tmp_path)


RANDOM = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "head_dim": 16,
}  # fmt: skip
NEWER: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"num_hidden_layers": 4},
    "Cohere2ForCausalLM": {"sliding_window": 11, "num_hidden_layers": 4},
    "CohereForCausalLM": {"use_qk_norm": True},
    "Olmo2ForCausalLM": {},
    "Glm4ForCausalLM": {},
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 11},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("family", NEWER)
def test_newer_families_come_back_from_preemption(family: str, tmp_path: Path) -> None:
    """Windows beside full layers, layers without positions, sinks and experts: by recompute and by swap."""
    folder = write_random_folder(tmp_path, RANDOM | {"architectures": [family]} | NEWER[family])
    prompts = [[number + 3] * 20 + [number] for number in range(6)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=1, logprobs=1)
    with LLM(folder, enable_prefix_caching=False) as llm:
        alone = [answers_of(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt in prompts]
    for mode in ("recompute", "swap"):
        settings: dict[str, Any] = {"preemption_mode": mode, "num_swap_blocks": 60 if mode == "swap" else 0}
        with LLM(folder, max_model_len=72, num_kv_blocks=14, block_size=8, **settings) as llm:
            assert [answers_of(each) for each in llm.generate(prompts, params, use_tqdm=False)] == alone
            assert llm.kv_stats().preemptions[mode] > 0
