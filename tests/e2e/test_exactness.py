"""Promise 1: what else runs, how a prompt is cut and where its blocks lie never change a request's tokens.

Every run is compared bit for bit, tokens and logprobs, with the same requests one by one in an engine with the
default settings. Pairs of settings are in `test_covering_table.py`; all of them run with `make matrix`.
"""

import random
from itertools import product
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from support.answers import Answer, answers_of

DTYPES = ("float32", "bfloat16")
MAX_MODEL_LEN = 128
KINDS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1, "top_p": 0.9},
    {"temperature": 1.2, "seed": 2, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 3, "n": 3},
    {"temperature": 1.0, "seed": 4, "min_p": 0.05, "presence_penalty": 0.5},
)


class Case:
    """A model in one dtype, requests of mixed length and kind, and what each of them gives alone."""

    def __init__(self, folder: Path, dtype: str, num_requests: int = 8, num_tokens: int = 24) -> None:
        self.model, self.dtype = str(folder), dtype
        rng = random.Random(7)
        lengths = [rng.randint(1, MAX_MODEL_LEN - num_tokens) for _ in range(num_requests)]
        self.prompts = [[rng.randrange(3, 500) for _ in range(length)] for length in lengths]
        self.params = [
            SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=2, **KINDS[i % len(KINDS)])  # type: ignore[arg-type]
            for i in range(num_requests)
        ]
        with self._llm() as llm:
            self.alone = [
                answers_of(llm.generate([prompt], own, use_tqdm=False)[0])
                for prompt, own in zip(self.prompts, self.params, strict=True)
            ]

    def _llm(self, **options: int) -> LLM:
        return LLM(self.model, dtype=self.dtype, max_model_len=MAX_MODEL_LEN, **options)

    def together(self, **options: int) -> tuple[list[list[Answer]], list[int]]:
        """All requests at once: their answers, and how often each was preempted."""
        with self._llm(**options) as llm:
            outputs = llm.generate(self.prompts, self.params, use_tqdm=False)
            assert llm.kv_stats().used_blocks == 0
        preemptions = [output.metrics.num_preemptions for output in outputs if output.metrics]
        return [answers_of(output) for output in outputs], preemptions


@pytest.fixture(scope="module", params=list(product(("demo_model", "stories260k"), DTYPES)), ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    model, dtype = request.param
    return Case(request.getfixturevalue(model), dtype)


GRID = list(product((8, 16, 32, 64, 128), (1, 7, 16, 2048)))


@pytest.mark.parametrize("budget", [16, 2048])
def test_preempted_answers_equal_those_alone(case: Case, budget: int) -> None:
    worst = MAX_MODEL_LEN // 8 + 2
    answers, preemptions = case.together(block_size=8, max_num_batched_tokens=budget, num_kv_blocks=worst + 6)
    assert sum(preemptions) > 0, "the pool was not small enough to show anything"
    assert answers == case.alone


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("block_size", "budget"), GRID)
@pytest.mark.parametrize("spare_blocks", [0, 2, 1000])
def test_every_setting_gives_the_same_answers(case: Case, block_size: int, budget: int, spare_blocks: int) -> None:
    worst = MAX_MODEL_LEN // block_size + 2 * (14 // block_size + 2)
    answers, _ = case.together(
        block_size=block_size, max_num_batched_tokens=budget, num_kv_blocks=worst + spare_blocks
    )
    assert answers == case.alone
