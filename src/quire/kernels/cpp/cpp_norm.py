"""RMSNorm and LayerNorm in C++; the meanings are those of `quire.kernels.reference.norm`.

A decode step calls them twice per layer for a row that takes the kernel less than a microsecond, so a call does little
else: parameters are checked at construction, and with a residual the results take the arguments' place.
"""

import torch
from torch import Tensor

from quire.kernels.cpp import _kernels
from quire.kernels.cpp.dtypes import address, kernel_dtype, pair

_RMS_NORM, _LAYER_NORM = pair("rms_norm"), pair("layer_norm")


class CppNorm:
    """RMSNorm or, with `centers`, LayerNorm; parameters as in `norm.TorchNorm`, called as `norm.Norm` says."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, eps: float, centers: bool, offset: float | None = None
    ) -> None:
        self.dtype, self.width = weight.dtype, weight.shape[-1]
        self.num_heads = len(weight) if weight.dim() == 2 else 1
        self._kernel_dtype = kernel_dtype(weight.dtype)
        assert weight.numel() == self.num_heads * self.width
        assert bias is None or bias.shape == weight.shape
        self._weight = weight.to(self._kernel_dtype).contiguous()
        self._bias = None if bias is None else bias.to(self._kernel_dtype).contiguous()
        self._centers = centers
        self._kernel = (_LAYER_NORM if centers else _RMS_NORM)[self._kernel_dtype]
        parameters = (self._weight.data_ptr(), address(self._bias), self.width, eps)
        self._parameters = (*parameters, offset is not None, offset or 0.0, self.num_heads)

    @property
    def weights(self) -> _kernels.NormWeights:
        """The norm as the extension takes it, valid for as long as the norm is kept."""
        weight, bias, _, eps, is_wide, offset, num_heads = self._parameters
        return _kernels.NormWeights(weight, bias, eps, self._centers, is_wide, offset, num_heads)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return `(normed, summed)`; without a residual x may be a slice of rows with gaps between them."""
        assert x.dtype == self.dtype, f"{x.dtype} for a norm in {self.dtype}"
        assert x.shape[-1] == self.width, f"{tuple(x.shape)} for rows of {self.width}"
        assert self.num_heads == 1 or x.shape[-2] == self.num_heads, f"{tuple(x.shape)} for {self.num_heads} heads"
        if self.dtype != self._kernel_dtype:
            return self._converted(x, residual)
        if residual is None:
            return self._apart(x), x
        return self._in_place(x if x.is_contiguous() else x.contiguous(), residual)

    def _in_place(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        assert residual.dtype == self._kernel_dtype
        assert residual.is_contiguous()
        num_elements = x.numel()
        assert residual.numel() == num_elements
        x_at, residual_at = x.data_ptr(), residual.data_ptr()
        assert x_at != residual_at or num_elements == 0, "the residual cannot be x"
        width = self.width
        self._kernel(x_at, residual_at, residual_at, x_at, num_elements // width, width, *self._parameters)
        return x, residual

    def _apart(self, x: Tensor) -> Tensor:
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, self.width)
        normed = torch.empty(x.shape, dtype=self._kernel_dtype)
        self._kernel(rows.data_ptr(), 0, 0, normed.data_ptr(), len(rows), rows.stride(0), *self._parameters)
        return normed

    def _converted(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self._apart(x.to(self._kernel_dtype)).to(self.dtype), x
        normed, summed = self._in_place(x.to(self._kernel_dtype).contiguous(), residual.to(self._kernel_dtype))
        return normed.to(self.dtype), summed.to(self.dtype)
