"""A slot carries nothing from its last owner: with poison in all that is free, every answer is the one given alone.

Free blocks of the cache and of the swap space hold NaN, fresh ones too, and rows without an owner hold nonsense.
Preemption, swaps, forks, prefix hits and copies inside of blocks move through all of it.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearchParams, SamplingParams
from quire.core.errors import RequestFailedError
from quire.extension.isas import usable_isas
from support.answers import Answer, answers_of
from support.poison import Poison, poison_blocks, preempt_now_and_then
from support.random_model import VOCAB_SIZE, write_random_model
from support.threads import set_num_threads

ISAS = usable_isas() or ("auto",)  # auto without the extension: PyTorch's stand-ins
CASES = [
    (ISAS[-1], "float32", "auto"),
    (ISAS[0], "bfloat16", "auto"),
    (ISAS[0], "bfloat16", "fp8"),
    *((isa, "bfloat16", ("int8_per_token_head", "auto")[number % 2]) for number, isa in enumerate(ISAS)),
]
NUM_REQUESTS = 12
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"seed": 1, "top_p": 0.9, "presence_penalty": 0.5},
    {"seed": 2, "n": 3, "logit_bias": {7: 3.0}},
    {"seed": 3, "top_k": 20, "repetition_penalty": 1.2, "prompt_logprobs": 1},
)
OPTIONS: dict[str, Any] = {"max_model_len": 160, "block_size": 8, "max_num_batched_tokens": 50}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("random-model"))


def asked() -> list[tuple[list[int], SamplingParams]]:
    """Prompts that begin alike and end within blocks, of 1 to 90 tokens; a few of them twice."""
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(60)]
    requests = []
    for i in range(NUM_REQUESTS):
        prompt = [*shared[: rng.randrange(60)], *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 30)))]
        params = SamplingParams(max_tokens=rng.randint(1, 24), ignore_eos=True, **KINDS[i % len(KINDS)])
        requests.append((prompt, params))
    return requests


def alone(model: Path, isa: str, dtype: str, kv_dtype: str) -> list[list[Answer]]:
    with LLM(
        model, cpu_isa=isa, dtype=dtype, kv_cache_dtype=kv_dtype, enable_prefix_caching=False, **OPTIONS
    ) as llm:
        return [answers_of(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt, params in asked()]


@pytest.mark.parametrize(("isa", "dtype", "kv_dtype"), CASES)
def test_poison_in_all_that_is_free_changes_no_answer(model: Path, isa: str, dtype: str, kv_dtype: str) -> None:
    num_threads = torch.get_num_threads()
    expected = alone(model, isa, dtype, kv_dtype)
    with LLM(
        model, cpu_isa=isa, dtype=dtype, kv_cache_dtype=kv_dtype, num_kv_blocks=40, num_swap_blocks=60,
        preemption_mode="swap", max_num_seqs=12, **OPTIONS,
    ) as llm:  # fmt: skip
        poison = Poison(llm)
        poison.spread()
        preempt_now_and_then(llm._engine.engine.scheduler)
        prompts, params = zip(*asked(), strict=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.kv_stats()
        llm._engine.engine.scheduler.check()
        beams = llm.beam_search([prompts[0]], BeamSearchParams(beam_width=3, max_tokens=12), use_tqdm=False)[0]
    set_num_threads(num_threads)
    assert [answers_of(output) for output in outputs] == expected
    assert all(token < VOCAB_SIZE for beam in beams.outputs for token in beam.token_ids)
    assert poison.num_poisoned_blocks > 100
    assert poison.num_poisoned_rows > 100
    assert stats.swapped_in_blocks > 0
    assert stats.copied_blocks > 0
    assert stats.prefix_hits_tokens > 0


@pytest.mark.parametrize("kv_dtype", ["auto", "int8_per_token_head", "fp8"])
def test_poison_would_show(model: Path, kv_dtype: str) -> None:
    """A block that is read although it is poisoned fails its request: else the test above proves nothing."""
    with LLM(model, **OPTIONS, kv_cache_dtype=kv_dtype, num_kv_blocks=60) as llm:
        cache = Poison(llm)._worker.compute.cache
        prompts, params = [list(range(40))], SamplingParams(max_tokens=1)
        llm.generate(prompts, params, use_tqdm=False)
        for tensor in (*cache.keys, *cache.values):
            poison_blocks(tensor, list(range(60)))  # what is cached, too
        with pytest.raises(RequestFailedError, match="NaN"):
            llm.generate(prompts, params, use_tqdm=False)
