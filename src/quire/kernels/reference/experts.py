"""Mixtures of experts, an expert at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.layers import Expert, ExpertSplit, Linear, Routing

LEAST_SUM = 1e-20  # added to a sum of sigmoids, so that no weight is 0 / 0


def route(
    routing: Routing, scores: Tensor, bias: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return experts int64 and their weights float32, each [num_rows, num_places], what they are chosen by descending.

    scores: float32 [num_rows, num_scores]. bias, scales: float32 [num_experts]. A shared expert has the last place.
    """
    routed = scores[:, :-1] if routing.has_shared and routing.is_shared_scored else scores
    if routing.is_by_score:
        chosen = routed.sort(dim=1, descending=True, stable=True).indices[:, : routing.num_chosen]
        is_over_chosen = routing.is_normalized
        weights = routed.gather(1, chosen).softmax(dim=1) if is_over_chosen else routed.softmax(dim=1).gather(1, chosen)
    else:
        # Sigmoids in float64: PyTorch's has other last bits in the elements behind its last whole vector.
        shares = routed.double().sigmoid().float() if routing.is_sigmoid else routed.softmax(dim=1)
        keys = _in_kept_groups(routing, shares if bias is None else shares + bias)
        chosen = keys.sort(dim=1, descending=True, stable=True).indices[:, : routing.num_chosen]
        weights = shares.gather(1, chosen)
        if routing.is_normalized:
            weights = weights / (weights.sum(dim=1, keepdim=True) + LEAST_SUM)
    if routing.factor != 1:
        weights = weights * routing.factor
    if scales is not None:
        weights = weights * scales[chosen]
    if not routing.has_shared:
        return chosen, weights
    shared = torch.full_like(chosen[:, :1], routed.shape[1])
    share = scores[:, -1:].sigmoid() if routing.is_shared_scored else torch.ones_like(weights[:, :1])
    return torch.cat([chosen, shared], dim=1), torch.cat([weights, share], dim=1)


def _in_kept_groups(routing: Routing, keys: Tensor) -> Tensor:
    """Return keys [num_rows, num_experts] with those outside of each row's kept groups -inf."""
    if routing.num_groups == 1:
        return keys
    groups = keys.view(len(keys), routing.num_groups, keys.shape[1] // routing.num_groups)
    sums = groups.sort(dim=2, descending=True).values[:, :, : routing.num_group_keys].sum(dim=2)
    kept = sums.sort(dim=1, descending=True, stable=True).indices[:, : routing.num_kept_groups]
    is_kept = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, kept, True)
    return groups.masked_fill(~is_kept[:, :, None], -torch.inf).view_as(keys)


class TorchExperts:
    """A mixture of experts in PyTorch, an expert at a time: the meaning that every other one must match.

    router: a layer with float32 results, a score for each of `experts`. split: of the experts' layers; None: whole.
    bias: of the choice, scales: of the weights of experts; float32 [num_experts].
    """

    def __init__(
        self, router: Linear, experts: Sequence[Expert], routing: Routing, split: ExpertSplit | None = None,
        bias: Tensor | None = None, scales: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._router, self._experts, self._routing, self._split = router, tuple(experts), routing, split
        self._bias, self._scales = bias, scales
        self.num_bytes = router.num_bytes + sum(layer.num_bytes for expert in experts for layer in expert)

    def __call__(self, x: Tensor, scored: Tensor | None = None) -> Tensor:
        """Compute all rows of each expert that is used."""
        scores = self._router(x if scored is None else scored)
        chosen, weights = route(self._routing, scores, self._bias, self._scales)
        num_outputs = x.shape[1] if self._split is None else self._split.num_outputs
        results = torch.empty(*chosen.shape, num_outputs)  # [num_rows, num_places, num_outputs]
        for number in sorted(set(chosen.flatten().tolist())):
            expert, (rows, places) = self._experts[number], torch.where(chosen == number)
            results[rows, places] = expert.layer_out(self._inner(number, x[rows]))
        out = torch.zeros_like(results[:, 0])
        for place in range(chosen.shape[1]):
            out += results[:, place] * weights[:, place, None]
        if self._split is not None and self._split.sums is not None:
            found: Tensor = self._split.sums(out.to(self._split.sums.partial_dtype or x.dtype), x.dtype)
            return found
        return out.to(x.dtype)

    def _inner(self, number: int, x: Tensor) -> Tensor:
        inner: Tensor = self._experts[number].layer_in(x)
        if self._split is None or self._split.sums is not None:
            return inner
        is_shared = self._routing.has_shared and number == len(self._experts) - 1
        gather = self._split.shared if is_shared else self._split.routed
        assert gather is not None, "an expert without its exchange"
        gathered: Tensor = gather(inner)
        return gathered
