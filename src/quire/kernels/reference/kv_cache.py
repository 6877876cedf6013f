"""KV cache in PyTorch: rotary embedding, the write of keys and values, their quantization, and copies of blocks.

Rotary position embedding is on half-split pairs (Su et al. 2021, in the layout of GPT-NeoX and Llama), or on
interleaved ones: dimensions (2i, 2i + 1), as in GPT-J.

A token's key, and its value, is quantized under each KV head by itself: nothing depends on other tokens, so that a
block holds the same bytes wherever, whenever and beside whatever it is written. Elements are int8 or e4m3, and stand
for element * scale. Stored scales are float32, the largest magnitude of the head over the largest element. Scales are
applied outside of the products: a key's to the score, a value's to the softmax weight. Latents have several scales, of
LATENT_SCALE_DIMS dimensions each, and are expanded before the products; what is rotated beside them is in bfloat16.

Kernels that multiply int8 elements as integers round what they are multiplied with as well: queries as
`integer_queries` does it, softmax weights as `integer_weights` does it.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.config import LATENT_SCALE_DIMS, QUANTIZED, KVDtype
from quire.kernels.kv_cache import CacheLayout, Shape
from quire.kernels.paged_attention import RotarySpec
from quire.kernels.torch_arrays import TORCH_LIBRARY

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # element of each dtype
SMALLEST_MAGNITUDE = 1e-30  # a head with smaller numbers is stored as zeros with a scale of 0
SCALE_BYTES = 4
_ELEMENTS, _SCALE = slice(0, -SCALE_BYTES), slice(-SCALE_BYTES, None)
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
    return elements, _viewed(stored[..., head_dim:], torch.float32).squeeze(-1)


def encode_latents(x: Tensor, dtype: torch.dtype, latent_dim: int) -> Tensor:
    """Return latents x [..., head_dim] as a cache with scales stores them, int8 [..., width].

    Elements of `latent_dim` dimensions, of which each LATENT_SCALE_DIMS are quantized as a head is by `encode`; the
    other dimensions in bfloat16; the groups' scales.
    """
    latents, starts = x[..., :latent_dim], range(0, latent_dim, LATENT_SCALE_DIMS)
    parts = (latents[..., start : start + LATENT_SCALE_DIMS] for start in starts)
    groups = [encode(part, dtype, part.shape[-1] + SCALE_BYTES) for part in parts]
    elements, scales = ([group[..., part] for group in groups] for part in (_ELEMENTS, _SCALE))
    rotated = x[..., latent_dim:].bfloat16().contiguous().view(torch.int8)
    return torch.cat([*elements, rotated, *scales], dim=-1)


def decode_latents(stored: Tensor, dtype: torch.dtype, latent_dim: int, head_dim: int) -> Tensor:
    """Return what `encode_latents` has stored as the numbers that it stands for, float32 [..., head_dim]."""
    elements, rotated, scales = stored.tensor_split([latent_dim, 2 * head_dim - latent_dim], dim=-1)
    factors = _viewed(scales, torch.float32).repeat_interleave(LATENT_SCALE_DIMS, dim=-1)[..., :latent_dim]
    return torch.cat([elements.view(dtype).float() * factors, _viewed(rotated, torch.bfloat16).float()], dim=-1)


def _viewed(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as numbers of a wider dtype."""
    return stored.clone(memory_format=torch.contiguous_format).view(dtype)


def stored_rows(x: Tensor, cache: Tensor, scale: float, latent_dim: int) -> Tensor:
    """Return heads x [..., head_dim] as a cache [..., width] stores them: keys, values, or latents."""
    if not is_quantized(cache):
        return x.to(cache.dtype)
    if latent_dim and cache.shape[-1] > x.shape[-1]:
        return encode_latents(x, cache.dtype, latent_dim)
    return encode(x, cache.dtype, cache.shape[-1], scale)


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


