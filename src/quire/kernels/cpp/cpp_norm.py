"""RMSNorm and LayerNorm in C++; the meanings are those of `quire.kernels.reference.norm`.

A decode step calls them twice per layer for a row that takes the kernel less than a microsecond, so a call does little
else: parameters are checked at construction, and with a residual the results take the arguments' place.
"""

import numpy as np

from quire.core.arrays import Array
from quire.extension import _kernels
from quire.kernels.conversion import converted
from quire.kernels.cpp.dtypes import address, is_in_rows, kernel_dtype, pair, row_stride

_RMS_NORM, _LAYER_NORM = pair("rms_norm"), pair("layer_norm")


class CppNorm:
    """RMSNorm or, with `centers`, LayerNorm; parameters as in `norm.TorchNorm`, called as `norm.Norm` says."""

    def __init__(
        self, weight: Array, bias: Array | None, eps: float, centers: bool, offset: float | None = None
    ) -> None:
        self.dtype, self.width = weight.dtype, weight.shape[-1]
        self.num_heads = len(weight) if weight.ndim == 2 else 1
        self._kernel_dtype = kernel_dtype(weight.dtype)
        assert weight.size == self.num_heads * self.width
        assert bias is None or bias.shape == weight.shape
        self._weight = np.ascontiguousarray(converted(weight, self._kernel_dtype))
        self._bias = None if bias is None else np.ascontiguousarray(converted(bias, self._kernel_dtype))
        self._centers = centers
        self._kernel = (_LAYER_NORM if centers else _RMS_NORM)[self._kernel_dtype]
        parameters = (address(self._weight), address(self._bias), self.width, eps)
        self._parameters = (*parameters, offset is not None, offset or 0.0, self.num_heads)

    @property
    def weights(self) -> _kernels.NormWeights:
        """The norm as the extension takes it, valid for as long as the norm is kept."""
        weight, bias, _, eps, is_wide, offset, num_heads = self._parameters
        return _kernels.NormWeights(weight, bias, eps, self._centers, is_wide, offset, num_heads)

    def __call__(self, x: Array, residual: Array | None = None) -> tuple[Array, Array]:
        """Return `(normed, summed)`; without a residual x may be a slice of rows with gaps between them."""
        assert x.dtype == self.dtype, f"{x.dtype} for a norm in {self.dtype}"
        assert x.shape[-1] == self.width, f"{x.shape} for rows of {self.width}"
        assert self.num_heads == 1 or x.shape[-2] == self.num_heads, f"{x.shape} for {self.num_heads} heads"
        if self.dtype != self._kernel_dtype:
            return self._converted(x, residual)
        if residual is None:
            return self._apart(x), x
        return self._in_place(np.ascontiguousarray(x), residual)

    def _in_place(self, x: Array, residual: Array) -> tuple[Array, Array]:
        assert residual.dtype == self._kernel_dtype
        assert residual.flags.c_contiguous
        num_elements = x.size
        assert residual.size == num_elements
        x_at, residual_at = address(x), address(residual)
        assert x_at != residual_at or num_elements == 0, "the residual cannot be x"
        width = self.width
        self._kernel(x_at, residual_at, residual_at, x_at, num_elements // width, width, *self._parameters)
        return x, residual

    def _apart(self, x: Array) -> Array:
        rows = x if x.ndim == 2 and is_in_rows(x) else np.ascontiguousarray(x).reshape(-1, self.width)
        normed = np.empty(x.shape, self._kernel_dtype)
        self._kernel(address(rows), 0, 0, address(normed), len(rows), row_stride(rows), *self._parameters)
        return normed

    def _converted(self, x: Array, residual: Array | None) -> tuple[Array, Array]:
        if residual is None:
            return converted(self._apart(converted(x, self._kernel_dtype)), self.dtype), x
        normed, summed = self._in_place(
            np.ascontiguousarray(converted(x, self._kernel_dtype)), converted(residual, self._kernel_dtype)
        )
        return converted(normed, self.dtype), converted(summed, self.dtype)
