"""Linear layers in C++ over weights that are packed once, at load, into huge pages. csrc/linear.cpp tells how."""

import mmap

import torch
from torch import Tensor

from quire.kernels.cpp import _kernels

HUGE_PAGE_BYTES = 2 << 20
READ_AHEAD_BYTES = 32 << 10  # prefetches reach behind the last weight
ROWS_PER_PORTION = 512       # of the feed-forward: enough to be bound by the matrix units, few enough for the cache


class CppLinear:
    """y = x W^T + b for x [num_rows, in_features]; result [num_rows, out_features]. As `linear.PackedLinear`.

    weight [out_features, in_features], bias [out_features] or None. bfloat16 is multiplied as it is and summed in
    float32; everything else is multiplied in float32. `dtype` is the result's: the weight's, or float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> None:
        self._out_features, self._in_features = weight.shape
        self._dtype = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32
        self._out_dtype = dtype or weight.dtype
        self._sum_dtype = torch.float32 if self._out_dtype != self._dtype else self._dtype  # as the kernel writes it
        kind = "bf16" if self._dtype == torch.bfloat16 else "float"
        size = getattr(_kernels, f"packed_size_{kind}")(self._out_features, self._in_features)
        self._packed = huge_pages(size, self._dtype)
        rows = weight.to(self._dtype).contiguous()
        getattr(_kernels, f"pack_{kind}")(
            rows.data_ptr(), rows.stride(0), self._out_features, self._in_features, self._packed.data_ptr()
        )
        self.num_bytes = self._packed.nbytes
        self._bias = None if bias is None else bias.float().contiguous()
        self._bias_address = 0 if self._bias is None else self._bias.data_ptr()
        self._packed_address = self._packed.data_ptr()
        self._multiply = getattr(_kernels, f"linear_{kind}")

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply all rows in one call; how many there are changes no row."""
        num_rows = x.shape[0]
        assert x.shape == (num_rows, self._in_features), f"{tuple(x.shape)} for {self._in_features} inputs"
        if x.dtype != self._dtype or x.stride(1) != 1:
            x = x.to(self._dtype).contiguous()
        out = torch.empty(num_rows, self._out_features, dtype=self._sum_dtype)
        self._multiply(
            x.data_ptr(),
            num_rows,
            self._in_features,
            x.stride(0),
            self._packed_address,
            self._out_features,
            self._bias_address,
            out.data_ptr(),
            self._out_features,
            self._sum_dtype == torch.float32,
        )
        return out if self._sum_dtype == self._out_dtype else out.to(self._out_dtype)


def huge_pages(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return memory for packed weights, in huge pages where the system has them: half the time on a busy day."""
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < HUGE_PAGE_BYTES:
        return torch.empty(num_elements + READ_AHEAD_BYTES // dtype.itemsize, dtype=dtype)[:num_elements]
    num_pages = (num_bytes + READ_AHEAD_BYTES) // HUGE_PAGE_BYTES + 2  # one for the rest, one to align
    memory = mmap.mmap(-1, num_pages * HUGE_PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[skipped : skipped + num_bytes].view(dtype)
