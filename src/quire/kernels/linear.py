"""Linear layers whose weights are packed once, at load, and whose rows never depend on their neighbours."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

ROWS_PER_CALL = 64  # the one row count that the matrix product ever sees


class PackedLinear:
    """y = x W^T + b for x [num_rows, in_features]; result [num_rows, out_features]."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self._weight = weight if dtype is None else weight.to(dtype)
        self._bias = None if bias is None else bias.to(self._weight.dtype)
        self._out_dtype = out_dtype or self._weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        padded = F.pad(x.to(self._weight.dtype), (0, 0, 0, -num_rows % ROWS_PER_CALL))
        out = [F.linear(rows, self._weight, self._bias) for rows in padded.split(ROWS_PER_CALL)]
        return torch.cat(out)[:num_rows].to(self._out_dtype)
