"""Layers as layer programs call them: linear layers, norms, mixtures of experts, and exchanges between ranks.

A mixture of experts is a feed-forward of which each row uses the few experts that a router scores highest (Shazeer et
al. 2017). The router's scores are float32, the highest come first, and of equal ones the lower number. A row's results
are added in that order in float32, so that a row depends on itself alone. An expert without a row is not read.
DeepSeek V3's router chooses by other numbers than it weighs with (DeepSeek-AI 2024, section 2.1.2).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from quire.kernels.tensors import DType, Tensor

Activation = Literal[
    "none", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "clamped_silu_and_mul", "gelu_tanh", "gelu", "relu",
    "relu2", "quick_gelu",
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


class Norm(Protocol):
    """A norm that has its parameters."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return `(normed, summed)`: summed = x + residual, normed = norm(summed), all [..., width] of one dtype.

        Without a residual, summed is x. With one, the results may stand in the memory of the arguments: do not use
        those afterwards.
        """


class GatherHook(Protocol):
    """Exchange of an activation's columns between the ranks of tensor parallelism."""

    @property
    def num_own(self) -> int:
        """Columns that this rank computes."""

    @property
    def width(self) -> int:
        """Columns of all ranks."""

    @property
    def address(self) -> tuple[int, int] | None:
        """A C function (csrc/kernels.hpp, ColumnExchange) and its context, which does the same; None: there is none."""

    def __call__(self, own: Tensor) -> Tensor:
        """Return [num_tokens, width] of all ranks' columns, for own [num_tokens, num_own]."""


class SumHook(Protocol):
    """Sum of partial sums over the ranks of tensor parallelism, on CPUs added in the order of the ranks.

    Every rank gets the same bits, which depend on the number of ranks.
    """

    @property
    def partial_dtype(self) -> DType | None:
        """The dtype of partial sums; None: the model's."""

    @property
    def address(self) -> tuple[int, int] | None:
        """A C function (csrc/kernels.hpp, SumExchange) and its context, which does the same; None: there is none."""

    def __call__(self, own: Tensor, dtype: DType) -> Tensor:
        """Return the sums [num_tokens, width] of all ranks' `own`, partial sums of that shape, rounded to `dtype`."""


class Expert(NamedTuple):
    """Feed-forward of one expert: a layer to its inner width, activated, and one back, with float32 results."""

    layer_in: Linear
    layer_out: Linear


class ExpertSplit(NamedTuple):
    """The part of a mixture that a rank of tensor parallelism has: some outputs of both layers of every expert.

    Every rank has the whole router, and so the same choices. Between an expert's layers the ranks exchange their inner
    columns; of the results, each has columns of its own, `num_outputs` of them. Or the second layers have the inputs
    that the first ones of this rank make, and partial results of all outputs, which the ranks add up by `sums`.
    """

    num_outputs: int
    routed: GatherHook | None  # inner columns of the chosen experts, all of one width
    shared: GatherHook | None  # inner columns of the shared expert
    sums: SumHook | None = None


class ExpertLayer(Protocol):
    """A mixture of experts; `num_bytes` is what all packed weights take."""

    num_bytes: int

    def __call__(self, x: Tensor, scored: Tensor | None = None) -> Tensor:
        """Return the weighted results of each row's experts in x's dtype, for x [num_rows, width].

        scored: what the router scores, [num_rows, its inputs]; None: x. The results are [num_rows, width], of a split
        mixture this rank's columns of it.
        """


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of a row's experts and their weights.

    `num_chosen` experts, weighted by the softmax of their scores: over the chosen ones if `is_normalized`, else over
    all. With `is_sigmoid` by the sigmoid of each score, if `is_normalized` over their sum. `factor` multiplies these
    weights, and a scale of each expert where the layer has some. With `has_shared` the last expert is not chosen: every
    row uses it, weighted by the sigmoid of its score; or by 1, without a score, if not `is_shared_scored`.

    With `has_bias` experts are chosen by the sums of their weights, softmax over all or sigmoid, and a bias of each.
    Of `num_groups` groups of equal size, the `num_kept_groups` with the highest sums of their best `num_group_keys` of
    these numbers are chosen from.
    """

    num_chosen: int
    is_normalized: bool
    has_shared: bool = False
    is_sigmoid: bool = False
    has_bias: bool = False
    factor: float = 1.0
    is_shared_scored: bool = True
    num_groups: int = 1
    num_kept_groups: int = 1
    num_group_keys: int = 2

    @property
    def is_by_score(self) -> bool:
        """True if experts are chosen by their scores alone, and weighted by the softmax of these."""
        return not (self.is_sigmoid or self.has_bias or self.num_groups > 1)
