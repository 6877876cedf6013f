"""Exchange of activations through memory that all ranks of a machine map; csrc/gather.hpp explains it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.cpp import _kernels
from quire.kernels.cpp.cpp_linear import CppLinear
from quire.kernels.cpp.dtypes import kernel_dtype

InterruptedExchangeError = _kernels.InterruptedExchangeError
HEADER_BYTES = _kernels.RankGroup.header_bytes
REGION_BYTES = 4 << 20  # each of two regions, unless a row is longer; more rows are exchanged in parts


class CppGather:
    """A `GatherHook` in C++: rank r has columns [bounds[r], bounds[r + 1]) of an activation."""

    def __init__(self, group: _kernels.RankGroup, rank: int, bounds: Sequence[int]) -> None:
        self.num_own, self.width = bounds[rank + 1] - bounds[rank], bounds[-1]
        self._gather = _kernels.ColumnGather(group, list(bounds))

    @property
    def address(self) -> tuple[int, int]:
        """The function and the context."""
        return self._gather.address()

    def __call__(self, own: Tensor) -> Tensor:
        """Exchange; a dtype of any size."""
        assert own.shape[1:] == (self.num_own,), f"{tuple(own.shape)} for {self.num_own} columns"
        own, rows = own.contiguous(), own.new_empty(len(own), self.width)
        self._gather.gather(own.data_ptr(), rows.data_ptr(), len(own), own.element_size())
        return rows


class CppSum:
    """A `SumHook` in C++, of partial sums of `width` columns."""

    partial_dtype = torch.float32

    def __init__(self, group: _kernels.RankGroup, width: int) -> None:
        self.width = width
        self._sum = _kernels.PartialSum(group, width)

    @property
    def address(self) -> tuple[int, int]:
        """The function and the context."""
        return self._sum.address()

    def __call__(self, own: Tensor, dtype: torch.dtype) -> Tensor:
        """Add. A dtype that kernels serve by conversion is rounded to here."""
        assert own.shape[1:] == (self.width,), f"{tuple(own.shape)} for {self.width} columns"
        assert own.dtype == torch.float32, f"partial sums in {own.dtype}"
        own, out = own.contiguous(), torch.empty(own.shape, dtype=kernel_dtype(dtype))
        self._sum.sum(own.data_ptr(), out.data_ptr(), len(own), out.dtype == torch.float32)
        return out.to(dtype)


class JoinedHead:
    """A head that is split by the vocabulary: each rank writes its logits where rank 0 reads those of all.

    logits: float32 [max_rows, vocab_size], in memory that all ranks map.
    """

    def __init__(
        self, head: CppLinear, group: _kernels.RankGroup, logits: Tensor, columns: tuple[int, int], *, is_first: bool
    ) -> None:
        self._head, self._group, self._logits, self._columns = head, group, logits, slice(*columns)
        self._is_first = is_first
        self.num_bytes = head.num_bytes

    def __call__(self, x: Tensor, addend: Tensor | None = None, /) -> Tensor:
        """Return [num_rows, vocab_size] on rank 0, of other ranks nothing: [0, vocab_size]."""
        assert addend is None, "an addend of a head that is split"
        max_rows = len(self._logits)
        if len(x) <= max_rows:
            return self._portion(x)
        return torch.cat([self._portion(rows).clone() for rows in torch.split(x, max_rows)])

    def _portion(self, x: Tensor) -> Tensor:
        self._group.meet()  # rank 0 reads the logits of the last call no more
        rows = self._logits[: len(x)]
        self._head(x, out=rows[:, self._columns])
        self._group.meet()
        return rows if self._is_first else rows[:0]
