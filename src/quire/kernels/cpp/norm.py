"""RMSNorm in C++; the meaning is `quire.kernels.norm.rms_norm`'s."""

import torch
from torch import Tensor

from quire.kernels.cpp.dtypes import address, kernel_dtype, pair

_KERNELS = pair("rms_norm")


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `(normed, summed)`, each of x's shape and dtype. x may be a slice of rows with gaps between them."""
    if kernel_dtype(x.dtype) != x.dtype:
        wide = None if residual is None else residual.float()
        normed, summed = rms_norm(x.float(), weight.float(), eps, wide)
        return normed.to(x.dtype), summed.to(x.dtype)
    width = x.shape[-1]
    assert weight.shape == (width,), f"{tuple(weight.shape)} for rows of {width}"
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, width)
    normed = torch.empty(x.shape, dtype=x.dtype)
    summed = x if residual is None else torch.empty(x.shape, dtype=x.dtype)
    _KERNELS[x.dtype](
        rows.data_ptr(),
        address(residual),
        weight.data_ptr(),
        address(None if residual is None else summed),
        normed.data_ptr(),
        rows.shape[0],
        width,
        rows.stride(0),
        eps,
    )
    return normed, summed
