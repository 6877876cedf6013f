"""Linear layers on a GPU: dense ones by torch's matrix products, those of other formats by `triton.products`.

The order of summation of torch's products is cuBLAS's choice, by the shape of the whole: a row may differ in its last
bits from the same row in another batch (docs/decisions/0012). Exact layers are of `triton.products` in any format.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.layers import Activation
from quire.kernels.linear_weight import DENSE, LinearWeight
from quire.kernels.triton.products import pack, product
from quire.kernels.triton.triton_activation import activate


class CudaLinear:
    """y = activation(x W^T + addend + b) for x [num_rows, in_features]; result [num_rows, out_features].

    bias [out_features] or None; gated activations make half as many outputs. `dtype` is the result's: the model's, or
    float32. `is_exact`: a row's bits do not depend on the other rows.
    """

    def __init__(
        self,
        weight: LinearWeight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        activation: Activation = "none",
        is_exact: bool = False,
    ) -> None:
        self.weight, self.bias, self.activation = pack(weight), bias, activation
        self._dtype = weight.value_dtype
        self.out_dtype = dtype or self._dtype
        assert self.out_dtype == self._dtype or (self.out_dtype == torch.float32 and activation == "none")
        self.is_exact, self._is_packed = is_exact, is_exact or weight.format != DENSE
        self.num_bytes = self.weight.num_bytes

    def __call__(self, x: Tensor, addend: Tensor | None = None, /) -> Tensor:
        """Multiply all rows at once. addend: float32, as `linear.Linear` says."""
        if self._is_packed:
            return product(
                x, self.weight, self.bias, dtype=self.out_dtype, activation=self.activation, addend=addend,
                is_exact=self.is_exact,
            )  # fmt: skip
        x, weight = x.to(self._dtype), self.weight.elements
        if addend is None and self.out_dtype == self._dtype:
            return activate(F.linear(x, weight, self.bias), self.activation)
        if x.is_cuda and self._dtype != torch.float32:  # the sums as they are, without a copy of the weight in float32
            sums = torch.mm(x, weight.T, out_dtype=torch.float32)
        else:
            sums = F.linear(x.float(), weight.float())
        sums = sums if addend is None else sums + addend
        sums = sums if self.bias is None else sums + self.bias.float()
        return activate(sums.to(self.out_dtype), self.activation)
