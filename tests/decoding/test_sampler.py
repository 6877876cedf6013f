"""The sampler against the same steps written out in plain Python, one row and one token at a time."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.plan import NewRow
from quire.core.sampling_params import SamplingParams
from quire.core.structured_outputs import StructuredOutputsParams
from quire.decoding.sampler import NOTHING_ALLOWED, SampledTokens, SamplingBatch, SamplingState, sample
from quire.kernels.sampling import SamplingOps, uniforms
from support.on_tensors import logits_of

SampleRows = Callable[..., SampledTokens]
ANY_GRAMMAR = StructuredOutputsParams(regex=".*")  # the masks are made by the tests

TOLERANCE = 1e-5  # error of a float32 softmax over a few thousand tokens, in probability
SLACKS = (1.0, 1 - TOLERANCE, 1 + TOLERANCE)


def plain_edit(new: NewRow, raw: np.ndarray, grammar: Collection[int] | None) -> np.ndarray:
    """Masks, bias and penalties in float32, token by token. `grammar`: the tokens that it allows."""
    params, output = new.params, new.token_ids[new.num_prompt_tokens :]
    logits = raw.copy()
    if grammar is not None:
        logits[[token for token in range(len(raw)) if token not in grammar]] = -np.inf
    if params.allowed_token_ids is not None:
        logits[[token for token in range(len(raw)) if token not in params.allowed_token_ids]] = -np.inf
    forbidden = {word[-1] for word in new.bad_words_token_ids if (*output, word[-1])[-len(word) :] == word}
    if grammar is not None:
        logits[list(forbidden)] = -np.inf
        forbidden = set()
    if len(output) < params.min_tokens:
        forbidden |= new.eos_token_ids | set(params.stop_token_ids or ())
    if any(logits[token] > -np.inf for token in range(len(raw)) if token not in forbidden):
        logits[list(forbidden)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += np.float32(bias)
    penalty = np.float32(max(params.repetition_penalty, 1e-20))
    for token in set(new.token_ids):
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in Counter(output).items():
        logits[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        logits[token] -= np.float32(params.presence_penalty)
    return logits


def plain_probabilities(params: SamplingParams, logits: np.ndarray, min_p: float, top_p: float) -> np.ndarray:
    """Temperature, min_p, top_k and top_p in float64."""
    scaled = (logits - logits.max()).astype(np.float64) / max(params.temperature, float(np.finfo(np.float32).tiny))
    weights = np.exp(scaled)
    if min_p > 0:
        weights[scaled < np.log(min_p)] = 0  # as weights they would round to 1 when the logits are almost equal
    order = np.argsort(-logits, kind="stable")  # of equal logits, the lowest id first
    weights[order[params.top_k or len(order) :]] = 0
    if top_p < 1:
        ranked = weights[order] / weights.sum()
        weights[order[np.cumsum(ranked) - ranked >= top_p]] = 0
    return weights / weights.sum()


def check_token(new: NewRow, raw: np.ndarray, token: int, grammar: Collection[int] | None) -> None:
    """Check that `token` is the one at the draw's place in the distribution, give or take rounding at a border."""
    logits, params = plain_edit(new, raw, grammar), new.params
    if params.temperature == 0:
        assert token == int(np.argmax(logits))
        return
    index = len(new.token_ids) - new.num_prompt_tokens
    uniform = uniforms(np.array([new.seed], dtype=np.uint64), np.array([index]))[0]
    for min_p_slack, top_p_slack in product(SLACKS, SLACKS):
        top_p = params.top_p * top_p_slack if params.top_p < 1 else 1.0
        probabilities = plain_probabilities(params, logits, min(1.0, params.min_p * min_p_slack), top_p)
        end = probabilities[: token + 1].sum()
        start = end - probabilities[token]
        if probabilities[token] > 0 and start - TOLERANCE <= uniform <= end + TOLERANCE:
            return
    pytest.fail(f"token {token} is not where uniform {uniform} points, for {new}")


