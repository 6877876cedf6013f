"""Plans and results come back from bytes as they were sent."""

import math
import random
from array import array
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from quire.core.deltas import TokenLogprobs
from quire.core.plan import (
    BlockCopy,
    MeasuredRates,
    NewRow,
    PromptLogprobsChunk,
    RowDrafts,
    RowFork,
    RowResult,
    StepPlan,
    StepResult,
    decode_plan,
    decode_result,
    encode,
)
from quire.core.pooling import NO_SCOPE, Pool, Scope
from quire.core.sampling_params import BeamSearchParams, SamplingParams, as_sampling_params
from quire.core.structured_outputs import StructuredOutputsParams
from quire.core.token_ids import TokenIds, pack_tokens

LARGEST = 2**63 - 1


def ints(rng: random.Random, most: int = 6) -> list[int]:
    return [rng.choice([0, 1, 7, 300, 70_000, LARGEST]) for _ in range(rng.randint(0, most))]


def tokens(rng: random.Random, most: int = 6) -> list[int]:
    return [rng.randrange(150_000) for _ in range(rng.randint(0, most))]


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        n=rng.choice([1, 3]),
        temperature=rng.choice([0.0, 0.7]),
        seed=rng.choice([None, 5, 2**64 - 1, -(2**63)]),
        stop=rng.choice([None, "é", ["a", "b"]]),
        stop_token_ids=rng.choice([None, [2, 3]]),
        logprobs=rng.choice([None, 0, 4]),
        prompt_logprobs=rng.choice([None, 1]),
        logit_bias=rng.choice([None, {3: 1.5, 7: -100.0}]),
        allowed_token_ids=rng.choice([None, [1, 2]]),
        bad_words=rng.choice([None, ["x"]]),
        structured_outputs=rng.choice([None, StructuredOutputsParams(choice=["a", "é"])]),
    )


def random_row(rng: random.Random) -> NewRow:
    beam = rng.choice([None, BeamSearchParams(3, 8, length_penalty=0.5)])
    return NewRow(
        row=rng.randrange(256),
        token_ids=rng.choice([tokens(rng), TokenIds(pack_tokens(tokens(rng)), tokens(rng))]),
        num_prompt_tokens=rng.randrange(99),
        block_ids=rng.choice([[], array("q", ints(rng))]),
        params=as_sampling_params(beam) if beam is not None else random_params(rng),
        seed=rng.getrandbits(64),
        eos_token_ids=frozenset(tokens(rng)),
        bad_words_token_ids=tuple(tuple(tokens(rng)) for _ in range(rng.randint(0, 3))),
        beam=beam,
        pool=rng.choice([None, Pool("mean", 3), Pool("last", token_ids=(4, 5))]),
        scope=rng.choice([NO_SCOPE, Scope("é"), Scope(None, "adapter")]),
    )


def copies(rng: random.Random) -> list[BlockCopy]:
    return [BlockCopy(src, src + 1) for src in tokens(rng, 3)]


def random_plan(rng: random.Random) -> StepPlan:
    return StepPlan(
        row_forks=[RowFork(1, 2, 3, 4, array("q", ints(rng))) for _ in range(rng.randint(0, 2))],
        new_rows=[random_row(rng) for _ in range(rng.randint(0, 3))],
        table_rows=ints(rng), table_columns=ints(rng), table_blocks=ints(rng),
        swap_outs=copies(rng), swap_ins=copies(rng), copies=copies(rng),
        rows=ints(rng), starts=ints(rng), counts=ints(rng),
        sample_rows=ints(rng), sample_tokens=ints(rng), stored_entries=ints(rng),
        drafts=[RowDrafts(row, 8, tokens(rng)) for row in tokens(rng, 2)],
    )  # fmt: skip


def random_logprobs(rng: random.Random) -> TokenLogprobs:
    ids = tokens(rng) or [5]
    return TokenLogprobs(ids, [rng.choice([-math.inf, -rng.random()]) for _ in ids], list(range(1, len(ids) + 1)))


def random_row_result(rng: random.Random) -> RowResult:
    ids = tokens(rng, 3)
    return RowResult(
        token_ids=ids,
        logprobs=rng.choice([None, [random_logprobs(rng) for _ in ids]]),
        num_computed=rng.choice([None, 0, 17]),
        has_ended=rng.random() < 0.5,
        forced=tokens(rng, 3),
        drafts=tokens(rng, 3),
        pooled=rng.choice([None, rng.randbytes(16)]),
    )


def random_result(rng: random.Random) -> StepResult:
    ids = tokens(rng)
    return StepResult(
        token_ids=ids,
        logprobs=rng.choice([None, [rng.choice([None, random_logprobs(rng)]) for _ in ids]]),
        prompt_logprobs=[PromptLogprobsChunk(row, 1, [random_logprobs(rng)]) for row in tokens(rng, 2)],
        swap_s=rng.random(),
        rates=MeasuredRates(rng.random(), None, rng.random()),
        failures=dict.fromkeys(tokens(rng, 2), "its next token could not be drawn"),
        rows={row: random_row_result(rng) for row in tokens(rng, 3)},
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_plan_comes_back_whole(seed: int) -> None:
    plan = random_plan(random.Random(seed))
    expected = structs.replace(
        plan,
        row_forks=[fork._replace(block_ids=list(fork.block_ids)) for fork in plan.row_forks],
        new_rows=[replace(new, token_ids=list(new.token_ids), block_ids=list(new.block_ids)) for new in plan.new_rows],
    )
    assert decode_plan(encode(plan)) == expected


@pytest.mark.parametrize("seed", range(40))
def test_random_result_comes_back_whole(seed: int) -> None:
    result = random_result(random.Random(seed))
    found = decode_result(encode(result))
    assert found == result


def test_result_of_one_token_per_row_takes_a_few_bytes_a_row() -> None:
    assert len(encode(StepResult([7] * 256))) < 256 + 32


def test_message_of_another_form_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_plan(encode(StepResult([1, 2, 3])))
    with pytest.raises(msgspec.ValidationError):
        decode_result(msgspec.msgpack.encode(["no token"]))
