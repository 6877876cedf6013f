"""B of adapters in C++: the product that the kernels of linear layers add to their sums, by itself."""

import numpy as np

from quire.core.arrays import BFLOAT16, FLOAT32, Array
from quire.kernels.conversion import converted
from quire.kernels.cpp.cpp_packing import PackedMemory
from quire.kernels.cpp.dtypes import address, kernel_dtype, pair

_MULTIPLY, _PACK, _PACKED_SIZE = pair("low_rank_product"), pair("pack"), pair("packed_size")


class CppUp:
    """inner B^T for inner [num_rows, rank]; result float32 [num_rows, num_outputs], to the bit what layers add.

    `weight`: B [num_outputs, rank] with its scale. It is packed into `memory` by words, of a float or of a pair of
    bfloat16, and has no more padding than a zero behind an odd rank.
    """

    def __init__(self, weight: Array, *, memory: PackedMemory | None = None) -> None:
        self._num_outputs, self._rank = weight.shape
        self._dtype = kernel_dtype(weight.dtype)
        words = np.ascontiguousarray(converted(weight, self._dtype))
        if self._dtype == BFLOAT16:
            padded = np.zeros((self._num_outputs, self._rank + self._rank % 2), BFLOAT16)
            padded[:, : self._rank] = words
            words = padded.view(FLOAT32)
        width = words.shape[1]
        size = _PACKED_SIZE[FLOAT32](self._num_outputs, width)
        self._packed = (memory or PackedMemory()).take(size, FLOAT32)
        _PACK[FLOAT32](address(words), width, self._num_outputs, width, address(self._packed), 1)
        self.num_bytes = self._packed.nbytes

    @property
    def packed_address(self) -> int:
        """Where the packed weight begins."""
        return address(self._packed)

    def __call__(self, inner: Array, /) -> Array:
        """Multiply all rows in one call; how many there are changes no row."""
        num_rows, rank = inner.shape
        assert rank == self._rank, f"{inner.shape} for a rank of {self._rank}"
        inner = np.ascontiguousarray(converted(inner, self._dtype))
        out = np.empty((num_rows, self._num_outputs), FLOAT32)
        _MULTIPLY[self._dtype](
            address(inner),
            num_rows,
            rank,
            rank,
            self.packed_address,
            self._num_outputs,
            address(out),
            self._num_outputs,
        )
        return out
