"""Gated short convolution in PyTorch, a sequence at a time: the meaning that every back end must match."""

from itertools import pairwise

import torch
from torch import Tensor

from quire.kernels.paged_attention import AttentionMetadata
from quire.kernels.short_conv import ShortConvSpec


def short_conv(
    spec: ShortConvSpec, x: Tensor, positions: Tensor, tails: Tensor, slot_mapping: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """Return h * convolution(g * v) [num_tokens, width] of x [num_tokens, 3 * width]: g, h and v in turn.

    The products g * v are rounded to x's dtype; those of tokens before the step are read from the tails, zeros stand
    before a sequence, and those of the step are written to their slots' blocks, but where a slot is -1. Sums in
    float32, the oldest token first, rounded once.
    """
    g, h, v = x.chunk(3, dim=1)
    u, out = g * v, torch.empty_like(h)
    block_size, length = metadata.block_size, tails.shape[1]
    for seq, (start, stop) in enumerate(pairwise(metadata.query_starts.tolist())):
        if start == stop:
            continue
        first = int(positions[start])
        before = torch.arange(first - spec.taps + 1, first)
        blocks = metadata.block_tables[seq].long()[before.clamp(min=0) // block_size]
        earlier = torch.where(before[:, None] < 0, 0, tails[blocks, before % block_size % length].float())
        rows = torch.cat([earlier, u[start:stop].float()])  # [taps - 1 + num_tokens, width]
        sums = torch.zeros(stop - start, spec.width) if spec.bias is None else spec.bias.expand(stop - start, -1)
        for tap, weight in enumerate(spec.weight):
            sums = sums + weight * rows[tap : tap + stop - start]
        out[start:stop] = (h[start:stop].float() * sums).to(x.dtype)
    written = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[written]
    places = slots // block_size * length + slots % block_size % length
    last = dict(zip(places.tolist(), written.tolist(), strict=True))  # later tokens of a block overwrite earlier ones
    tails.view(-1, spec.width)[list(last)] = u[list(last.values())].to(tails.dtype)
    return out
