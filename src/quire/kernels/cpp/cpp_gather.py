"""Exchange of activations through memory that all ranks of a machine map; csrc/gather.hpp explains it."""

from collections.abc import Sequence

import numpy as np

from quire.core.arrays import FLOAT32, Array, DType
from quire.extension import _kernels
from quire.kernels.conversion import converted
from quire.kernels.cpp.cpp_linear import CppLinear
from quire.kernels.cpp.dtypes import kernel_dtype
from quire.kernels.layers import SumHook

InterruptedExchangeError = _kernels.InterruptedExchangeError
HEADER_BYTES = _kernels.RankGroup.header_bytes


class CppGather:
    """A `GatherHook` in C++: rank r has columns [bounds[r], bounds[r + 1]) of an activation."""

    def __init__(self, group: _kernels.RankGroup, rank: int, bounds: Sequence[int]) -> None:
        self.num_own, self.width = bounds[rank + 1] - bounds[rank], bounds[-1]
        self._gather = _kernels.ColumnGather(group, list(bounds))

    @property
    def address(self) -> tuple[int, int]:
        """The function and the context."""
        return self._gather.address()

    def __call__(self, own: Array) -> Array:
        """Exchange; a dtype of any size."""
        assert own.shape[1:] == (self.num_own,), f"{own.shape} for {self.num_own} columns"
        own, rows = np.ascontiguousarray(own), np.empty((len(own), self.width), own.dtype)
        self._gather.gather(_kernels.address(own), _kernels.address(rows), len(own), own.itemsize)
        return rows


class CppSum:
    """A `SumHook` in C++, of partial sums of `width` columns."""

    partial_dtype = FLOAT32

    def __init__(self, group: _kernels.RankGroup, width: int) -> None:
        self.width = width
        self._sum = _kernels.PartialSum(group, width)

    @property
    def address(self) -> tuple[int, int]:
        """The function and the context."""
        return self._sum.address()

    def __call__(self, own: Array, dtype: DType) -> Array:
        """Add. A dtype that kernels serve by conversion is rounded to here."""
        assert own.shape[1:] == (self.width,), f"{own.shape} for {self.width} columns"
        assert own.dtype == FLOAT32, f"partial sums in {own.dtype}"
        own, out = np.ascontiguousarray(own), np.empty(own.shape, kernel_dtype(dtype))
        self._sum.sum(_kernels.address(own), _kernels.address(out), len(own), out.dtype == FLOAT32)
        return converted(out, dtype)


def sum_exchange(sums: SumHook | None) -> _kernels.SumExchange:
    """Return a hook as the extension takes it; None: sums are whole."""
    if sums is None:
        return _kernels.SumExchange(0, 0)
    assert sums.address is not None, "a sum without a function of the extension"
    return _kernels.SumExchange(*sums.address)


class JoinedHead:
    """A head that is split by the vocabulary: each rank writes its logits where rank 0 reads those of all.

    logits: float32 [max_rows, vocab_size], in memory that all ranks map.
    """

    def __init__(
        self, head: CppLinear, group: _kernels.RankGroup, logits: Array, columns: tuple[int, int], *, is_first: bool
    ) -> None:
        self._head, self._group, self._logits, self._columns = head, group, logits, slice(*columns)
        self._is_first = is_first
        self.num_bytes = head.num_bytes

    def __call__(self, x: Array, addend: Array | None = None, /) -> Array:
        """Return [num_rows, vocab_size] on rank 0, of other ranks nothing: [0, vocab_size]."""
        assert addend is None, "an addend of a head that is split"
        max_rows = len(self._logits)
        if len(x) <= max_rows:
            return self._portion(x)
        return np.concatenate([self._portion(x[i : i + max_rows]).copy() for i in range(0, len(x), max_rows)])

    def _portion(self, x: Array) -> Array:
        self._group.meet()  # rank 0 reads the logits of the last call no more
        rows = self._logits[: len(x)]
        self._head(x, out=rows[:, self._columns])
        self._group.meet()
        return rows if self._is_first else rows[:0]
