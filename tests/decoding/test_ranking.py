"""One order of tokens: higher logit first, equal logits by id."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quire.decoding.ranking import order_keys, ranks, row_chunks, top_tokens

FEW_VALUES = st.sampled_from([-np.inf, -3e38, -1.5, -1e-45, -0.0, 0.0, 1e-45, 1.5, 3e38, np.inf])
LOGITS = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=40), elements=FEW_VALUES)


def plain_order(row: np.ndarray) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-float(row[token]), token))


@given(LOGITS, st.data())
def test_top_tokens_are_the_first_of_a_stable_sort(logits: np.ndarray, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, logits.shape[1]))
    top = top_tokens(order_keys(torch.from_numpy(logits)), count)
    assert top.tolist() == [plain_order(row)[:count] for row in logits]


@given(LOGITS, st.data())
def test_a_rank_is_the_place_in_that_order(logits: np.ndarray, data: st.DataObject) -> None:
    tokens = [data.draw(st.integers(0, logits.shape[1] - 1)) for _ in logits]
    keys = order_keys(torch.from_numpy(logits))
    expected = [plain_order(row).index(token) + 1 for row, token in zip(logits, tokens, strict=True)]
    assert ranks(keys, torch.tensor(tokens)).tolist() == expected


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 4099, 32_000])
@pytest.mark.parametrize("num_rows", [1, 2, 300])
def test_equal_logits_rank_by_id_in_any_shape(num_rows: int, vocab_size: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(0).integers(0, 2, (num_rows, vocab_size)).astype(np.float32))
    top = top_tokens(order_keys(logits), min(3, vocab_size))
    assert torch.equal(top, logits.sort(dim=1, descending=True, stable=True).indices[:, : min(3, vocab_size)])


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(0, 5), (1, 1), (5, 1 << 19), (3, 1 << 21), (1000, 4096)])
def test_chunks_cover_every_row_once(num_rows: int, vocab_size: int) -> None:
    covered = [row for part in row_chunks(num_rows, vocab_size) for row in range(num_rows)[part]]
    assert covered == list(range(num_rows))