def new_rows(vocab_size: int) -> st.SearchStrategy[NewRow]:
    token = st.integers(0, vocab_size - 1)
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-300, 0.01, 0.7, 1.0, 100.0]),
        top_p=st.sampled_from([1e-300, 0.3, 0.5, 0.9, 0.9999, 1.0]),
        top_k=st.sampled_from([0, 1, 2, 5, 10**6]),
        min_p=st.sampled_from([0.0, 1e-300, 0.1, 0.5, 1.0]),
        presence_penalty=st.sampled_from([0.0, -2.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, -0.3, 2.0]),
        repetition_penalty=st.sampled_from([1.0, 1e-300, 0.5, 1.3, 100.0]),
        min_tokens=st.integers(0, 4),
        stop_token_ids=st.none() | st.lists(token, max_size=3),
        logit_bias=st.none() | st.dictionaries(token, st.floats(-100, 100), max_size=3),
        allowed_token_ids=st.none() | st.lists(token, min_size=1, max_size=5),
        structured_outputs=st.none() | st.just(ANY_GRAMMAR),
    )
    return st.builds(
        lambda prompt, output, **fields: NewRow(0, prompt + output, len(prompt), [], **fields),
        prompt=st.lists(token, min_size=1, max_size=4),
        output=st.lists(token, max_size=5),
        params=params,
        seed=st.integers(0, 2**64 - 1),
        eos_token_ids=st.frozensets(token, max_size=2),
        bad_words_token_ids=st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    )


@settings(max_examples=200)
@given(st.data())
def test_tokens_are_those_of_the_plain_steps(sample_rows: SampleRows, data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([1, 2, 5, 17, 70]))
    rows = data.draw(st.lists(new_rows(vocab_size), min_size=1, max_size=6))
    places = data.draw(st.permutations(range(len(rows))))
    rows = [replace(new, row=place) for place, new in zip(places, rows, strict=True)]
    value = st.sampled_from([-1.0, 0.0, 1.0, 1.5]) | st.floats(-30, 30, width=32)
    values = data.draw(st.lists(value, min_size=vocab_size, max_size=vocab_size))
    logits = np.stack([np.roll(np.array(values, dtype=np.float32), shift) for shift in range(len(rows))])
    tokens = st.frozensets(st.integers(0, vocab_size - 1), min_size=1)
    grammars = {index: data.draw(tokens) for index, new in enumerate(rows) if new.params.structured_outputs}
    sampled = sample_rows(rows, logits, grammars)
    for index, (new, row_logits, token) in enumerate(zip(rows, logits, sampled.token_ids, strict=True)):
        own, listed = grammars.get(index), new.params.allowed_token_ids
        if own is not None and np.isneginf(plain_edit(new, row_logits, own)).all():
            field = "bad_words" if listed is None else "allowed_token_ids"
            assert NOTHING_ALLOWED[sampled.failures[index]] == field
        else:
            assert index not in sampled.failures
            check_token(new, row_logits, token, own)


def test_grammar_holds_when_the_other_masks_leave_nothing(sample_rows: SampleRows) -> None:
    """No bad word, end before min_tokens or bias of a token that is not allowed wins."""
    logits = np.zeros((2, 40), dtype=np.float32)
    params = SamplingParams(
        temperature=0.0, min_tokens=3, logit_bias={9: 100.0}, structured_outputs=ANY_GRAMMAR, logprobs=1
    )
    ends, words = frozenset({7}), ((8,),)
    new_rows = [NewRow(row, [5], 1, [], params, 0, eos_token_ids=ends, bad_words_token_ids=words) for row in range(2)]
    found = sample_rows(new_rows, logits, {0: {7, 8}, 1: {7, 8, 30}})
    assert found.token_ids == [7, 30]
    assert found.logprobs is not None
    for record in found.logprobs:
        assert record is not None
        assert record.logprobs == pytest.approx([-np.log(40)] * 2)  # taken from the raw logits
        assert record.token_ids[1] == 0


