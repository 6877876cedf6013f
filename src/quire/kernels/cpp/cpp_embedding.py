"""The embedding lookup in C++; the meaning is that of `quire.kernels.reference`."""

import numpy as np
from numpy.typing import NDArray

from quire.core.arrays import Array
from quire.kernels.cpp import _kernels
from quire.kernels.cpp.dtypes import address, pair
from quire.kernels.linear_weight import Table
from quire.kernels.tensors import added

_KERNELS = pair("embedding")


def embed(
    table: Table, token_ids: NDArray[np.int64], position_table: Array | None = None,
    positions: NDArray[np.int64] | None = None,
) -> Array:  # fmt: skip
    """Return what `reference.embedding.embed` returns; tables without gaps. In float16 no kernel is needed."""
    if not isinstance(table, np.ndarray) or table.dtype not in _KERNELS:
        found: Array = _taken(table, token_ids) if isinstance(table, np.ndarray) else table.look_up(token_ids)
        if position_table is not None:
            found = added(found, _taken(position_table, positions))
        return found
    num_tokens, width = len(token_ids), table.shape[1]
    assert token_ids.dtype == np.int64
    assert table.flags.c_contiguous, "a table with gaps"
    assert token_ids.flags.c_contiguous, "ids with gaps"
    more = 0, 0, 0
    if position_table is not None:
        assert positions is not None
        assert position_table.dtype == table.dtype
        assert position_table.shape[1] == width
        assert positions.dtype == np.int64
        assert positions.shape == token_ids.shape
        assert position_table.flags.c_contiguous, "a table with gaps"
        assert positions.flags.c_contiguous, "positions with gaps"
        more = address(position_table), len(position_table), address(positions)
    out = np.empty((num_tokens, width), table.dtype)
    at = _kernels.address
    _KERNELS[table.dtype](at(table), len(table), at(token_ids), *more, at(out), num_tokens, width)
    return out


def _taken(table: Array, ids: NDArray[np.int64] | None) -> Array:
    """Return rows of a table. IndexError for an id that it has not: NumPy counts negative ones from the end."""
    assert ids is not None
    if ids.size and ids.min() < 0:
        raise IndexError(f"id {ids.min()} of a table of {len(table)} rows")
    return table.take(ids, axis=0)
