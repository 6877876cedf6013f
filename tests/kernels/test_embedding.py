"""The lookup of token ids, and of learned positions beside them."""

import pytest
import torch

from quire.kernels.reference.linear import embed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_looked_up_and_added(dtype: torch.dtype) -> None:
    tokens, positions = torch.randn(50, 24).to(dtype), torch.randn(9, 24).to(dtype)
    found = embed(tokens, torch.tensor([49, 0, 3, 3]), positions, torch.tensor([0, 8, 1, 2]))
    assert torch.equal(found, tokens[[49, 0, 3, 3]] + positions[[0, 8, 1, 2]])
    assert torch.equal(embed(tokens, torch.tensor([7])), tokens[7:8])


@pytest.mark.parametrize("token", [-1, 50])
def test_id_past_the_table_is_an_error(token: int) -> None:
    with pytest.raises(IndexError):
        embed(torch.zeros(50, 8), torch.tensor([0, token]))
