"""Keys and values in 8 bits on a GPU: the layout of a block, and the two conversions of an element.

The arithmetic is that of `kernels/reference/kv_quantization`. Where scales are stored, a block is its elements
[block_size, num_kv_heads, head_dim] and then their float32 scales [block_size, num_kv_heads], so that elements are
read 16 bytes at a time. e4m3 is made and widened by integer operations, of which every card has all: the bits are
those of PyTorch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.reference.kv_cache import LARGEST, is_quantized

KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}
assert KINDS.keys() == LARGEST.keys()


def form_of(cache: Tensor, head_dim: int) -> dict[str, Any]:
    """Return what a kernel is compiled for: the elements of a cache, "" where they have 16 or 32 bits, and scales."""
    has_scales = is_quantized(cache) and cache.shape[3] == head_dim + 4
    assert not has_scales or cache[0].numel() % 4 == 0, f"blocks of {cache[0].numel()} bytes"
    return {"KV": KINDS.get(cache.dtype, ""), "HAS_SCALES": has_scales}


def float_scales(cache: Tensor, form: dict[str, Any]) -> Tensor | None:
    """Return a cache as float32, for its scales; None if it stores none."""
    return cache.view(torch.int8).view(-1).view(torch.float32) if form["HAS_SCALES"] else None


@triton.jit
def places_of(block, heads, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_SCALES: tl.constexpr):
    """Return where heads begin in a cache, in elements, and where their scales are, in floats.

    `heads` are counted in their block, which has HEADS: token after token.
    """
    if HAS_SCALES:
        BYTES: tl.constexpr = HEADS * (HEAD_DIM + 4)
        starts, scales = block * BYTES + heads * HEAD_DIM, (block + 1) * (BYTES // 4) - HEADS + heads
    else:
        starts, scales = (block * HEADS + heads) * HEAD_DIM, heads
    return starts, scales


@triton.jit
def widen(x, KV: tl.constexpr, DTYPE: tl.constexpr):
    """Return elements of 8 bits, as int8, in a dtype that holds them exactly; others as they are."""
    if KV == "int8":
        x = x.to(DTYPE)
    elif KV == "e4m3":
        bits = x.to(tl.int16)
        half = ((bits & 0x7F) << 7) | (bits & -0x8000)  # its exponent is too small by 8
        number = half.to(tl.float16, bitcast=True) * 256.0
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), number).to(DTYPE)
    return x


@triton.jit
def narrow(x, KV: tl.constexpr):
    """Return float32 numbers, of at most the largest element, rounded to it; ties to even. int8 is the bits of both."""
    if KV == "int8":
        bits = (x + 12582912.0).to(tl.int32, bitcast=True)  # 1.5 * 2 ** 23: integers are its last bits
    else:
        bits = x.to(tl.int32, bitcast=True)
        sign, bits = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
        # Below 2 ** -6 the distance of numbers is 2 ** -9, that of floats from 2 ** 14 on.
        small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1) - 0x3C000000) >> 20
        bits = tl.where(bits < 0x3C800000, small, normal) | sign
    return bits.to(tl.int8)


@triton.jit
def magnitude(x, is_there):
    """Return the bits of the largest magnitude of each row [rows, n]: NaN is above infinity, and that above numbers."""
    return tl.max(tl.where(is_there, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), 1)


@triton.jit
def scales_of(magnitudes, KV: tl.constexpr):
    """Return what rows with these magnitudes are multiplied with, 0 for zeros, and the scales that are stored."""
    LARGEST_ELEMENT: tl.constexpr = 127.0 if KV == "int8" else 448.0
    numbers, is_finite = magnitudes.to(tl.float32, bitcast=True), magnitudes < 0x7F800000
    is_plain = is_finite & (numbers >= 1e-30)
    numbers = tl.where(is_plain, numbers, 1.0)
    largest = tl.full(numbers.shape, LARGEST_ELEMENT, tl.float32)
    factors = tl.where(is_plain, tl.div_rn(largest, numbers), 0.0)
    other = tl.where(is_finite, 0.0, float("nan"))
    return factors, tl.where(is_plain, tl.div_rn(numbers, largest), other)


@triton.jit
def encode(x, factors, KV: tl.constexpr, HAS_SCALES: tl.constexpr):
    """Return rows [rows, n] of float32 as elements: times `factors` [rows], or, without stored scales, a number."""
    if HAS_SCALES:
        elements = narrow(tl.where(factors[:, None] > 0, x * factors[:, None], 0.0), KV)
    else:
        is_finite = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
        saturated = tl.minimum(tl.maximum(x * factors, -448.0), 448.0)
        elements = tl.where(is_finite, narrow(saturated, KV), 0x7F).to(tl.int8)
    return elements
