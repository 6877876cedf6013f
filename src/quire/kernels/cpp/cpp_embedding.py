"""The embedding lookup in C++; the meaning is `quire.kernels.reference.embedding.embed`'s."""

import torch
from torch import Tensor

from quire.kernels.cpp.dtypes import pair
from quire.kernels.embedding import Table
from quire.kernels.reference import embedding

_KERNELS = pair("embedding")


def embed(
    table: Table, token_ids: Tensor, position_table: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:
    """Return what `embedding.embed` returns; tables without gaps. float16 is left to PyTorch: nothing is summed."""
    if not isinstance(table, Tensor) or table.dtype not in _KERNELS:
        return embedding.embed(table, token_ids, position_table, positions)
    num_tokens, width = len(token_ids), table.shape[1]
    assert token_ids.dtype == torch.int64
    assert table.is_contiguous(), "a table with gaps"
    assert token_ids.is_contiguous(), "ids with gaps"
    more = 0, 0, 0
    if position_table is not None:
        assert positions is not None
        assert position_table.dtype == table.dtype
        assert position_table.shape[1] == width
        assert positions.dtype == torch.int64
        assert positions.shape == token_ids.shape
        assert position_table.is_contiguous(), "a table with gaps"
        assert positions.is_contiguous(), "positions with gaps"
        more = position_table.data_ptr(), len(position_table), positions.data_ptr()
    out = torch.empty(num_tokens, width, dtype=table.dtype)
    _KERNELS[table.dtype](
        table.data_ptr(), len(table), token_ids.data_ptr(), *more, out.data_ptr(), num_tokens, width
    )
    return out
