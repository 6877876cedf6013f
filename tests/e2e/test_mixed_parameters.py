"""No request can harm another: every parameter, in pairs, in one crowded batch, gives what it gives alone."""

import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams

NUM_REQUESTS = 48
NUM_PARTS = 6
MAX_TOKENS = 20
PROMPT_LENGTHS = (1, 2, 8, 15, 16, 17, 40)
MAX_MODEL_LEN = 72
COMMON: tuple[str, ...] = ("e", " ", "\n", "s", "x")
SETTINGS: list[dict[str, Any]] = [
    *({"temperature": value} for value in (0, 5e-324, 100)),
    *({"top_p": value} for value in (5e-324, 0.9)),
    *({"top_k": value} for value in (1, 50, 2**31 - 1)),
    *({"min_p": value} for value in (0.1, 1)),
    *({"presence_penalty": value} for value in (-2, 2)),
    *({"frequency_penalty": value} for value in (-2, 2)),
    *({"repetition_penalty": value} for value in (5e-324, 1.2, 100)),
    *({"logit_bias": value} for value in ({0: 100}, dict.fromkeys(range(4096), -100))),
    *({"allowed_token_ids": value} for value in ([0], list(range(100, 300)))),
    {"bad_words": COMMON},
    {"stop_token_ids": list(range(0, 4096, 5))},
    *({"stop": value} for value in (COMMON[:2], ["zq" * 500])),
    {"stop": COMMON[0], "include_stop_str_in_output": True},
    *({"min_tokens": value} for value in (6, 12)),
    *({"logprobs": value} for value in (0, 20)),
    *({"prompt_logprobs": value} for value in (0, 3)),
    *({"seed": value} for value in (-(2**63), 2**64 - 1)),
    *({"n": value} for value in (2, 3)),
    *({"max_tokens": value} for value in (1, 30)),
    {"ignore_eos": True},
    {"skip_special_tokens": False},
]


def random_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    """A prompt around a block's border, and two settings that go together."""
    prompt = [rng.randrange(3, 500) for _ in range(rng.choice(PROMPT_LENGTHS))]
    one, other = rng.sample(SETTINGS, 2)
    return prompt, params_with(rng, one | other)


def request_with(rng: random.Random, given: dict[str, Any]) -> tuple[list[int], SamplingParams]:
    """A prompt around a block's border, and these settings."""
    prompt = [rng.randrange(3, 500) for _ in range(rng.choice(PROMPT_LENGTHS))]
    return prompt, params_with(rng, given)


def params_with(rng: random.Random, given: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": MAX_TOKENS, "seed": rng.randrange(2**40)} | given)


def everything_but_times(output: RequestOutput) -> tuple[object, ...]:
    return output.prompt_token_ids, output.outputs, output.prompt_logprobs, output.finished


@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 9}, {"max_num_seqs": 30}], ids=str)
def test_answers_in_any_company_equal_those_alone(demo_model: Path, settings: dict[str, int]) -> None:
    """Others come and go beside them: streams that are left at random moments, in a pool that is too small."""
    rng = random.Random(str(settings))
    requests = [random_request(rng) for _ in range(NUM_REQUESTS)]
    assert compare_in_company(demo_model, requests, rng, **settings) > 0, "nobody was preempted"


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_parameter_alone_and_with_every_other(demo_model: Path, part: int) -> None:
    """Both ends of each range, in batches of NUM_REQUESTS, among streams that are left."""
    rng = random.Random(part)
    pairs = [one | other for one, other in combinations(SETTINGS, 2) if fit(one, other)]
    every = SETTINGS + pairs
    for first in range(part * NUM_REQUESTS, len(every), NUM_PARTS * NUM_REQUESTS):
        requests = [request_with(rng, given) for given in every[first : first + NUM_REQUESTS]]
        compare_in_company(demo_model, requests, rng, max_num_batched_tokens=rng.choice([9, 64]))


def fit(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two settings can be those of one request."""
    both = one | other
    return not one.keys() & other.keys() and both.get("min_tokens", 0) <= both.get("max_tokens", MAX_TOKENS)


def compare_in_company(
    demo_model: Path, requests: list[tuple[list[int], SamplingParams]], rng: random.Random, **settings: int
) -> int:
    """Run requests alone and all together, and compare; return how many were preempted."""
    prompts, params = zip(*requests, strict=True)
    with LLM(str(demo_model), max_model_len=MAX_MODEL_LEN) as llm:
        alone = [
            llm.generate([prompt], own, use_tqdm=False)[0] for prompt, own in zip(prompts, params, strict=True)
        ]
    with LLM(str(demo_model), max_model_len=MAX_MODEL_LEN, block_size=8, num_kv_blocks=18, **settings) as llm:
        passing = [llm.stream([9] * 9, SamplingParams(n=2, max_tokens=40, ignore_eos=True)) for _ in range(3)]
        for stream in passing:
            next(stream)
        together: dict[int, RequestOutput] = {}
        for output in llm.stream(prompts, params):
            if passing and rng.random() < 0.02:
                passing.pop(0).close()
            if output.finished:
                together[int(output.request_id)] = output
        for stream in passing:
            stream.close()
        assert llm.kv_stats().used_blocks == 0
    for expected, (_, output), own in zip(alone, sorted(together.items()), params, strict=True):
        assert everything_but_times(output) == everything_but_times(expected), own
    return sum(output.metrics is not None and output.metrics.num_preemptions > 0 for output in together.values())
