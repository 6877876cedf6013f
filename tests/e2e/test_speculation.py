"""Answers with drafts are those without, to the bit; faults of verification are not missed.

Each engine serves requests of every kind at once, with one thread: on a loaded machine two wait for each other in most
of these small steps. `make matrix` runs the whole product of drafters, ways back from a preemption, prefix hits and
dtypes, each with every budget beside every length of drafts and either dtype of the cache beside each of both. Other
axes, numbers of threads among them, are in `test_covering_table.py`.
"""

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import quire.execution.row_results
from quire import LLM, SamplingParams
from quire.core.plan import RowResult, StepPlan
from quire.execution import row_results, worker
from quire.execution.batch import PersistentBatch, StepInputs
from quire.scheduling import result_recorder
from support.answers import Answer, answers_of
from support.oracle_drafter import CountedDrafter, let_draft
from support.threads import set_num_threads

NUM_TOKENS, MAX_MODEL_LEN = 32, 128
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 1},
    "sampled": {"temperature": 0.8, "seed": 1, "top_p": 0.9, "top_k": 40},
    "penalties": {"temperature": 0.7, "seed": 2, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    "repetition": {"temperature": 0.5, "seed": 3, "repetition_penalty": 1.2, "logprobs": 0},
    "logprobs": {"temperature": 0.4, "seed": 4, "logprobs": 3, "prompt_logprobs": 1, "min_p": 0.05},
    "n": {"temperature": 0.6, "seed": 5, "n": 3, "logprobs": 1},
    "stop": {"temperature": 0.6, "seed": 6, "stop": ["e", "."], "min_tokens": 9, "logprobs": 1},
    "stop token": {"temperature": 0.6, "seed": 7, "logit_bias": {5: 4.0}, "stop_token_ids": [5], "min_tokens": 5},
    "bad words": {"temperature": 0.3, "seed": 8, "bad_words": ["the", "a"], "logprobs": 1},
}
DRAFT_MODEL = Path(__file__).parents[1] / "data/demo-draft"
DRAFTERS: dict[str, dict[str, Any]] = {
    "oracle": {"method": "ngram"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
    "draft": {"method": "draft_model", "model": str(DRAFT_MODEL)},
}
PREEMPTION: dict[str, dict[str, Any]] = {
    "none": {},
    "recompute": {"num_kv_blocks": 26, "block_size": 8, "preemption_mode": "recompute"},
    "swap": {"num_kv_blocks": 26, "block_size": 8, "preemption_mode": "swap", "num_swap_blocks": 300},
}


class Setting(NamedTuple):
    """Settings of an engine."""

    drafter: str
    preemption: str = "none"
    has_hits: bool = False
    dtype: str = "float32"
    weights: str | None = None
    kv_dtype: str = "auto"
    budget: int = 64
    num_drafts: int = 5


Answers = list[tuple[list[Answer], object]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    set_num_threads(1)
    yield
    set_num_threads(num_threads)


@cache
def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, half of which repeat themselves and half of which begin alike, and a request of each kind."""
    rng = random.Random(3)
    common = [rng.randrange(6, 300) for _ in range(24)]
    prompts = []
    for number in range(len(KINDS)):
        own = [rng.randrange(6, 300) for _ in range(rng.randint(2, 30))]
        prompts.append((common if number % 2 else own[:8] * 3) + own)
    return prompts, [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **kind) for kind in KINDS.values()]


def llm_of(model: Path, setting: Setting, **options: Any) -> LLM:  # noqa: ANN401
    return LLM(
        model, dtype=setting.dtype, quantization=setting.weights, kv_cache_dtype=setting.kv_dtype,
        max_model_len=MAX_MODEL_LEN, **options,
    )  # fmt: skip


def ask(llm: LLM, prompts: list[list[int]]) -> Answers:
    outputs = llm.generate(prompts, requests()[1], use_tqdm=False)
    assert llm.kv_stats().used_blocks == 0
    return [(answers_of(output), [b.text for b in output.outputs], output.prompt_logprobs) for output in outputs]


@cache
def rounds_without_drafts(model: Path, plain: Setting) -> list[tuple[list[list[int]], Answers]]:
    """Return two rounds of prompts with their answers. The second continues the first, so it finds that in the cache.

    `plain` has the dtypes.
    """
    first = requests()[0]
    with llm_of(model, plain, enable_prefix_caching=False) as llm:
        answers = ask(llm, first)
        second = [prompt + list(own[0].token_ids) for prompt, (own, *_) in zip(first, answers, strict=True)]
        return [(first, answers), (second, ask(llm, second))]


def check(model: Path, setting: Setting) -> CountedDrafter:
    """Compare the answers with drafts; return the count of drafts."""
    plain = Setting("", dtype=setting.dtype, weights=setting.weights, kv_dtype=setting.kv_dtype)
    rounds = rounds_without_drafts(model, plain)
    wholes = [
        prompt + list(branch.token_ids)
        for prompts, answers in rounds
        for prompt, (branches, *_) in zip(prompts, answers, strict=True)
        for branch in branches
    ]
    with llm_of(
        model, setting, max_num_batched_tokens=setting.budget, enable_prefix_caching=setting.has_hits,
        speculative_config=DRAFTERS[setting.drafter] | {"num_speculative_tokens": setting.num_drafts},
        **PREEMPTION[setting.preemption],
    ) as llm:  # fmt: skip
        counted = let_draft(llm, wholes if setting.drafter == "oracle" else None, num_drafts=setting.num_drafts)
        for prompts, expected in rounds:
            for kind, own, wanted in zip(KINDS, ask(llm, prompts), expected, strict=True):
                assert own == wanted, kind
        preemptions = sum(llm.kv_stats().preemptions.values())
    assert (setting.preemption == "none") == (preemptions == 0)
    return counted


@pytest.mark.parametrize("setting", [
    Setting("oracle"),
    Setting("oracle", "recompute", dtype="bfloat16", budget=33),
    Setting("oracle", "swap", has_hits=True, weights="int8", dtype="bfloat16"),
    Setting("oracle", has_hits=True, weights="int4", kv_dtype="int8_per_token_head", num_drafts=16),
    Setting("ngram", "recompute", has_hits=True),
    Setting("suffix", "swap", dtype="bfloat16"),
    Setting("draft", "recompute", has_hits=True, dtype="bfloat16", budget=33),
    Setting("draft", "swap", weights="int8", kv_dtype="int8_per_token_head", num_drafts=16),
], ids=str)  # fmt: skip
def test_answers_with_drafts_are_those_without(demo_model: Path, setting: Setting) -> None:
    counted = check(demo_model, setting)
    assert 0 < counted.num_accepted < counted.num_verified


@pytest.mark.matrix
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("preemption", PREEMPTION)
@pytest.mark.parametrize("has_hits", [False, True], ids=["no hits", "hits"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_every_setting_gives_the_answers_without(
    demo_model: Path, drafter: str, preemption: str, has_hits: bool, dtype: str, weights: str | None
) -> None:
    for place, (budget, num_drafts) in enumerate(product((7, 33, 2048), (1, 4, 16))):
        kv_dtype = ("auto", "int8_per_token_head")[place % 2]
        check(demo_model, Setting(drafter, preemption, has_hits, dtype, weights, kv_dtype, budget, num_drafts))


# --- faults --------------------------------------------------------------------------------------------------------


def one_too_many(patch: pytest.MonkeyPatch) -> None:
    """One draft more is accepted than was right."""
    right = quire.execution.row_results.num_accepted
    patch.setattr(row_results, "num_accepted", lambda drafts, drawn: min(right(drafts, drawn) + 1, len(drafts)))


def compares_from_the_second_draft_on(patch: pytest.MonkeyPatch) -> None:
    """The comparison begins one position off."""
    right = quire.execution.row_results.num_accepted
    patch.setattr(row_results, "num_accepted", lambda drafts, drawn: 1 + right(drafts[1:], drawn[1:]))


def draws_for_the_next_position(patch: pytest.MonkeyPatch) -> None:
    """Samples behind drafts have the random number of the position after theirs."""
    right = PersistentBatch.inputs

    def inputs(self: PersistentBatch, plan: StepPlan, **how: bool) -> StepInputs:
        found = right(self, plan, **how)
        first = np.append(True, found.sample_rows[1:] != found.sample_rows[:-1])
        return found._replace(sample_num_tokens=found.sample_num_tokens + ~first)

    patch.setattr(PersistentBatch, "inputs", inputs)


def reads_logits_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    """Samples behind drafts read the logits one position off."""
    right = PersistentBatch.inputs

    def inputs(self: PersistentBatch, plan: StepPlan, **how: bool) -> StepInputs:
        found = right(self, plan, **how)
        first = np.append(True, found.sample_rows[1:] != found.sample_rows[:-1])
        return found._replace(logit_rows=found.logit_rows - ~first)

    patch.setattr(PersistentBatch, "inputs", inputs)


def keeps_one_rejected_draft(patch: pytest.MonkeyPatch) -> None:
    """The keys and values of a rejected draft count as those of the token in its place."""
    right = row_results.verified

    def verified(*parts: Any) -> tuple[dict[int, RowResult], set[int]]:  # noqa: ANN401
        results, rejected = right(*parts)
        for row, _, drafts in parts[0].drafts:
            own = results[row]
            if len(own.token_ids) <= len(drafts) and own.num_computed is not None:
                results[row] = RowResult(own.token_ids, own.logprobs, own.num_computed + 1)
        return results, rejected

    patch.setattr(worker, "verified", verified)


def takes_nothing_back(patch: pytest.MonkeyPatch) -> None:
    """Rejected drafts count as computed tokens, with their slots."""
    patch.setattr(result_recorder, "_truncations", lambda step, result: ())


def penalizes_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    """Tokens of a row up to its last draft count as its output."""
    right = PersistentBatch.inputs

    def inputs(self: PersistentBatch, plan: StepPlan, **how: bool) -> StepInputs:
        found = right(self, plan, **how)
        last = {row: start + len(drafts) for row, start, drafts in found.drafts}
        ends = [last.get(row, own) for row, own in zip(found.sample_rows, found.sample_num_tokens, strict=True)]
        return found._replace(sample_num_tokens=np.array(ends, dtype=np.int64))

    patch.setattr(PersistentBatch, "inputs", inputs)


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    one_too_many, compares_from_the_second_draft_on, draws_for_the_next_position,
    reads_logits_of_the_token_before, keeps_one_rejected_draft, takes_nothing_back, penalizes_rejected_drafts,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_not_missed(demo_model: Path, fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    """These faults are in verification and scheduling; `tests/kernels/cpp/test_mutants.py` has those of kernels."""
    setting = Setting("oracle", has_hits=True)
    rounds_without_drafts(demo_model, Setting(""))
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises((AssertionError, RuntimeError)):
            check(demo_model, setting)
    check(demo_model, setting)
