"""Mixtures of experts in Triton: the meaning is that of `experts.TorchExperts`.

Each row of a step is computed once for each of its experts: as `num_chosen` rows of a result, which are grouped by
expert and multiplied by grouped products, an expert's weights being a part of one stacked weight. The results of a row
are added in the order of its choice. The shared expert is two layers over all rows. Nothing waits for the device, and
all launches follow from the number of rows. A weight is read once for each tile of rows of its expert, of 16 rows while
there are few for each expert, else of 64; nothing is read of experts without a row.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.layers import Expert, ExpertSplit, GatherHook, Linear, Routing
from quire.kernels.reference.experts import route
from quire.kernels.triton.products import product, stack, tile_height
from quire.kernels.triton.row_groups import RowGroups, add_in_order, group_rows
from quire.kernels.triton.triton_linear import CudaLinear


class TritonExperts:
    """A mixture of experts, as `experts.TorchExperts`, of layers of this back end, which are copied."""

    def __init__(
        self, router: Linear, experts: Sequence[Expert], routing: Routing, split: ExpertSplit | None = None,
        bias: Tensor | None = None, scales: Tensor | None = None,
    ) -> None:  # fmt: skip
        assert scales is None, "experts with scales, `back_end.require` refuses them"
        self.num_bytes = router.num_bytes + sum(layer.num_bytes for expert in experts for layer in expert)
        self._router, self._routing, self._split, self._bias = router, routing, split, bias
        self._shared = experts[-1] if routing.has_shared else None
        self._num_routed = len(experts) - routing.has_shared
        layers_in, layers_out = zip(*experts[: self._num_routed], strict=True)
        self._in, self._out = _StackedLayer(layers_in), _StackedLayer(layers_out)

    def __call__(self, x: Tensor, scored: Tensor | None = None) -> Tensor:
        """Compute all rows of all experts in two grouped products."""
        assert scored is None, "a router of another activation, `back_end.require` refuses it"
        num_rows, num_chosen = len(x), self._routing.num_chosen
        if not num_rows:
            return torch.empty_like(x)
        chosen, weights = choose(self._router(x), self._routing, self._bias)
        height = tile_height(num_rows * num_chosen // self._num_routed, is_exact=self._in.is_exact)
        groups = group_rows(chosen.flatten(), self._num_routed, height)
        split = self._split or ExpertSplit(x.shape[1], None, None)
        inner = _exchanged(self._in(x, groups), split.routed)
        results = self._out(inner, groups).view(num_rows, num_chosen, -1)
        shared = None
        if self._shared is not None:
            shared = self._shared.layer_out(_exchanged(self._shared.layer_in(x), split.shared))
        if split.sums is None:
            return add_in_order(results, x.dtype, weights, shared)
        partial = add_in_order(results, split.sums.partial_dtype or x.dtype, weights, shared)
        sums: Tensor = split.sums(partial, x.dtype)
        return sums


def _exchanged(own: Tensor, gather: GatherHook | None) -> Tensor:
    """Return the inner columns of all ranks; without an exchange, those of this one."""
    return own if gather is None else gather(own)


class _StackedLayer:
    """The same layer of all experts that are chosen."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        own = [layer for layer in layers if isinstance(layer, CudaLinear)]
        assert len(own) == len(layers), "layers of another back end"
        first, biases = own[0], [each.bias for each in own if each.bias is not None]
        self.is_exact, self._dtype, self._activation = first.is_exact, first.out_dtype, first.activation
        self._weight = stack([each.weight for each in own])
        assert len(biases) in (0, len(own)), "biases of some experts"
        self._bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor, groups: RowGroups) -> Tensor:
        return product(
            x, self._weight, self._bias, dtype=self._dtype, activation=self._activation, is_exact=self.is_exact,
            groups=groups,
        )  # fmt: skip


def choose(scores: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what `reference.experts.route` returns, the shared expert's place in the weights alone.

    Choices that are not by the scores alone are its own operations, some twenty launches, which wait for nothing.

    scores: float32 [num_rows, num_scores]. Experts are int32 [num_rows, num_chosen], weights float32
    [num_rows, num_places]. A row with scores that are NaN has some experts, and weights that are NaN.
    """
    if not (routing.is_by_score and routing.is_shared_scored and routing.factor == 1):
        found, shares = route(routing, scores, bias)
        return found[:, : routing.num_chosen].int().contiguous(), shares
    (num_rows, num_scores), num_chosen = scores.shape, routing.num_chosen
    chosen = torch.empty(num_rows, num_chosen, dtype=torch.int32, device=scores.device)
    weights = torch.empty(num_rows, num_chosen + routing.has_shared, device=scores.device)
    _choose_kernel[(num_rows,)](
        scores, chosen, weights, num_scores, NUM_CHOSEN=num_chosen, IS_NORMALIZED=routing.is_normalized,
        HAS_SHARED=routing.has_shared, BLOCK=triton.next_power_of_2(num_scores),
        PLACES=triton.next_power_of_2(num_chosen), num_warps=1,
    )  # fmt: skip
    return chosen, weights


@triton.jit
def _choose_kernel(
    scores, chosen, weights, num_scores, NUM_CHOSEN: tl.constexpr, IS_NORMALIZED: tl.constexpr,
    HAS_SHARED: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One row. Keys order scores, and equal ones by the lower number; the greatest is found NUM_CHOSEN times."""
    row, experts, places = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, PLACES)
    is_routed = experts < num_scores - HAS_SHARED
    values = tl.load(scores + row * num_scores + experts, mask=is_routed, other=float("-inf")) + 0.0  # -0 is 0
    bits = values.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)  # ascending as the scores, NaN outside of them
    keys = tl.where(is_routed, (ordered << 32) | (BLOCK - 1 - experts), -(1 << 63))
    found = tl.full([PLACES], float("-inf"), tl.float32)
    for place in tl.static_range(NUM_CHOSEN):
        greatest = tl.max(keys, 0)
        expert = BLOCK - 1 - (greatest & (BLOCK - 1)).to(tl.int32)
        tl.store(chosen + row * NUM_CHOSEN + place, expert)
        found = tl.where(places == place, tl.sum(tl.where(experts == expert, values, 0.0), 0), found)
        keys = tl.where(experts == expert, -(1 << 63), keys)
    highest = tl.max(values, 0)
    powers = tl.exp(found - highest)
    total = tl.sum(powers if IS_NORMALIZED else tl.exp(values - highest), 0)
    place = weights + row * (NUM_CHOSEN + HAS_SHARED)
    tl.store(place + places, powers / total, mask=places < NUM_CHOSEN)
    if HAS_SHARED:
        score = tl.load(scores + row * num_scores + num_scores - 1)
        tl.store(place + NUM_CHOSEN, 1.0 / (1.0 + tl.exp(-score)))
