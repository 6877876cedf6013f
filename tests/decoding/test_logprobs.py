"""Logprobs: log-softmax of the raw logits, the token first, then its rivals by rank."""

from collections.abc import Callable

import numpy as np
import pytest

from quire.core.plan import NewRow
from quire.core.sampling_params import SamplingParams
from quire.decoding import sampler
from quire.decoding.sampler import SampledTokens, prompt_logprobs
from quire.kernels.sampling import SamplingOps
from support.on_tensors import logits_of

SampleRows = Callable[[list[NewRow], np.ndarray], SampledTokens]


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 4, (num_rows, vocab_size)).astype(np.float32)


def plain_log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    shifted = exact - exact.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("count", [0, 1, 5, 33, 1000])
def test_prompt_logprobs_hold_the_token_then_the_likeliest(ops: SamplingOps, count: int) -> None:
    logits = random_logits(20, 33)
    tokens = np.random.default_rng(1).integers(0, 33, 20)
    records = prompt_logprobs(logits_of(ops, logits), tokens, count, ops)
    for row, token, record in zip(logits, tokens.tolist(), records, strict=True):
        order = np.argsort(-row, kind="stable").tolist()
        assert record.token_ids == [token, *order[:count]]
        assert record.ranks == [order.index(token) + 1, *range(1, min(count, 33) + 1)]
        np.testing.assert_allclose(record.logprobs, plain_log_softmax(row)[record.token_ids], rtol=0, atol=2e-6)


def test_equal_logits_rank_by_id(ops: SamplingOps) -> None:
    record = prompt_logprobs(logits_of(ops, np.array([[1, 2, 2, 1]], np.float32)), np.array([3]), 4, ops)[0]
    assert record.token_ids == [3, 1, 2, 0, 3]
    assert record.ranks == [4, 1, 2, 3, 4]


def test_no_prompt_token_gives_no_record(ops: SamplingOps) -> None:
    assert prompt_logprobs(logits_of(ops, np.empty((0, 5), np.float32)), np.empty(0, np.int64), 2, ops) == []


def test_rows_may_name_the_tokens_of_their_logprobs(sample_rows: SampleRows) -> None:
    asked = [{"logprob_token_ids": [7, 3], "logit_bias": {9: 50.0}}, {"logprobs": 2}, {"logprob_token_ids": [0] * 128}]
    new_rows = [
        NewRow(row, [0], 1, [], SamplingParams(**{"logprobs": len(own.get("logprob_token_ids", ())), **own}), seed=row)
        for row, own in enumerate(asked)
    ]
    logits = random_logits(3, 40)
    sampled = sample_rows(new_rows, logits)
    assert sampled.logprobs is not None
    for row, named in ((0, [7, 3]), (2, [0] * 128)):
        record, order = sampled.logprobs[row], np.argsort(-logits[row], kind="stable").tolist()
        assert record is not None
        assert record.token_ids == [sampled.token_ids[row], *named]
        assert record.ranks == [order.index(token) + 1 for token in record.token_ids]
        np.testing.assert_allclose(record.logprobs, plain_log_softmax(logits[row])[record.token_ids], rtol=0, atol=2e-6)
    assert sampled.logprobs[1] == sample_rows([new_rows[1]], logits[1:2]).logprobs[0]  # type: ignore[index]


def test_records_do_not_depend_on_how_many_are_made_at_once(ops: SamplingOps, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, tokens = logits_of(ops, random_logits(20, 33)), np.arange(20)
    whole = prompt_logprobs(logits, tokens, 5, ops)
    for most in (1, 13):
        monkeypatch.setattr(sampler, "CANDIDATES_AT_ONCE", most)
        assert prompt_logprobs(logits, tokens, 5, ops) == whole


def test_only_the_rows_that_ask_get_logprobs(sample_rows: SampleRows) -> None:
    asked = [None, 0, 3, None, 50]
    new_rows = [
        NewRow(row, [0], 1, [], SamplingParams(logprobs=count, temperature=row % 2), seed=row)
        for row, count in enumerate(asked)
    ]
    sampled = sample_rows(new_rows, random_logits(5, 40))
    assert sampled.logprobs is not None
    lengths = [None if record is None else len(record.token_ids) for record in sampled.logprobs]
    assert lengths == [None, 1, 4, None, 41]
    for token, record in zip(sampled.token_ids, sampled.logprobs, strict=True):
        assert record is None or record.token_ids[0] == token


def test_nobody_asking_gives_none(sample_rows: SampleRows) -> None:
    assert sample_rows([NewRow(0, [0], 1, [], SamplingParams(), seed=0)], random_logits(1, 40)).logprobs is None


def test_logprobs_are_those_of_the_raw_logits_whatever_was_edited(sample_rows: SampleRows) -> None:
    logits = random_logits(1, 40)
    least = int(logits[0].argmin())
    edits = {"repetition_penalty": 2.0, "allowed_token_ids": [least], "logit_bias": {least: 50.0}}
    params = SamplingParams(temperature=3.0, top_k=1, logprobs=2, **edits)
    sampled = sample_rows([NewRow(0, [least, 1, 2], 1, [], params, seed=0)], logits)
    assert sampled.token_ids == [least]
    assert sampled.logprobs is not None
    record = sampled.logprobs[0]
    assert record is not None
    assert record.ranks == [40, 1, 2]
    np.testing.assert_allclose(record.logprobs, plain_log_softmax(logits[0])[record.token_ids], rtol=0, atol=2e-6)


def test_one_record_does_not_depend_on_how_many_others_ask_for(ops: SamplingOps) -> None:
    logits, tokens = logits_of(ops, random_logits(300, 4099)), np.arange(300)
    together = prompt_logprobs(logits, tokens, 20, ops)
    for row in (0, 1, 150, 299):
        alone = prompt_logprobs(logits[row : row + 1], tokens[row : row + 1], 20, ops)
        assert alone == [together[row]]
