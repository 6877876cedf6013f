"""What a beam brings from a step: its likeliest tokens, scored after the temperature, whatever else is sampled."""

from collections.abc import Callable

import numpy as np
import pytest

from quire.core.deltas import TokenLogprobs
from quire.core.plan import NewRow
from quire.core.sampling_params import BeamSearchParams, SamplingParams, as_sampling_params
from quire.decoding.sampler import SampledTokens

SampleRows = Callable[[list[NewRow], np.ndarray], SampledTokens]
VOCAB_SIZE = 40


def beam_row(row: int, width: int, temperature: float, num_eos: int = 1) -> NewRow:
    beam = BeamSearchParams(width, 8, temperature=temperature)
    return NewRow(
        row, [0], 1, [], as_sampling_params(beam), seed=row, eos_token_ids=frozenset(range(num_eos)), beam=beam
    )


def record_of(sampled: SampledTokens, index: int) -> TokenLogprobs:
    assert sampled.logprobs is not None
    record = sampled.logprobs[index]
    assert record is not None
    return record


def random_logits(num_rows: int) -> np.ndarray:
    return np.random.default_rng(3).normal(0, 4, (num_rows, VOCAB_SIZE)).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 3.0])
def test_candidates_are_the_likeliest_after_the_temperature(sample_rows: SampleRows, temperature: float) -> None:
    logits = random_logits(1)
    record = record_of(sample_rows([beam_row(0, 3, temperature, num_eos=2)], logits), 0)
    exact = logits[0].astype(np.float64) / (temperature or 1)
    expected = exact - np.log(np.exp(exact - exact.max()).sum()) - exact.max()
    assert record.token_ids[1:] == np.argsort(-logits[0], kind="stable")[: 3 + 2].tolist()
    np.testing.assert_allclose(record.logprobs, expected[record.token_ids], rtol=0, atol=1e-5)


def test_no_more_candidates_than_tokens(sample_rows: SampleRows) -> None:
    record = record_of(sample_rows([beam_row(0, VOCAB_SIZE, 0.0)], random_logits(1)), 0)
    assert sorted(record.token_ids[1:]) == list(range(VOCAB_SIZE))


@pytest.mark.parametrize("temperature", [1e-38, 1e-5])
def test_hardly_any_temperature_leaves_one_token_and_no_nan(sample_rows: SampleRows, temperature: float) -> None:
    logits = random_logits(1)
    record = record_of(sample_rows([beam_row(0, 2, temperature)], logits), 0)
    assert record.token_ids[1] == logits[0].argmax()
    assert record.logprobs[1] == 0
    assert record.logprobs[2] < -1000


def test_beams_and_samples_of_one_batch_keep_their_bits(sample_rows: SampleRows) -> None:
    sampling = SamplingParams(temperature=0.8, logprobs=3, repetition_penalty=1.3)
    rows = [
        beam_row(0, 4, 0.7),
        NewRow(1, [5, 6], 1, [], sampling, seed=9),
        beam_row(2, 2, 0.0),
        NewRow(3, [5], 1, [], SamplingParams(temperature=0.0), seed=0),
    ]
    logits = random_logits(4)
    together = sample_rows(rows, logits)
    assert together.logprobs is not None
    for index, row in enumerate(rows):
        alone = sample_rows([row], logits[index : index + 1])
        assert alone.token_ids == [together.token_ids[index]]
        assert (alone.logprobs or [None]) == [together.logprobs[index]]
