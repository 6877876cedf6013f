"""n > 1: the prompt is computed and stored once, and each branch is a request of its own."""

from pathlib import Path

import pytest

from quire import LLM, SamplingParams, branch_seed
from support.answers import answers_of

BLOCK_SIZE = 16
PARAMS = SamplingParams(n=4, temperature=0.9, seed=11, max_tokens=24, ignore_eos=True, logprobs=1)


def long_prompt(length: int) -> list[int]:
    return [5 + (i * 37) % 400 for i in range(length)]


@pytest.mark.parametrize(("length", "num_copies"), [(320, 0), (325, 3)], ids=["at a border", "inside a block"])
def test_prompt_blocks_count_once_and_tails_are_copied(demo_model: Path, length: int, num_copies: int) -> None:
    with LLM(str(demo_model), block_size=BLOCK_SIZE) as llm:
        stream = llm.stream([long_prompt(length)], PARAMS)
        next(stream)
        after_prompt = llm.kv_stats()
        assert after_prompt.used_blocks == -(-length // BLOCK_SIZE), "four branches, one prompt"
        assert after_prompt.shared_blocks == after_prompt.used_blocks
        next(stream)
        growing = llm.kv_stats()
        assert growing.copied_blocks == num_copies, "one copy per branch but the last"
        assert growing.used_blocks == length // BLOCK_SIZE + 4
        assert [output.finished for output in stream][-1]
        assert llm.kv_stats().used_blocks == 0


@pytest.mark.parametrize("num_kv_blocks", [None, 33], ids=["roomy", "preempted"])
@pytest.mark.parametrize("length", [320, 325])
def test_branches_equal_independent_requests_with_their_seeds(
    demo_model: Path, length: int, num_kv_blocks: int | None
) -> None:
    seeds = [branch_seed(11, index) for index in range(4)]
    alone = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=24, ignore_eos=True, logprobs=1) for seed in seeds
    ]
    with LLM(str(demo_model), block_size=BLOCK_SIZE, max_model_len=512, num_kv_blocks=num_kv_blocks) as llm:
        neighbour = SamplingParams(n=3, seed=5, max_tokens=60, ignore_eos=True)  # grows, and came first
        outputs = llm.generate([long_prompt(16)[::-1], long_prompt(length)], [neighbour, PARAMS], use_tqdm=False)
        independent = [
            answers_of(llm.generate([long_prompt(length)], own, use_tqdm=False)[0])[0] for own in alone
        ]
    assert outputs[1].metrics is not None
    assert (outputs[1].metrics.num_preemptions > 0) == (num_kv_blocks is not None)
    assert answers_of(outputs[1]) == independent
