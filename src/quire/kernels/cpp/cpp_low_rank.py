"""B of adapters in C++: the product that the kernels of linear layers add to their sums, by itself."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.cpp.dtypes import kernel_dtype, pair
from quire.kernels.cpp.huge_pages import PackedMemory

_MULTIPLY, _PACK, _PACKED_SIZE = pair("low_rank_product"), pair("pack"), pair("packed_size")


class CppUp:
    """inner B^T for inner [num_rows, rank]; result float32 [num_rows, num_outputs], to the bit what layers add.

    `weight`: B [num_outputs, rank] with its scale. It is packed into `memory` by words, of a float or of a pair of
    bfloat16, and has no more padding than a zero behind an odd rank.
    """

    def __init__(self, weight: Tensor, *, memory: PackedMemory | None = None) -> None:
        self._num_outputs, self._rank = weight.shape
        self._dtype = kernel_dtype(weight.dtype)
        words = weight.to(self._dtype)
        if self._dtype == torch.bfloat16:
            words = pad(words, (0, self._rank % 2)).contiguous().view(torch.float32)
        words, width = words.contiguous(), words.shape[1]
        size = _PACKED_SIZE[torch.float32](self._num_outputs, width)
        self._packed = (memory or PackedMemory()).take(size, torch.float32)
        _PACK[torch.float32](words.data_ptr(), width, self._num_outputs, width, self._packed.data_ptr(), 1)
        self.num_bytes = self._packed.nbytes

    @property
    def packed_address(self) -> int:
        """Where the packed weight begins."""
        return self._packed.data_ptr()

    def __call__(self, inner: Tensor, /) -> Tensor:
        """Multiply all rows in one call; how many there are changes no row."""
        num_rows, rank = inner.shape
        assert rank == self._rank, f"{tuple(inner.shape)} for a rank of {self._rank}"
        inner = inner.to(self._dtype).contiguous()
        out = torch.empty(num_rows, self._num_outputs, dtype=torch.float32)
        _MULTIPLY[self._dtype](
            inner.data_ptr(),
            num_rows,
            rank,
            rank,
            self.packed_address,
            self._num_outputs,
            out.data_ptr(),
            out.stride(0),
        )
        return out
