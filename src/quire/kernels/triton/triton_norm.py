"""RMSNorm and LayerNorm in Triton, the residual added in the same pass; meanings as in `quire.kernels.reference`.

One program takes one row, which stays in registers between its sum and its result: a row is read once, and with a
residual written twice. The order of a row's sum depends on its width alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton import card
from quire.kernels.triton.card import wait_for_inputs

MAX_WIDTH = 1 << 16


class TritonNorm:
    """RMSNorm or, with `centers`, LayerNorm; parameters as in `norm.TorchNorm`, called as `norm.Norm` says."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, eps: float, centers: bool, offset: float | None = None
    ) -> None:
        self.width, self.has_heads = weight.shape[-1], weight.dim() == 2
        assert self.width <= MAX_WIDTH, f"rows of {self.width}"
        self.weight, self.bias, self.eps, self.centers = weight.contiguous(), bias, eps, centers
        self.offset = offset

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return `(normed, summed)`; without a residual x [num_tokens, width] or [num_tokens, num_heads, width] may be
        a slice of wider rows.
        """
        width = self.width
        assert x.shape[-1] == width, f"{tuple(x.shape)} for rows of {width}"
        assert x.stride(-1) == 1, "rows with gaps"
        heads = x.shape[1] if x.dim() == 3 else 1
        assert not self.has_heads or heads == len(self.weight), f"{tuple(x.shape)} for {len(self.weight)} heads"
        strides = (x.stride(0), x.stride(1) if x.dim() == 3 else 0)
        normed = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is None else x
        if residual is not None:
            assert x.is_contiguous() and residual.is_contiguous() and x.shape == residual.shape
        block = triton.next_power_of_2(width)
        _norm_kernel[(x.numel() // width,)](
            x, residual, self.weight, self.bias, normed, *strides, width, heads, self.eps,
            CENTERS=self.centers, IS_WIDE=self.offset is not None, OFFSET=self.offset or 0.0,
            HAS_HEADS=self.has_heads, BLOCK=block, num_warps=min(16, max(1, block // 512)),
            **card.launch_options(x.device),
        )  # fmt: skip
        return normed, x if residual is None else residual


@triton.jit
def _norm_kernel(
    x, residual, weight, bias, normed, token_stride, head_stride, width, heads, eps,
    CENTERS: tl.constexpr, IS_WIDE: tl.constexpr, OFFSET: tl.constexpr, HAS_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row. With a residual the sum, rounded, takes its place and the norm takes the place of x."""
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < width
    source = x + row // heads * token_stride + row % heads * head_stride + columns
    values = tl.load(source, mask=is_column, other=0.0)
    if residual is not None:
        values = (values.to(tl.float32) + tl.load(residual + row * width + columns, mask=is_column, other=0.0)).to(
            values.dtype
        )
        tl.store(residual + row * width + columns, values, mask=is_column)
    wide = values.to(tl.float32)
    if CENTERS:
        wide = tl.where(is_column, wide - tl.sum(wide, 0) / width, 0.0)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    if HAS_HEADS:  # each with weights of its own
        weight += row % heads * width
    factors = tl.load(weight + columns, mask=is_column)
    if CENTERS:
        result = wide * factors
        if bias is not None:
            result += tl.load(bias + columns, mask=is_column)
    elif IS_WIDE:
        result = wide * (factors.to(tl.float32) + OFFSET)
    else:
        result = wide.to(values.dtype) * factors  # rounded before the weight is applied, as transformers does
    tl.store(normed + row * width + columns, result, mask=is_column)
