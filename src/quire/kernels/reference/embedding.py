"""Embedding lookup of token ids, and of positions where they are learned."""

from torch import Tensor

from quire.kernels.linear_weight import Table


def embed(
    table: Table, token_ids: Tensor, position_table: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:
    """Return table[token_ids], plus position_table[positions] where there is one; [num_tokens, width].

    table and position_table [any, width] of one dtype, which rows of a stored table and the result have; token_ids and
    positions [num_tokens] int64. An id past its table is an IndexError.
    """
    tokens = table.index_select(0, token_ids) if isinstance(table, Tensor) else table.look_up(token_ids)
    if position_table is None:
        return tokens
    assert positions is not None
    return tokens + position_table.index_select(0, positions)
