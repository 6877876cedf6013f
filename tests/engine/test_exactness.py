"""Promise 1 on every instruction set: under random schedules a request gives the tokens and logprobs it gives alone.

Requests arrive while others run, with contexts past the borders between the kernels' partitions, in a pool with room
for hardly more than one of them; with `make matrix` in every combination of instruction set, dtype, thread count, block
size, token budget and room. `alone` is one request after the other in an engine with the default settings and one
thread. Pairs of all settings are in `tests/e2e/test_covering_table.py`.
"""

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.core.config import KERNEL_BLOCK_SIZES
from quire.extension.isas import usable_isas
from quire.kernels.choice import choose_back_end
from support.answers import Answer, answers_of
from support.random_model import MAX_MODEL_LEN, VOCAB_SIZE, write_random_model
from support.threads import set_num_threads

ISAS = usable_isas() or ("auto",)  # auto without the extension: PyTorch's stand-ins
LENGTHS = (1, 255, 300, 17, 520, 256, 64, 100, 77, 128)  # lengths of prompts
TIGHT_MODEL_LEN = 320
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 1, "top_p": 0.9},
    {"temperature": 0.8, "seed": 2, "n": 2},
    {"temperature": 1.1, "seed": 3, "top_k": 20, "repetition_penalty": 1.2},
)


class Setting(NamedTuple):
    """What may not change a bit; but instruction set and dtype, within which bits are compared."""

    isa: str
    dtype: str
    num_threads: int
    block_size: int
    budget: int      # tokens per step
    is_tight: bool   # whether the pool holds little more than the longest request


FACTORS: tuple[Sequence[Any], ...] = (
    ISAS,
    ("float32", "bfloat16"),
    (1, 2),
    (8, 16, 128),
    (7, 33, 2048),
    (False, True),
)


@cache
def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of mixed length, some of which begin alike, each with its parameters."""
    rng = random.Random(11)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    prompts[2][:200] = prompts[5][:200] = prompts[7][:200]
    params = [
        SamplingParams(max_tokens=48 if length < 130 else 10, ignore_eos=True, logprobs=2, **KINDS[i % len(KINDS)])
        for i, length in enumerate(LENGTHS)
    ]
    return list(zip(prompts, params, strict=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("random-model"))


@pytest.fixture(autouse=True)
def _engine_as_before() -> Iterator[None]:
    """Put back the number of threads and the instruction set, which are the whole process's."""
    num_threads = torch.get_num_threads()
    yield
    set_num_threads(num_threads)
    choose_back_end(torch.device("cpu"))


@cache
def alone(model: Path, isa: str, dtype: str) -> list[list[Answer]]:
    set_num_threads(1)
    with LLM(model, cpu_isa=isa, dtype=dtype, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False) as llm:
        return [answers_of(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt, params in requests()]


def on_a_random_schedule(llm: LLM, asked: Sequence[int], rush: float, seed: int) -> dict[int, RequestOutput]:
    """Let requests arrive in any order and at any time, some of them to be left early and asked again.

    `rush` is the probability that one more arrives before the next step.
    """
    rng = random.Random(seed)
    waiting = rng.sample(asked, len(asked))
    running: dict[int, Iterator[RequestOutput]] = {}
    last: dict[int, RequestOutput] = {}
    num_left = 2
    while waiting or running:
        if waiting and (not running or rng.random() < rush):
            i = waiting.pop()
            running[i] = llm.stream([requests()[i][0]], requests()[i][1])
        i = rng.choice(list(running))
        output = next(running[i], None)
        if output is None:
            del running[i]
        elif num_left and rng.random() < 0.1:
            running.pop(i).close()  # type: ignore[attr-defined]
            waiting.insert(0, i)
            num_left -= 1
        else:
            last[i] = output
    return last


def check(model: Path, setting: Setting, seed: int) -> int:
    """Compare every answer of a random schedule; return the number of preemptions."""
    expected = alone(model, setting.isa, setting.dtype)
    max_model_len = TIGHT_MODEL_LEN if setting.is_tight else MAX_MODEL_LEN
    asked = [i for i, length in enumerate(LENGTHS) if length + 10 <= max_model_len]
    set_num_threads(setting.num_threads)
    with LLM(
        model,
        cpu_isa=setting.isa,
        dtype=setting.dtype,
        max_model_len=max_model_len,
        block_size=setting.block_size,
        max_num_batched_tokens=setting.budget,
        num_kv_blocks=-(-max_model_len // setting.block_size) + 2 if setting.is_tight else None,
    ) as llm:
        outputs = on_a_random_schedule(llm, asked, 1.0 if setting.is_tight else 0.5, seed)
        assert llm.kv_stats().used_blocks == 0
    assert sorted(outputs) == asked
    for i, output in outputs.items():
        assert answers_of(output) == expected[i], f"request {i}"
    return sum(output.metrics.num_preemptions for output in outputs.values() if output.metrics)


@pytest.mark.parametrize("isa", ISAS)
def test_preempted_requests_give_the_answers_alone(model: Path, isa: str) -> None:
    settings = [Setting(isa, dtype, 2, 8, 2048, is_tight=True) for dtype in FACTORS[1]]
    assert sum(check(model, setting, seed) for seed, setting in enumerate(settings)) > 0, "there was room for all"


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FACTORS[1])
@pytest.mark.parametrize("budget", [1, 7, 33, 200, 2048])
def test_every_setting_gives_the_answers_alone(model: Path, isa: str, dtype: str, budget: int, seed: int) -> None:
    for num_threads, block_size, is_tight in product(FACTORS[2], KERNEL_BLOCK_SIZES, FACTORS[5]):
        check(model, Setting(isa, dtype, num_threads, block_size, budget, is_tight), 100 + seed)


def test_answers_are_no_foregone_conclusion(model: Path) -> None:
    """Logprobs that differ between dtypes, tokens that differ between requests: equality means something."""
    narrow, wide = (alone(model, ISAS[0], dtype) for dtype in ("bfloat16", "float32"))
    assert all(a[0].logprobs != b[0].logprobs for a, b in zip(narrow, wide, strict=True))
    assert len({answer[0].token_ids for answer in wide}) == len(LENGTHS)
