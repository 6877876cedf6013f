"""Linear layers by torch's matrix products, each followed by one Triton kernel for its activation.

A product's order of summation is cuBLAS's choice, by the shape of the whole: a row may differ in its last bits from the
same row in other company (docs/decisions/0012).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.linear import GATED, Activation
from quire.kernels.linear_weight import LinearWeight

BLOCK = 1024
SQRT_HALF = tl.constexpr(0.5**0.5)
SQRT_2_BY_PI = tl.constexpr((2.0 / 3.141592653589793) ** 0.5)


class CudaLinear:
    """y = activation(x W^T + b) for x [num_rows, in_features]; result [num_rows, out_features].

    The weight is dense; bias [out_features] or None; gated activations make half as many outputs. `dtype` is the
    result's: the weight's, or float32.
    """

    def __init__(
        self,
        weight: LinearWeight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        activation: Activation = "none",
    ) -> None:
        parts = weight.dense_parts()
        self._weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        assert dtype in (None, self._weight.dtype) or (dtype == torch.float32 and bias is None)
        self._bias, self._activation = bias, activation
        self._is_widened = dtype not in (None, self._weight.dtype)
        self.num_bytes = self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply all rows at once."""
        x = x.to(self._weight.dtype)
        if not self._is_widened:
            return activate(F.linear(x, self._weight, self._bias), self._activation)
        if x.is_cuda:  # the sums as they are, without a copy of the weight in float32
            return torch.mm(x, self._weight.T, out_dtype=torch.float32)
        return F.linear(x.float(), self._weight.float())


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return what `quire.kernels.activation` says for contiguous x [num_rows, width]; gated ones halve the width."""
    if activation == "none":
        return x
    num_rows, width = x.shape
    width = width // 2 if activation in GATED else width
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    _activate_kernel[(num_rows, triton.cdiv(width, BLOCK))](x, out, width, NAME=activation, BLOCK=BLOCK)
    return out


@triton.jit
def _activate_kernel(x, out, width, NAME: tl.constexpr, BLOCK: tl.constexpr):
    """A part of one row, each element by itself in float32."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < width
    if NAME == "silu_and_mul":
        gate = tl.load(x + row * 2 * width + columns, mask=is_column, other=0.0)
        up = tl.load(x + row * 2 * width + width + columns, mask=is_column, other=0.0)
        wide = gate.to(tl.float32)
        result = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up
    elif NAME == "gelu_tanh_and_mul":
        gate = tl.load(x + row * 2 * width + columns, mask=is_column, other=0.0)
        up = tl.load(x + row * 2 * width + width + columns, mask=is_column, other=0.0)
        wide = gate.to(tl.float32)
        inner = (wide + wide * wide * wide * 0.044715) * SQRT_2_BY_PI
        result = (wide * 0.5 * (2.0 - 2.0 / (1.0 + tl.exp(2.0 * inner)))).to(gate.dtype) * up
    else:
        values = tl.load(x + row * width + columns, mask=is_column, other=0.0)
        wide = values.to(tl.float32)
        if NAME == "relu":
            result = tl.maximum(wide, 0.0)
        elif NAME == "gelu":
            result = wide * 0.5 * (tl.erf(wide * SQRT_HALF) + 1.0)
        else:
            inner = (wide + wide * wide * wide * 0.044715) * SQRT_2_BY_PI
            result = wide * 0.5 * (2.0 - 2.0 / (1.0 + tl.exp(2.0 * inner)))  # 1 + tanh(inner)
    tl.store(out + row * width + columns, result, mask=is_column)
