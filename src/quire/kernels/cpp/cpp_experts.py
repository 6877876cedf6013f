"""Mixtures of experts in C++, in one call for all experts; csrc/experts.cpp has the kernel."""

from collections.abc import Sequence

import numpy as np

from quire.core.arrays import Array
from quire.extension import _kernels
from quire.kernels.conversion import converted
from quire.kernels.cpp.cpp_gather import sum_exchange
from quire.kernels.cpp.cpp_linear import CppLinear
from quire.kernels.cpp.dtypes import address, pair
from quire.kernels.layers import Expert, ExpertSplit, GatherHook, Linear, Routing

_COMPUTE = pair("experts")


class CppExperts:
    """A mixture of experts, as `experts.TorchExperts`, of layers of this back end, which are kept."""

    def __init__(
        self, router: Linear, experts: Sequence[Expert], routing: Routing, split: ExpertSplit | None = None,
        bias: Array | None = None, scales: Array | None = None,
    ) -> None:  # fmt: skip
        layers_in, layers_out = zip(*experts, strict=True)
        assert isinstance(router, CppLinear)
        self._layers = (router, *layers_in, *layers_out)
        self.num_bytes = sum(layer.num_bytes for layer in self._layers)
        self._split = split  # kept: the extension calls its exchanges
        (self.num_scored, num_scores), self.width = router.sizes, layers_in[0].sizes[0]
        self.num_outputs = self.width if split is None else split.num_outputs
        num_routed = len(experts) - routing.has_shared
        num_wanted = len(experts) if routing.is_shared_scored else num_routed
        assert num_scores == num_wanted, f"{num_scores} scores for {len(experts)} experts"
        self._bias = None if bias is None else np.ascontiguousarray(bias, np.float32)  # kept: the extension reads it
        self._scales = None if scales is None else np.ascontiguousarray(scales, np.float32)
        for each in (self._bias, self._scales):
            assert each is None or each.shape == (num_routed,), "a number of each expert that may be chosen"
        for number, (layer_in, layer_out) in enumerate(experts):
            assert isinstance(layer_in, CppLinear)
            assert isinstance(layer_out, CppLinear)
            num_own = num_inner = layer_out.sizes[0]
            if split is not None and split.sums is None:
                gather = split.routed if number < num_routed else split.shared
                assert gather is not None
                num_own, num_inner = gather.num_own, gather.width
            assert layer_in.sizes == (self.width, num_own), "widths"
            assert layer_out.sizes == (num_inner, self.num_outputs), "widths"
        routed = {layer.sizes for layer in layers_in[:num_routed]}
        assert len(routed) == 1, f"experts of several widths: {routed}"
        num_chosen, limit = routing.num_chosen, num_routed // routing.num_groups * routing.num_kept_groups
        assert 0 < num_chosen <= limit, f"{num_chosen} of {limit} experts"
        self.weights = _kernels.ExpertWeights(
            router.weights,
            [layer.weights for layer in layers_in],
            [layer.weights for layer in layers_out],
            _kernels.Routing(
                num_chosen, routing.is_normalized, routing.has_shared, routing.is_sigmoid, routing.is_shared_scored,
                routing.factor, routing.num_groups, routing.num_kept_groups, routing.num_group_keys,
                *(0 if each is None else address(each) for each in (self._bias, self._scales)),
            ),
            _exchange(None if split is None else split.routed),
            _exchange(None if split is None else split.shared),
            sum_exchange(None if split is None else split.sums),
        )
        self._dtype = router.kernel_dtype

    def __call__(self, x: Array, scored: Array | None = None) -> Array:
        """Compute all rows in one call; how many there are changes no row."""
        rows = np.ascontiguousarray(converted(x, self._dtype))
        scored = rows if scored is None else np.ascontiguousarray(converted(scored, self._dtype))
        assert rows.shape[1] == self.width, f"{x.shape} for {self.width} inputs"
        assert scored.shape == (len(rows), self.num_scored), f"{scored.shape} for {self.num_scored} inputs"
        out = np.empty((len(rows), self.num_outputs), self._dtype)
        sizes = len(rows), self.width, address(scored), self.num_scored, address(out), self.num_outputs
        _COMPUTE[self._dtype](address(rows), *sizes, self.weights)
        return converted(out, x.dtype)


def _exchange(gather: GatherHook | None) -> _kernels.ColumnExchange:
    if gather is None:
        return _kernels.ColumnExchange(0, 0)
    assert gather.address is not None, "an exchange without a function of the extension"
    return _kernels.ColumnExchange(*gather.address)
