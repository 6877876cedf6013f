"""Mixtures of experts, an expert at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.layers import Expert, ExpertSplit, Linear, Routing


def route(routing: Routing, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return experts int64 and their weights float32, each [num_rows, num_places], the highest score first.

    scores: float32 [num_rows, num_experts]. A shared expert has the last place.
    """
    routed = scores[:, :-1] if routing.has_shared else scores
    chosen = routed.sort(dim=1, descending=True, stable=True).indices[:, : routing.num_chosen]
    if routing.is_normalized:
        weights = routed.gather(1, chosen).softmax(dim=1)
    else:
        weights = routed.softmax(dim=1).gather(1, chosen)
    if not routing.has_shared:
        return chosen, weights
    shared = torch.full_like(chosen[:, :1], routed.shape[1])
    return torch.cat([chosen, shared], dim=1), torch.cat([weights, scores[:, -1:].sigmoid()], dim=1)


class TorchExperts:
    """A mixture of experts in PyTorch, an expert at a time: the meaning that every other one must match.

    router: a layer with float32 results, a score for each of `experts`. split: of the experts' layers; None: whole.
    """

    def __init__(
        self, router: Linear, experts: Sequence[Expert], routing: Routing, split: ExpertSplit | None = None
    ) -> None:
        self._router, self._experts, self._routing, self._split = router, tuple(experts), routing, split
        self.num_bytes = router.num_bytes + sum(layer.num_bytes for expert in experts for layer in expert)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute all rows of each expert that is used."""
        chosen, weights = route(self._routing, self._router(x))
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