def test_row_with_a_grammar_is_not_drawn_without_its_mask(sample_rows: SampleRows) -> None:
    params = SamplingParams(structured_outputs=ANY_GRAMMAR)
    new_rows = [NewRow(row, [5], 1, [], params if row else SamplingParams(), seed=0) for row in range(2)]
    for allowed in ({}, {0: {1}}, {0: {1}, 1: {1}}):
        with pytest.raises(AssertionError, match="masks"):
            sample_rows(new_rows, np.zeros((2, 40), dtype=np.float32), allowed)
    assert sample_rows(new_rows, np.zeros((2, 40), dtype=np.float32), {1: {3}}).token_ids[1] == 3


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0])
def test_nuclei_of_any_size_are_the_plain_ones(sample_rows: SampleRows, spread: float) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, spread, (48, 20_000)).astype(np.float32)
    rows = [
        NewRow(row, [0], 1, [], SamplingParams(top_p=top_p, top_k=top_k), seed=row)
        for row, (top_p, top_k) in enumerate(product([0.01, 0.2, 0.9, 0.999], [0, 1, 64, 65, 1024, 1025] * 2))
    ]
    for new, row_logits, token in zip(rows, logits, sample_rows(rows, logits).token_ids, strict=True):
        check_token(new, row_logits, token, None)


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 63, 4096, 4099])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 300])
def test_greedy_takes_the_lowest_id_of_equal_logits(sample_rows: SampleRows, num_rows: int, vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 2, (num_rows, vocab_size)).astype(np.float32)
    logits[logits == 0] = -0.0
    rows = [NewRow(row, [0], 1, [], SamplingParams(temperature=0), seed=0) for row in range(num_rows)]
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sample_rows(rows, logits).token_ids == expected


def test_top_k_one_and_the_smallest_top_p_and_min_p_one_are_greedy(sample_rows: SampleRows) -> None:
    logits = np.random.default_rng(0).normal(0, 1, (300, 500)).astype(np.float32)
    logits[:, 100:] = logits[:, 100:].round()
    for narrow in ({"top_k": 1}, {"top_p": 5e-324}, {"temperature": 5e-324, "top_k": 1}):
        rows = [NewRow(row, [0], 1, [], SamplingParams(**narrow), seed=row) for row in range(300)]
        assert sample_rows(rows, logits).token_ids == logits.argmax(axis=1).tolist()
    rows = [NewRow(row, [0], 1, [], SamplingParams(min_p=1.0), seed=row) for row in range(300)]
    drawn = logits[np.arange(300), sample_rows(rows, logits).token_ids]
    assert (drawn == logits.max(axis=1)).all()


def test_a_draw_is_the_philox_number_of_its_seed_and_index(ops: SamplingOps) -> None:
    state = SamplingState(1, 10)
    state.set(NewRow(0, [1, 2, 3], 3, [], SamplingParams(), seed=42))
    num_tokens = np.arange(3, 203)
    rows, token_ids = np.zeros(200, dtype=int), np.zeros((1, 300), np.int32)
    logits = logits_of(ops, np.zeros((200, 10), np.float32))
    sampled = sample(SamplingBatch.of(state, rows, token_ids, num_tokens), logits, ops)
    numbers = uniforms(np.full(200, 42, dtype=np.uint64), np.arange(200))
    assert sampled.token_ids == np.floor(numbers * 10).astype(int).tolist()


def test_allowed_token_ids_hold_when_the_other_masks_leave_nothing(sample_rows: SampleRows) -> None:
    logits = np.zeros((3, 8), dtype=np.float32)
    only_eos = SamplingParams(allowed_token_ids=[5], min_tokens=3, temperature=0)
    rows = [
        NewRow(0, [0], 1, [], only_eos, seed=0, eos_token_ids=frozenset({5})),
        NewRow(1, [0], 1, [], SamplingParams(allowed_token_ids=[2, 6]), seed=0, bad_words_token_ids=((2,), (6,))),
        NewRow(2, [0], 1, [], SamplingParams(allowed_token_ids=[5, 6], min_tokens=1), 0, frozenset({5})),
    ]
    first, second, third = sample_rows(rows, logits).token_ids
    assert first == 5
    assert second in {2, 6}
    assert third == 6


@pytest.mark.parametrize("penalty", [5e-324, 1e-45, 1e-38])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_smallest_repetition_penalty_brings_back_no_forbidden_token(
    sample_rows: SampleRows, penalty: float, temperature: float
) -> None:
    """Only 0 of the known tokens 0, 1 and 2 may come; times 0 its rivals' minus infinity would be NaN, which wins."""
    params = SamplingParams(repetition_penalty=penalty, temperature=temperature, allowed_token_ids=[0, 4])
    rows = [NewRow(0, [1, 0, 2], 1, [], params, seed=0)]
    assert sample_rows(rows, np.array([[3.0, 9.0, -9.0, 1.0, 2.0]], dtype=np.float32)).token_ids == [0]


