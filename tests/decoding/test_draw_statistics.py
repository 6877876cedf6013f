"""A hundred thousand draws against the probabilities that NumPy computes, by chi-square."""

import numpy as np
import pytest
import torch
from scipy import stats

from quire.core.plan import NewRow
from quire.core.sampling_params import SamplingParams, branch_seed
from quire.decoding.sampler import SamplingBatch, SamplingState, sample
from quire.kernels.choice import choose_back_end
from quire.kernels.sampling import SamplingOps

NUM_DRAWS = 100_000
VOCAB_SIZE = 60
LEAST_P_VALUE = 1e-3
LOGITS = np.random.default_rng(11).normal(0, 1.3, VOCAB_SIZE).astype(np.float32)


@pytest.fixture(scope="module")
def ops() -> SamplingOps:
    """Return the fastest ops: the others choose the same tokens (tests/kernels/cpp/test_cpp_sampling.py)."""
    return choose_back_end(torch.device("cpu")).sampling


def draw_many(
    ops: SamplingOps, params: SamplingParams, seeds: list[int], num_indices: int, logits: np.ndarray
) -> np.ndarray:
    """Draw the first `num_indices` output tokens of each seed; returns [num_seeds, num_indices]."""
    state = SamplingState(len(seeds), len(logits))
    for row, seed in enumerate(seeds):
        state.set(NewRow(row, [0], 1, [], params, seed))
    rows = np.repeat(np.arange(len(seeds)), num_indices)
    num_tokens = 1 + np.tile(np.arange(num_indices), len(seeds))
    batch = np.broadcast_to(logits, (len(rows), len(logits)))
    sampled = sample(SamplingBatch.of(state, rows, np.zeros((len(seeds), 1), np.int32), num_tokens), batch, ops)
    return np.array(sampled.token_ids).reshape(len(seeds), num_indices)


def probabilities(
    temperature: float = 1.0, top_k: int = VOCAB_SIZE, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    scaled = LOGITS.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < min_p] = 0
    order = np.argsort(-scaled)
    weights[order[top_k:]] = 0
    ranked = weights[order] / weights.sum()
    weights[order[np.cumsum(ranked) - ranked >= top_p]] = 0
    return weights / weights.sum()


def assert_drawn_from(tokens: np.ndarray, expected: np.ndarray) -> None:
    counts = np.bincount(tokens.ravel(), minlength=len(expected))
    possible = expected > 0
    assert not counts[~possible].any()
    assert stats.chisquare(counts[possible], expected[possible] * counts.sum()).pvalue > LEAST_P_VALUE


OPTIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_branchs_draws_follow_the_distribution(ops: SamplingOps, options: dict[str, float]) -> None:
    tokens = draw_many(ops, SamplingParams(**options), [2024], NUM_DRAWS, LOGITS)
    assert_drawn_from(tokens, probabilities(**options))


@pytest.mark.parametrize("options", OPTIONS[:1] + OPTIONS[-1:], ids=str)
def test_first_draws_of_many_branches_follow_the_distribution(ops: SamplingOps, options: dict[str, float]) -> None:
    seeds = [branch_seed(5, branch) for branch in range(20_000)]
    assert_drawn_from(draw_many(ops, SamplingParams(**options), seeds, 5, LOGITS), probabilities(**options))


def test_branches_and_steps_are_independent(ops: SamplingOps) -> None:
    tokens = draw_many(ops, SamplingParams(), [branch_seed(9, branch) for branch in range(100)], 1000, LOGITS[:8])
    neighbours = {
        "branches": (tokens[:-1], tokens[1:]),
        "steps": (tokens[:, :-1], tokens[:, 1:]),
        "both": (tokens[:-1, :-1], tokens[1:, 1:]),
    }
    for name, (one, other) in neighbours.items():
        table = np.bincount((one * 8 + other).ravel(), minlength=64).reshape(8, 8)
        assert stats.chi2_contingency(table).pvalue > LEAST_P_VALUE, name


def test_seeds_that_differ_by_one_are_independent(ops: SamplingOps) -> None:
    tokens = draw_many(ops, SamplingParams(), list(range(100)), 1000, LOGITS[:8])
    table = np.bincount((tokens[:-1] * 8 + tokens[1:]).ravel(), minlength=64).reshape(8, 8)
    assert stats.chi2_contingency(table).pvalue > LEAST_P_VALUE
