"""A row's token and logprobs are the same alone, in any company, at any place, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from quire.core.plan import NewRow
from quire.core.sampling_params import SamplingParams
from quire.decoding.sampler import SampledTokens
from support.threads import set_num_threads

SampleRows = Callable[[list[NewRow], np.ndarray], SampledTokens]

# Every parameter that the sampler reads, at both ends of its range and in between.
ENDS = [
    *({"temperature": value} for value in (0, 5e-324, 0.6, 100)),
    *({"top_p": value} for value in (5e-324, 0.9, 1)),
    *({"top_k": value} for value in (-1, 0, 1, 40, 2**31 - 1)),
    *({"min_p": value} for value in (0, 0.05, 1)),
    *({"presence_penalty": value} for value in (-2, 2)),
    *({"frequency_penalty": value} for value in (-2, 2)),
    *({"repetition_penalty": value} for value in (5e-324, 1.1, 100)),
    *({"logit_bias": value} for value in ({}, {0: -100, 1: 100})),
    *({"allowed_token_ids": value} for value in ([0], [0, 1])),
    *({"stop_token_ids": value} for value in ([], [0], [0, 1])),
    *({"min_tokens": value} for value in (0, 16)),
    *({"logprobs": value} for value in (0, 3, 2**31 - 1)),
    *({"seed": value} for value in (-(2**63), 2**64 - 1)),
    {"bad_words": ["x"]},
]


def make_row(row: int, options: dict[str, object], vocab_size: int) -> NewRow:
    rng = np.random.default_rng(row)
    tokens = rng.integers(0, vocab_size, 2 + row % 7).tolist()
    params = SamplingParams(**options)
    bad_words = ((0,), (tokens[-1], 1)) if params.bad_words else ()
    seed = (params.seed or row) % 2**64
    return NewRow(row, tokens, 1 + row % 2, [], params, seed, frozenset({vocab_size - 1}), bad_words)


def make_logits(num_rows: int, vocab_size: int) -> np.ndarray:
    """Peaked, plain, flat, rounded to bfloat16 and constant rows in turn."""
    logits = np.random.default_rng(1).normal(0, 1, (num_rows, vocab_size)).astype(np.float32)
    logits *= np.resize(np.array([8, 2, 0.01, 2, 0], dtype=np.float32), num_rows)[:, None]
    logits[3::5] = torch.from_numpy(logits[3::5]).bfloat16().float().numpy()
    return logits


def all_pairs() -> list[dict[str, object]]:
    """Every setting alone, and with every setting of every other parameter."""
    return ENDS + [one | other for one, other in combinations(ENDS, 2) if one.keys() != other.keys()]


def outcome(sampled: SampledTokens, place: int) -> tuple[object, ...]:
    return sampled.token_ids[place], sampled.logprobs[place] if sampled.logprobs else None


def test_every_pair_of_settings_gives_the_same_alone_and_among_all_others(sample_rows: SampleRows) -> None:
    rows = [make_row(row, options, vocab_size=67) for row, options in enumerate(all_pairs())]
    logits = make_logits(len(rows), 67)
    together = sample_rows(rows, logits)
    assert all(0 <= token < 67 for token in together.token_ids)
    for place, new in enumerate(rows):
        alone = sample_rows([replace(new, row=0)], logits[place : place + 1])
        assert outcome(alone, 0) == outcome(together, place), new


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("vocab_size", [2, 37, 4099, 20_011])
def test_random_company_changes_nothing(sample_rows: SampleRows, vocab_size: int, num_threads: int) -> None:
    rng = np.random.default_rng(vocab_size)
    pairs = all_pairs()
    rows = [make_row(row, pairs[pick], vocab_size) for row, pick in enumerate(rng.integers(0, len(pairs), 60))]
    rows = [replace(new, params=replace(new.params, logprobs=row % 4 or None)) for row, new in enumerate(rows)]
    logits = make_logits(60, vocab_size)
    expected = sample_rows(rows, logits)
    before = torch.get_num_threads()
    set_num_threads(num_threads)
    try:
        for _ in range(4):
            company = rng.permutation(60)[: rng.integers(1, 60)]
            places = rng.permutation(80)[: len(company)].tolist()
            moved = [replace(rows[who], row=place) for who, place in zip(company, places, strict=True)]
            sampled = sample_rows(moved, logits[company])
            for place, who in enumerate(company):
                record = None if expected.logprobs is None else expected.logprobs[who]
                assert outcome(sampled, place) == (expected.token_ids[who], record)
    finally:
        set_num_threads(before)