def write_kv(
    spec: RotarySpec, query: Tensor, key: Tensor | None, value: Tensor | None, positions: Tensor, key_cache: Tensor,
    value_cache: Tensor, slot_mapping: Tensor,
) -> Tensor:  # fmt: skip
    """Turn query and key as `apply_rotary` does, if there is a table; store key and value; return the query.

    Token t's key and value go to slot `slot_mapping[t]`; -1 writes nothing. key and value [num_tokens, num_kv_heads,
    head_dim]; caches [num_blocks, block_size, num_kv_heads, head_dim], contiguous; slot_mapping [num_tokens] int64, no
    slot twice. A cache of 8-bit elements is [num_blocks, block_size, num_kv_heads, width], as `stored_rows`
    fills it, with the spec's scales unless it stores them. A value of None is not stored: it is a part of the key, or
    there is no key, either. One op, so that a back end may do it in one pass; it may rotate the query in place. Kwon et
    al. 2023, section 5.1.
    """
    assert (key is not None) == spec.has_keys
    if spec.cos_sin is not None:
        start, is_interleaved = spec.rotary_start, spec.is_interleaved
        keys = query[:, :0] if key is None else key
        turned = apply_rotary(
            query[..., start:], keys[..., start:], positions, spec.cos_sin, is_interleaved=is_interleaved
        )
        query, keys = (torch.cat([x[..., :start], new], dim=-1) for x, new in zip((query, keys), turned, strict=True))
        key = None if key is None else keys
    written = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping.index_select(0, written)
    for new, cache, scale in zip((key, value), (key_cache, value_cache), spec.kv_scales, strict=True):
        if new is None:
            continue
        rows = new.index_select(0, written)
        rows = stored_rows(rows, cache, scale, spec.value_dim)
        as_bytes(cache).view(-1, *rows.shape[1:]).index_copy_(0, slots, rows)
    return query


def apply_rotary(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, *, is_interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return query and key turned by their positions, in their own dtype; computed in float32, rounded once.

    query [num_tokens, num_heads, head_dim], key [num_tokens, num_kv_heads, head_dim], positions [num_tokens] int,
    cos_sin from `rotary_table.rotary_table`. Dimensions past rotary_dim pass through.
    """
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, rotary_dim / 2]
    rotate = _rotate_interleaved if is_interleaved else _rotate
    return rotate(query, cos, sin), rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*(part.to(x.dtype) for part in turned), x[..., 2 * half :]], dim=-1)


def _rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary_dim = 2 * cos.shape[-1]
    first, second = x[..., 0:rotary_dim:2].float(), x[..., 1:rotary_dim:2].float()
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., rotary_dim:]], dim=-1)


def copy_blocks(
    src_caches: list[Tensor], dst_caches: list[Tensor], src: NDArray[np.int64], dst: NDArray[np.int64]
) -> None:
    """Copy block src[i] of each source cache over block dst[i] of the destination at its place in the list, as if all
    were read before anything is written. Kwon et al. 2023, sections 4.5 and 5.1.

    Caches [num_blocks, ...]: the same ones twice, or the pool's and the swap space's in either direction, which share
    no memory and have blocks of the same shape at each place. src and dst [num_copies] int64, no
    destination twice.
    """
    for source, destination in zip(src_caches, dst_caches, strict=True):
        as_bytes(destination)[dst] = as_bytes(source)[src]


def _plain_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, extra_bytes: int = 0
) -> tuple[Shape, Shape]:
    """Return one shape for both. A head's scale stands behind its elements, which have one byte each."""
    assert extra_bytes == 0 or dtype.itemsize == 1, f"scales beside elements of {dtype}"
    shape = (num_blocks, block_size, num_kv_heads, head_dim + extra_bytes)
    return shape, shape


PLAIN = CacheLayout(
    shapes=_plain_shapes,
    own_dtype=lambda dtype: dtype,
    dtypes=(KVDtype("float32"), KVDtype("bfloat16"), KVDtype("float16"), *QUANTIZED.values()),
    dtype_of=TORCH_LIBRARY.dtype,
)
