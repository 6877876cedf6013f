"""One order of tokens: higher logit first, equal logits by id."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quire.kernels.reference.sampling import order_keys, rank, top_tokens

FEW_VALUES = st.sampled_from([-np.inf, -3e38, -1.5, -1e-45, -0.0, 0.0, 1e-45, 1.5, 3e38, np.inf])
LOGITS = hnp.arrays(np.float32, st.integers(1, 40), elements=FEW_VALUES)


def plain_order(row: np.ndarray) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-float(row[token]), token))


@given(LOGITS, st.data())
def test_top_tokens_are_the_first_of_a_stable_sort(logits: np.ndarray, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(logits)))
    assert top_tokens(order_keys(torch.from_numpy(logits)), count).tolist() == plain_order(logits)[:count]


@given(LOGITS)
def test_a_rank_is_the_place_in_that_order(logits: np.ndarray) -> None:
    keys = order_keys(torch.from_numpy(logits))
    assert [rank(keys, token) for token in plain_order(logits)] == list(range(1, len(logits) + 1))


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 4099, 32_000])
def test_equal_logits_rank_by_id(vocab_size: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(0).integers(0, 2, vocab_size).astype(np.float32))
    top = top_tokens(order_keys(logits), min(3, vocab_size))
    assert torch.equal(top, logits.sort(descending=True, stable=True).indices[: min(3, vocab_size)])
