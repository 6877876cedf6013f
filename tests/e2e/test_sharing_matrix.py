"""Promise 1 over all that shares and moves blocks: what is cached, forked, searched, swapped or lost changes no bit.

Every run is compared, tokens and logprobs, with the same request alone, the cache off and nothing preempted. A victim
is preempted in each step in which it has got a token further, so at every position of its answer.
"""

import random
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, RequestOutput, SamplingParams
from quire.core.sequence import Request
from quire.scheduling.plan_builder import PlanBuilder
from support.answers import Answer, answers_of
from support.pairwise import pairwise

MAX_MODEL_LEN = 224
NUM_TOKENS = 12
PREFIX_LEN = 150

FACTORS = (
    tuple(product(("demo_model", "stories260k"), ("float32", "bfloat16"))),
    (8, 16, 64),                                                            # block size
    (1, 16, 2048),                                                          # token budget of a step
    ("off", "cold", "no block", "one block", "blocks", "inside", "all"),    # the cache, and where a match in it ends
    ("none", "recompute", "swap"),                                          # preemptions
    ("one", "four", "beams"),                                               # branches
)


def random_tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(length)]


PREFIX = random_tokens(1, PREFIX_LEN)


def prompt_for(hit: str, block_size: int) -> list[int]:
    """A prompt that has so much in common with PREFIX."""
    num_blocks = PREFIX_LEN // block_size
    num_common = {
        "off": PREFIX_LEN, "cold": PREFIX_LEN, "no block": 0, "one block": block_size,
        "blocks": num_blocks * block_size, "inside": num_blocks * block_size - 3, "all": num_blocks * block_size,
    }[hit]  # fmt: skip
    return PREFIX[:num_common] + ([] if hit == "all" else random_tokens(2, 5))


def ask(llm: LLM, prompt: list[int], branches: str) -> RequestOutput:
    if branches == "beams":
        (output,) = llm.beam_search([prompt], BeamSearchParams(4, NUM_TOKENS, ignore_eos=True), use_tqdm=False)
        return output
    settings: dict[str, Any] = {"n": 4, "temperature": 0.8, "seed": 3} if branches == "four" else {"temperature": 0.0}
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, **settings)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output


@cache
def alone(folder: str, dtype: str, prompt: tuple[int, ...], branches: str) -> list[Answer]:
    with LLM(folder, dtype=dtype, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False) as llm:
        return answers_of(ask(llm, list(prompt), branches))


def preempt_at_every_position(llm: LLM) -> None:
    """Let the engine preempt every request in each step in which it has more tokens, or fewer branches, than before."""
    llm._engine.engine._max_steps_in_flight = 1  # each step is planned when the tokens before it are known
    scheduler = llm._engine.engine.scheduler
    plan_running: Callable[[PlanBuilder, int], int] = scheduler.planner.plan_running
    lengths: dict[int, int] = {}

    def preempt_first(step: PlanBuilder, budget: int) -> int:
        for request in scheduler.running[::-1]:
            if lengths.get(request.request_id) != length_of(request) > 0:
                lengths[request.request_id] = length_of(request)
                scheduler.planner.preempt(step, request)
        return plan_running(step, budget)

    scheduler.planner.plan_running = preempt_first  # type: ignore[method-assign]


def length_of(request: Request) -> int:
    return sum(sequence.num_output_tokens for sequence in request.live)


def check_setting(
    folder: str, dtype: str, block_size: int, budget: int, hit: str, recovery: str, branches: str
) -> None:
    prompt, is_swap = prompt_for(hit, block_size), recovery == "swap"
    with LLM(
        folder,
        dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        block_size=block_size,
        max_num_batched_tokens=budget,
        num_kv_blocks=2000 // block_size,
        enable_prefix_caching=hit != "off",
        preemption_mode="swap" if is_swap else "recompute",
        num_swap_blocks=1000 // block_size if is_swap else None,
    ) as llm:
        if hit not in ("off", "cold"):
            ask(llm, PREFIX, "one")
        if recovery != "none":
            preempt_at_every_position(llm)
        output = ask(llm, prompt, branches)
        stats = llm.kv_stats()
    assert answers_of(output) == alone(folder, dtype, tuple(prompt), branches)
    assert (stats.used_blocks, stats.swap_used_blocks) == (0, 0)
    assert (output.num_cached_tokens > 0) == (hit not in ("off", "cold", "no block"))
    num_preemptions = 0 if recovery == "none" else NUM_TOKENS - 1
    assert stats.preemptions.get("swap" if is_swap else "recompute", 0) >= num_preemptions
    assert (stats.swapped_out_blocks > 0) == is_swap


@pytest.mark.parametrize(("model", "block_size", "budget", "hit", "recovery", "branches"), pairwise(FACTORS))
def test_any_two_settings_together_change_nothing(
    request: pytest.FixtureRequest,
    model: tuple[str, str],
    block_size: int,
    budget: int,
    hit: str,
    recovery: str,
    branches: str,
) -> None:
    name, dtype = model
    check_setting(str(request.getfixturevalue(name)), dtype, block_size, budget, hit, recovery, branches)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "block_size", "branches"), list(product(FACTORS[0], FACTORS[1], FACTORS[5])))
def test_all_settings_together_change_nothing(
    request: pytest.FixtureRequest, model: tuple[str, str], block_size: int, branches: str
) -> None:
    name, dtype = model
    folder = str(request.getfixturevalue(name))
    for budget, hit, recovery in product(*FACTORS[2:5]):
        check_setting(folder, dtype, block_size, budget, hit, recovery, branches)
