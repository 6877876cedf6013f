"""Linear layers in C++ over weights that are packed once, at load, into huge pages. csrc/linear.cpp tells how."""

import mmap

import torch
from torch import Tensor

from quire.kernels.cpp import _kernels
from quire.kernels.cpp.dtypes import address, kernel_dtype, pair
from quire.kernels.linear import Activation

HUGE_PAGE_BYTES = 2 << 20
READ_AHEAD_BYTES = 32 << 10  # prefetches reach behind the last weight
_MULTIPLY, _PACK, _PACKED_SIZE = pair("linear"), pair("pack"), pair("packed_size")


class CppLinear:
    """y = activation(x W^T + b) for x [num_rows, in_features]; result [num_rows, out_features].

    weight [out_features, in_features], bias [out_features] or None; of silu_and_mul both have twice as many rows, gates
    and then ups. bfloat16 is multiplied as it is and summed in float32; everything else is multiplied in float32.
    `dtype` is the result's: the weight's, or float32.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        activation: Activation = "none",
    ) -> None:
        num_parts = 2 if activation == "silu_and_mul" else 1
        self._out_features, self._in_features = weight.shape[0] // num_parts, weight.shape[1]
        self._dtype = kernel_dtype(weight.dtype)
        self._out_dtype = dtype or weight.dtype
        self._sum_dtype = torch.float32 if self._out_dtype != self._dtype else self._dtype  # as the kernel writes it
        self._packed = _pack(weight.to(self._dtype), num_parts)
        self.num_bytes = self._packed.nbytes
        self._bias = None if bias is None else bias.float().contiguous()
        self._fixed = (
            self._packed.data_ptr(),
            self._out_features,
            address(self._bias),
        )
        self._multiply = _MULTIPLY[self._dtype]
        self._activation = getattr(_kernels.Activation, activation)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply all rows in one call; how many there are changes no row."""
        num_rows, width = x.shape
        assert width == self._in_features, f"{tuple(x.shape)} for {self._in_features} inputs"
        if x.dtype != self._dtype or x.stride(1) != 1:
            x = x.to(self._dtype).contiguous()
        out = torch.empty(num_rows, self._out_features, dtype=self._sum_dtype)
        self._multiply(
            x.data_ptr(),
            num_rows,
            width,
            x.stride(0),
            *self._fixed,
            out.data_ptr(),
            self._out_features,
            self._sum_dtype == torch.float32,
            self._activation,
        )
        return out if self._sum_dtype == self._out_dtype else out.to(self._out_dtype)


def _pack(weight: Tensor, num_parts: int) -> Tensor:
    """Return the packed form of a weight; of two parts, such as gates and ups, strips take turns."""
    parts = [part.contiguous() for part in weight.chunk(num_parts)]
    size = _PACKED_SIZE[weight.dtype](*parts[0].shape)
    strip_size = _PACKED_SIZE[weight.dtype](1, weight.shape[1])
    packed = huge_pages(num_parts * size, weight.dtype)
    for i, part in enumerate(parts):
        place = packed[i * strip_size :]
        _PACK[weight.dtype](part.data_ptr(), part.stride(0), *part.shape, place.data_ptr(), num_parts)
    return packed


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