def test_min_tokens_forbids_ends_until_then_and_no_longer(sample_rows: SampleRows) -> None:
    logits = np.array([[9.0, 8.0, 7.0]] * 2, dtype=np.float32)
    params = SamplingParams(min_tokens=2, stop_token_ids=[1], temperature=0)
    rows = [
        NewRow(0, [2, 2], 1, [], params, 0, frozenset({0})),
        NewRow(1, [2, 2, 2], 1, [], params, 0, frozenset({0})),
    ]
    assert sample_rows(rows, logits).token_ids == [2, 0]


def test_a_row_of_nan_gives_some_token_and_leaves_the_others_alone(sample_rows: SampleRows) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (12, 2000)).astype(np.float32)
    options = [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0}, {"repetition_penalty": 1.1}]
    rows = [NewRow(row, [0], 1, [], SamplingParams(**options[row % 6]), seed=row) for row in range(12)]
    expected = sample_rows(rows, logits).token_ids
    logits[6:] = np.nan
    sampled = sample_rows(rows, logits).token_ids
    assert sampled[:6] == expected[:6]
    assert all(0 <= token < 2000 for token in sampled[6:])


def test_new_owner_of_a_row_gets_nothing_that_the_last_one_asked_for(ops: SamplingOps) -> None:
    state = SamplingState(1, 5)
    params = SamplingParams(logprobs=2, logit_bias={1: 100.0}, repetition_penalty=2.0)
    state.set(NewRow(0, [0], 1, [], params, seed=0))
    state.set(NewRow(0, [0], 1, [], SamplingParams(temperature=0), seed=0))
    logits = logits_of(ops, np.array([[0, 1, 3, 2, 3]], np.float32))
    samples = SamplingBatch.of(state, np.array([0]), np.zeros((1, 4), np.int32), np.array([1]))
    assert sample(samples, logits, ops)[:2] == ([2], None)


# --- rows that are no numbers -----------------------------------------------------------------------------------------

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(seed=1),
    "cut": SamplingParams(seed=1, top_k=3, top_p=0.9, min_p=0.01),
    "with logprobs": SamplingParams(seed=1, logprobs=2),
    "edited": SamplingParams(seed=1, logit_bias={3: 5.0}, presence_penalty=1.0, min_tokens=2, logprobs=0),
    "allowed": SamplingParams(seed=1, allowed_token_ids=[1, 2, 3, 4]),
}


@pytest.mark.parametrize("params", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_row_that_is_no_numbers_fails_and_no_other_notices(
    sample_rows: SampleRows, params: SamplingParams, value: float
) -> None:
    rng = np.random.default_rng(5)
    new_rows = [
        NewRow(row, [5, 6, 7], 3, [], params, seed=row, eos_token_ids=frozenset({0})) for row in range(5)
    ]
    logits = rng.normal(size=(5, 40)).astype(np.float32)
    expected = sample_rows(new_rows, logits)
    assert expected.failures == {}
    logits[2] = value
    logits[4, 3] = abs(value)
    found = sample_rows(new_rows, logits)
    assert found.failures.keys() == {2, 4}
    for row in (0, 1, 3):
        assert found.token_ids[row] == expected.token_ids[row]
        if expected.logprobs is not None and found.logprobs is not None:
            assert found.logprobs[row] == expected.logprobs[row]


def test_no_number_that_a_mask_hides_fails_only_where_logprobs_are_wanted(sample_rows: SampleRows) -> None:
    logits = np.zeros((2, 40), dtype=np.float32)
    logits[:, 9] = np.nan
    plain = SamplingParams(seed=1, allowed_token_ids=[1, 2])
    new_rows = [NewRow(0, [5], 1, [], plain, seed=0), NewRow(1, [5], 1, [], replace(plain, logprobs=1), seed=0)]
    found = sample_rows(new_rows, logits)
    assert found.failures.keys() == {1}
    assert found.token_ids[0] in (1, 2)
