"""The embedding lookup in C++; the meaning is `quire.kernels.embedding.embed`'s."""

import torch
from torch import Tensor

from quire.kernels import embedding
from quire.kernels.cpp.dtypes import address, kernel_dtype, pair
from quire.kernels.embedding import Table

_KERNELS = pair("embedding")


def embed(
    table: Table, token_ids: Tensor, position_table: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:
    """Return what `embedding.embed` returns; tables without gaps. float16 is left to PyTorch: nothing is summed."""
    if not isinstance(table, Tensor) or kernel_dtype(table.dtype) != table.dtype:
        return embedding.embed(table, token_ids, position_table, positions)
    num_tokens, width = len(token_ids), table.shape[1]
    assert token_ids.dtype == torch.int64
    arguments = [table, token_ids]
    num_positions = 0
    if position_table is not None:
        assert positions is not None
        num_positions = len(position_table)
        assert position_table.dtype == table.dtype
        assert position_table.shape[1] == width
        assert positions.dtype == torch.int64
        assert positions.shape == token_ids.shape
        arguments += [position_table, positions]
    assert all(argument.is_contiguous() for argument in arguments), "tables or ids with gaps"
    out = torch.empty(num_tokens, width, dtype=table.dtype)
    _KERNELS[table.dtype](
        table.data_ptr(), len(table), token_ids.data_ptr(), address(position_table), num_positions, address(positions),
        out.data_ptr(), num_tokens, width,
    )  # fmt: skip
    return out
