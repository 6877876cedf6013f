"""Memory reserved ahead and static batches on real engines: the same bits as paged, for samples, branches and beams."""

import random

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from support.answers import Answer, answers_of

MAX_MODEL_LEN, NUM_TOKENS = 128, 12


def answers(**options: str | int) -> tuple[list[list[Answer]], list[list[list[int]]], int]:
    """What a few requests and a few beam searches are answered with, and how many blocks were copied for that."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randint(1, MAX_MODEL_LEN - NUM_TOKENS))] for _ in range(7)]
    params = [
        SamplingParams(n=1 + i % 3, temperature=i % 4 / 2, seed=i, max_tokens=1 + 2 * i, ignore_eos=True, logprobs=1)
        for i in range(len(prompts))
    ]
    beam = BeamSearchParams(beam_width=4, max_tokens=NUM_TOKENS)
    with LLM(dtype="float32", max_model_len=MAX_MODEL_LEN, block_size=8, **options) as llm:
        sampled = [answers_of(output) for output in llm.generate(prompts, params, use_tqdm=False)]
        found = llm.beam_search(prompts[:3], beam, use_tqdm=False)
        stats = llm.kv_stats()
    assert stats.used_blocks == 0
    return sampled, [[each.token_ids for each in output.outputs] for output in found], stats.copied_blocks


@pytest.fixture(scope="module")
def paged() -> tuple[list[list[Answer]], list[list[list[int]]], int]:
    return answers()


@pytest.mark.parametrize(
    "options",
    [
        {"memory_policy": "contiguous-max"},
        {"memory_policy": "contiguous-oracle", "max_num_batched_tokens": 33},
        {"memory_policy": "contiguous-max", "batching": "static"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_answers_equal_those_of_paged_bit_for_bit(
    paged: tuple[list[list[Answer]], list[list[list[int]]], int], options: dict[str, str | int]
) -> None:
    sampled, beams, num_copied = answers(num_kv_blocks=75, **options)
    assert (sampled, beams) == paged[:2]
    assert num_copied > 4 * paged[2], "contiguous beams copy whole sequences"
