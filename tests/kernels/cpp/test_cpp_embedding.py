"""The embedding lookup in C++: to the bit what the plain one gives."""

import pytest
import torch

from quire.kernels.reference import linear
from support.cpp_kernels import embed
from support.pairwise import covering


@covering(
    {
        "num_tokens": [0, 1, 200],
        "width": [1, 16, 50, 896],
        "dtype": [torch.float32, torch.bfloat16, torch.float16],
        "num_threads": [1, 2],
    },
    indirect=["num_threads"],
)
def test_lookup_equals_the_plain_one(num_tokens: int, width: int, dtype: torch.dtype, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(width)
    tokens, learned = (torch.randn(count, width, generator=generator).to(dtype) for count in (300, 64))
    token_ids = torch.randint(300, (num_tokens,), generator=generator)
    positions = torch.randint(62, (num_tokens,), generator=generator)
    assert torch.equal(embed(tokens, token_ids), linear.embed(tokens, token_ids))
    arguments = (tokens, token_ids, learned[2:], positions)  # OPT's positions begin at its third row
    assert torch.equal(embed(*arguments), linear.embed(*arguments))


@pytest.mark.parametrize("token", [-1, 50, 1 << 40])
def test_id_past_a_table_is_an_error(token: int) -> None:
    table, ids = torch.zeros(50, 8), torch.tensor([0, token])
    with pytest.raises(IndexError, match=f"row {token} of a table of 50"):
        embed(table, ids)
    with pytest.raises(IndexError, match=f"row {token}"):
        embed(table, torch.tensor([0, 1]), table, ids)
