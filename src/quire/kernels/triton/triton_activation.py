"""Activations in Triton: the meanings are those of `quire.kernels.reference`, each element by itself in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.layers import GATED, Activation
from quire.kernels.reference.activation import CLAMPED_SILU_GAIN, CLAMPED_SILU_LIMIT, QUICK_GELU_GAIN

BLOCK = 1024
SQRT_HALF = tl.constexpr(0.5**0.5)
SQRT_2_BY_PI = tl.constexpr((2.0 / 3.141592653589793) ** 0.5)
QUICK_GAIN = tl.constexpr(QUICK_GELU_GAIN)
GAIN, LIMIT = tl.constexpr(CLAMPED_SILU_GAIN), tl.constexpr(CLAMPED_SILU_LIMIT)
LEAST = tl.constexpr(-CLAMPED_SILU_LIMIT)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return the activation of contiguous x [num_rows, width]; gated ones halve the width."""
    if activation == "none":
        return x
    num_rows, width = x.shape
    width = width // 2 if activation in GATED else width
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    _activate_kernel[(num_rows, triton.cdiv(width, BLOCK))](
        x, out, width, NAME=activation, IS_GATED=activation in GATED, BLOCK=BLOCK
    )
    return out


@triton.jit
def _activate_kernel(x, out, width, NAME: tl.constexpr, IS_GATED: tl.constexpr, BLOCK: tl.constexpr):
    """A part of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < width
    source = x + row * (2 * width if IS_GATED else width) + columns
    values = tl.load(source, mask=is_column, other=0.0)
    ups = values
    if IS_GATED:
        ups = tl.load(source + width, mask=is_column, other=0.0)
    tl.store(out + row * width + columns, activated(values, ups, NAME), mask=is_column)


@triton.jit
def activated(values, ups, NAME: tl.constexpr):
    """Return the activation of a tile of values, or of gates and ups, to be rounded to their dtype."""
    wide = values.to(tl.float32)
    if NAME == "silu_and_mul":
        result = (wide / (1.0 + tl.exp(-wide))).to(values.dtype) * ups
    elif NAME == "clamped_silu_and_mul":
        wide = tl.minimum(wide, LIMIT)
        limited = tl.minimum(tl.maximum(ups.to(tl.float32), LEAST), LIMIT)
        result = wide / (1.0 + tl.exp(-(wide * GAIN))) * (limited + 1.0)
    elif NAME == "quick_gelu":
        result = wide / (1.0 + tl.exp(-(wide * QUICK_GAIN)))
    elif NAME == "relu":
        result = tl.maximum(wide, 0.0)
    elif NAME == "relu2":
        result = tl.maximum(wide, 0.0) * tl.maximum(wide, 0.0)
    elif NAME == "gelu":
        result = wide * 0.5 * (tl.erf(wide * SQRT_HALF) + 1.0)
    elif NAME == "gelu_and_mul":
        result = (wide * 0.5 * (tl.erf(wide * SQRT_HALF) + 1.0)).to(values.dtype) * ups
    else:
        inner = (wide + wide * wide * wide * 0.044715) * SQRT_2_BY_PI
        result = wide * 0.5 * (2.0 - 2.0 / (1.0 + tl.exp(2.0 * inner)))  # 1 + tanh(inner)
        if NAME == "gelu_tanh_and_mul":
            result = result.to(values.dtype) * ups
    return result
