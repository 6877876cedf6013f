"""Mixtures of experts: feed-forwards of which each row uses the few that a router scores highest (Shazeer et al. 2017).

The router's scores are float32, the highest come first, and of equal ones the lower number. A row's results are added
in that order in float32, so that a row depends on itself alone. An expert without a row is not read.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.kernels.layers import GatherHook, Linear, SumHook
from quire.kernels.tensors import Tensor


class Expert(NamedTuple):
    """Feed-forward of one expert: a layer to its inner width, activated, and one back, whose results are float32."""

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

    def __call__(self, x: Tensor) -> Tensor:
        """Return the weighted results of each row's experts in x's dtype, for x [num_rows, width].

        They are [num_rows, width], of a split mixture this rank's columns of it.
        """


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of a row's experts and their weights.

    `num_chosen` experts, weighted by the softmax of their scores: over the chosen ones if `is_normalized`, else over
    all. With `has_shared` the last expert is not chosen: every row uses it, weighted by the sigmoid of its score.
    """

    num_chosen: int
    is_normalized: bool
    has_shared: bool = False
