"""Keys and values in 8 bits: the arithmetic of quantized KV caches, which every back end must match.

A token's key, and its value, is quantized under each KV head by itself: nothing depends on other tokens, so that a
block holds the same bytes wherever, whenever and beside whatever it is written. Elements are int8 or e4m3, and stand
for element * scale. Stored scales are float32, the largest magnitude of the head over the largest element. Scales are
applied outside of the products: a key's to the score, a value's to the softmax weight.

Kernels that multiply int8 elements as integers round what they are multiplied with as well: queries as
`integer_queries` does it, softmax weights as `integer_weights` does it.
"""

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # element of each dtype
SMALLEST_MAGNITUDE = 1e-30  # a head with smaller numbers is stored as zeros with a scale of 0
NAN_BITS = 0x7F             # a NaN in e4m3
TOKENS_PER_PARTITION = 256  # they share steps of integer weights, in NUM_WEIGHT_GROUPS groups
TOKENS_PER_QUAD = 4         # consecutive tokens of a group
NUM_WEIGHT_GROUPS = 4
LARGEST_WEIGHT = 255


def is_quantized(cache: Tensor) -> bool:
    """Return whether a cache stores keys or values in 8 bits."""
    return cache.dtype in LARGEST


def as_bytes(x: Tensor) -> Tensor:
    """Return a tensor of 8-bit elements as int8, which all of torch's copies serve; others as they are."""
    return x.view(torch.int8) if x.itemsize == 1 else x


def encode(x: Tensor, dtype: torch.dtype, width: int, scale: float = 1.0) -> Tensor:
    """Return heads x [..., head_dim] as a cache stores them, int8 [..., width].

    `dtype` is the elements'. A width of head_dim + 4: each head's scale follows its elements; head_dim: it is `scale`.
    Rounds to nearest, ties to even. A head with a number that is not finite gets a scale of NaN and zeros, and without
    stored scales such a number becomes NaN: the request fails as it does in 16 bits. Finite numbers beyond the largest
    element saturate.
    """
    x = x.float()
    if width == x.shape[-1]:
        x = x * (torch.tensor(1.0) / torch.tensor(scale))
        finite = x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).view(torch.int8)
        return torch.where(x.isfinite(), finite, NAN_BITS)
    magnitude = x.abs().amax(-1, keepdim=True)
    largest = torch.tensor(LARGEST[dtype])  # a tensor: a number over a tensor would be a product with a reciprocal
    is_plain = magnitude.isfinite() & (magnitude >= SMALLEST_MAGNITUDE)
    scaled = torch.where(is_plain, x * (largest / magnitude), 0.0)
    scales = torch.where(is_plain, magnitude / largest, torch.where(magnitude.isfinite(), 0.0, torch.nan))
    elements = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    return torch.cat([elements.view(torch.int8), scales.view(torch.int8)], dim=-1)


def decode(
    stored: Tensor, dtype: torch.dtype, head_dim: int, scale: float = 1.0
) -> tuple[Tensor, Tensor | float]:
    """Return elements [..., head_dim] in float32, and their scales [...] float32, of what `encode` returned.

    Where no scales are stored, `scale` is returned for them.
    """
    elements = stored[..., :head_dim].view(dtype).float()
    if stored.shape[-1] == head_dim:
        return elements, scale
    return elements, stored[..., head_dim:].clone(memory_format=torch.contiguous_format).view(torch.float32).squeeze(-1)


def integer_queries(x: Tensor) -> Tensor:
    """Return queries x [..., head_dim] as products of integers see them, float32: int8 times a scale for each head."""
    elements, scales = decode(encode(x, torch.int8, x.shape[-1] + 4), torch.int8, x.shape[-1])
    return elements * torch.as_tensor(scales)[..., None]


def integer_weights(weights: Tensor) -> Tensor:
    """Return softmax weights times their values' scales as products of integers see them, float32.

    weights [..., context_len] from the first token of a context on, 0 for a token that is not seen. Quads of
    consecutive tokens belong to the groups of their partition in turn. A group's weights are rounded to whole
    multiples of a LARGEST_WEIGHT-th of the largest one.
    """
    context_len = weights.shape[-1]
    padded = torch.nn.functional.pad(weights.float(), (0, -context_len % TOKENS_PER_PARTITION))
    quads_per_group = TOKENS_PER_PARTITION // TOKENS_PER_QUAD // NUM_WEIGHT_GROUPS
    groups = padded.view(*weights.shape[:-1], -1, quads_per_group, NUM_WEIGHT_GROUPS, TOKENS_PER_QUAD)
    steps = groups.amax((-3, -1), keepdim=True) / LARGEST_WEIGHT
    rounded = torch.where(steps > 0, (groups / steps).round() * steps, 0.0)
    return rounded.flatten(-4)[..., :context_len]
