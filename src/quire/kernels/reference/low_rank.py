"""Low-rank addends of linear layers, and B of an adapter's module, in PyTorch."""

import torch
from torch import Tensor

from quire.kernels.linear_weight import LinearWeight
from quire.kernels.reference.linear import make_linear


class TorchUp:
    """B [num_outputs, rank] by PyTorch: the linear layer with float32 outputs."""

    def __init__(self, weight: Tensor) -> None:
        self._linear = make_linear(LinearWeight.dense(weight), dtype=torch.float32)
        self.num_bytes = self._linear.num_bytes

    def __call__(self, inner: Tensor, /) -> Tensor:
        found: Tensor = self._linear(inner)
        return found


def reference(x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return the addend of one module, float32 [num_rows, out_features]: the meaning of an adapter.

    x [num_rows, in_features]; A `down` [rank, in_features]; B `up` [out_features, rank] in float32, which is scaled
    and then rounded to x's dtype, as is A x.
    """
    inner = (x.float() @ down.float().T).to(x.dtype)
    return inner.float() @ (up.float() * scale).to(x.dtype).float().T
