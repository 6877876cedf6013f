"""Mixtures of experts in C++, in one call for all experts; csrc/experts.cpp has the kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.cpp import _kernels
from quire.kernels.cpp.dtypes import pair
from quire.kernels.cpp.linear import CppLinear
from quire.kernels.experts import Expert, Routing
from quire.kernels.linear import Linear

_COMPUTE = pair("experts")


class CppExperts:
    """A mixture of experts, as `experts.TorchExperts`, of layers of this back end, which are kept."""

    def __init__(self, router: Linear, experts: Sequence[Expert], routing: Routing) -> None:
        layers_in, layers_out = zip(*experts, strict=True)
        assert isinstance(router, CppLinear)
        self._layers = (router, *layers_in, *layers_out)
        self.num_bytes = sum(layer.num_bytes for layer in self._layers)
        self.width, num_scores = router.sizes
        assert num_scores == len(experts), f"{num_scores} scores for {len(experts)} experts"
        for layer_in, layer_out in experts:
            assert isinstance(layer_in, CppLinear)
            assert isinstance(layer_out, CppLinear)
            assert (layer_in.sizes[0], *layer_out.sizes) == (self.width, layer_in.sizes[1], self.width), "widths"
        num_chosen, limit = routing.num_chosen, num_scores - routing.has_shared
        assert 0 < num_chosen <= limit, f"{num_chosen} of {limit} experts"
        self.weights = _kernels.ExpertWeights(
            router.weights,
            [layer.weights for layer in layers_in],
            [layer.weights for layer in layers_out],
            num_chosen,
            routing.is_normalized,
            routing.has_shared,
        )
        self._dtype = router.kernel_dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Compute all rows in one call; how many there are changes no row."""
        rows = x.to(self._dtype).contiguous()
        assert rows.shape[1] == self.width, f"{tuple(x.shape)} for {self.width} inputs"
        out = torch.empty_like(rows)
        num_rows, width = rows.shape
        _COMPUTE[self._dtype](rows.data_ptr(), num_rows, width, out.data_ptr(), width, self.weights)
        return out.to(x.dtype)
