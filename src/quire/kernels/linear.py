"""Linear layers: weights packed once, at load; a row's result does not depend on the other rows."""

from typing import Literal, Protocol

from quire.kernels.tensors import Tensor

Activation = Literal[
    "none", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "clamped_silu_and_mul", "gelu_tanh", "gelu", "relu"
]  # fmt: skip
GATED: tuple[Activation, ...] = (  # two layers each, gate and up
    "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "clamped_silu_and_mul"
)  # fmt: skip


class Linear(Protocol):
    """A layer; `num_bytes` is what its packed weight takes."""

    num_bytes: int

    def __call__(self, x: Tensor, addend: Tensor | None = None, /) -> Tensor:
        """Return [num_rows, out_features] for x [num_rows, in_features].

        addend: float32 [num_rows, rows of the weight], added to the sums before the bias and the activation.
        """
