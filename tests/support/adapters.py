"""Adapters of random factors, for tests of kernels."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.kernels.layers import Linear
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.low_rank import AdapterWeights, LowRankLayer, LowRankPart, Up

Ranges = Sequence[tuple[int, int, int]]  # first output, number of outputs, rank


def random_layer(
    make: Callable[..., Linear],
    make_up: Callable[[Tensor], Up],
    width: int,
    num_outputs: int,
    ranges: Ranges,
    dtype: torch.dtype,
    seed: int,
) -> tuple[LowRankLayer, list[tuple[Tensor, Tensor]]]:
    """Return a layer of an adapter, and A and B of each of its parts."""
    generator = torch.Generator().manual_seed(seed)
    downs = [torch.randn(rank, width, generator=generator).mul(width**-0.5).to(dtype) for _, _, rank in ranges]
    ups = [torch.randn(count, rank, generator=generator).to(dtype) for _, count, rank in ranges]
    parts, first_input = [], 0
    for (first, count, rank), up in zip(ranges, ups, strict=True):
        parts.append(LowRankPart(make_up(up), first_input, rank, first, count))
        first_input += rank
    down = make(LinearWeight.dense(downs))
    return LowRankLayer(down, first_input, num_outputs, tuple(parts)), list(zip(downs, ups, strict=True))


def adapter(**layers: LowRankLayer) -> AdapterWeights:
    """Return an adapter of some layers, by the names of ops."""
    return AdapterWeights(layers, num_bytes=0)
