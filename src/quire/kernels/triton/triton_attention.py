"""Paged attention in Triton: one op for decodes and for chunks of prompts (Kwon et al. 2023, section 4.1).

A row is one query head of one token. The heads that share a key-value head stand in one tile, so that keys and values
are read once for all of them; a tile of a chunk holds several tokens besides. Keys go by in tiles that begin at
multiples of their size, in ascending order, under a running softmax (Milakov and Gimelshein 2018). A table entry is
read once per tile, for keys and values, and never past what the tile sees.

The context is cut into segments at fixed positions: 256 tokens each at first, later ones longer (`count_segments`). A
decode folds each segment by itself and adds them up in ascending order, either in the registers of one program, or
out of memory where several programs share the context. Both take the same steps, so a row's bits do not depend on how
many there are. A plan, made on the device once a step, gives programs items of about the same length
(`_plan_kernel`); so one long context among many short ones, or a short query on a long context, is shared.

A chunk's tile folds its whole context, or its share of it, at one go, which is faster. With `is_exact` it folds by
segments, too, and decodes are tiles of one token of the same kernel: then a row's bits depend on neither batch nor
chunks.

Keys and values of 8 bits are widened in registers, to the query's dtype, which holds them exactly. A key's stored scale
is multiplied onto its scores, a value's onto its weights, which are summed without it.

Per token of context and key-value head, 2 * head_dim elements are read. Nothing has been measured on a GPU yet.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.kv_cache import ONES
from quire.kernels.paged_attention import AttentionMetadata, AttentionSpec
from quire.kernels.reference.kv_cache import as_bytes
from quire.kernels.triton import card
from quire.kernels.triton.card import wait_for_inputs
from quire.kernels.triton.quantized_cache import float_scales, form_of, places_of, widen

MAX_HEAD_DIM = 256
SEGMENT = tl.constexpr(256)   # tokens of a segment, a multiple of every key tile
NUM_SHORT = tl.constexpr(16)  # segments of so many; beyond, each doubling of the context has half as many
NUM_PROGRAMS = 2048           # about four on each of 132 processors, with as much again for uneven items
DECODE_ITEMS, CHUNK_ITEMS = 1024, 264  # aims of a plan: two to three rounds of as many programs as fit a card
DECODE_ROWS = 16              # least height of a product on matrix units
MAX_SCRATCH_BYTES = 256 << 20  # partial results of chunks; where there are more, tiles are many anyway

VARYING = ("num_seqs", "table_stride", "max_parts", "num_heads")  # vary with the step, get no kernels of their own
LOG2_E = tl.constexpr(1.4426950408889634)


def paged_attention(
    spec: AttentionSpec,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    is_exact: bool = False,
    attend_decodes: Callable[..., None] | None = None,
) -> Tensor:
    """Attend as `reference` does, with the metadata of the step; caches contiguous, in the plain layout.

    query [num_tokens, num_heads, head_dim] may be a slice of a wider projection. A context of 0 is no sequence: its
    rows of the result, and those behind the last sequence, hold anything. A batch with as many tokens as sequences is
    one of decodes, of one token each: without `is_exact`, a sequence of several tokens in it, beside some without any,
    is not attended for. A cache of 8 bits is as `quantized_cache`
    says. With `is_exact` a row has the same bits in every batch and chunk. `attend_decodes` is the kernel for
    sequences of one query, in place of this module's: it takes the result to write to, and then the arguments of this
    function up to `metadata`.
    """
    num_tokens, num_seqs, (num_heads, num_kv_heads, head_dim) = len(query), len(metadata.context_lens), spec.heads
    kv_form = form_of(key_cache, head_dim)
    width = head_dim + 4 * kv_form["HAS_SCALES"]
    assert key_cache.shape == value_cache.shape == (len(key_cache), metadata.block_size, num_kv_heads, width)
    assert key_cache.is_contiguous() and value_cache.is_contiguous(), "caches with gaps"
    assert key_cache.dtype == value_cache.dtype, f"keys {key_cache.dtype}, values {value_cache.dtype}"
    assert kv_form["KV"] or key_cache.dtype == query.dtype, f"queries {query.dtype}, caches {key_cache.dtype}"
    assert spec.kv_scales == ONES or not kv_form["HAS_SCALES"], f"{spec.kv_scales} beside stored ones"
    assert query.shape[1:] == (num_heads, head_dim), f"queries {tuple(query.shape)} for {spec.heads}"
    assert head_dim <= MAX_HEAD_DIM, f"head size {head_dim}"
    assert spec.is_causal, "attention in both directions"
    assert query.stride(2) == 1, "queries with gaps"
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    shape = tile_shape(num_heads // num_kv_heads, head_dim, query.dtype)
    shape |= {"NUM_KV_HEADS": num_kv_heads, "BLOCK_SIZE": metadata.block_size, "WINDOW": spec.window or 0}
    shape |= {"SOFTCAP": spec.softcap * LOG2_E.value, **kv_form}
    scale = spec.scale * spec.kv_scales.key
    step = (
        query, as_bytes(key_cache), as_bytes(value_cache), out, metadata.block_tables, metadata.query_starts,
        metadata.context_lens, num_seqs, query.stride(0), query.stride(1), metadata.block_tables.stride(0),
        LOG2_E.value * (2 * scale / spec.softcap if spec.softcap else scale),
        float_scales(key_cache, kv_form), float_scales(value_cache, kv_form), spec.kv_scales.value, spec.sinks,
    )  # fmt: skip
    if num_tokens > num_seqs or is_exact:
        options = chunk_options(head_dim, query.dtype, card.capability(query.device), is_exact=is_exact)
        if kv_form["KV"] and is_exact and not (kv_form["HAS_SCALES"] and options["KEYS"] == 32 and head_dim == 128):
            options["KEYS"] = max(16, options["KEYS"] // 2)  # widening takes registers, too
        _attend(step, shape | {"IS_DECODE": False, "IS_EXACT": is_exact}, metadata, options)
    if attend_decodes is not None:
        attend_decodes(out, spec, query, key_cache, value_cache, metadata)
    elif not is_exact:
        options = decode_options(shape["DIMS"], query.dtype)
        if kv_form["KV"]:
            options["KEYS"] = max(16, options["KEYS"] // 2)
        _attend(step, shape | {"IS_DECODE": True, "IS_EXACT": False}, metadata, options)
    return out


def tile_shape(group: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return what all tiles are cut to; `group` is query heads per key-value head."""
    return {
        "GROUP": group,
        "ROWS_PER_TOKEN": triton.next_power_of_2(group),
        "HEAD_DIM": head_dim,
        "DIMS": max(16, triton.next_power_of_2(head_dim)),
        "PRECISION": "ieee" if dtype.itemsize == 2 else "tf32x3",  # three products of upper and lower bits
    }


def chunk_options(head_dim: int, dtype: torch.dtype, capability: int, *, is_exact: bool = False) -> dict[str, Any]:
    """Return a chunk's tiles, and how they are compiled: the largest that spill no register on sm_80 and sm_90.

    Five stages make two buffers of keys and two of values: the read of the block table before them takes the others.
    For the largest heads that is more than the 99 KiB of a program on other cards. HAS_FULL_TILES: keys that all rows
    see go by in a loop of their own, without masks; on sm_120 that spills.
    """
    dims, is_wide = triton.next_power_of_2(head_dim), card.has_wide_products(capability)
    if dtype.itemsize == 4:
        rows, keys, num_warps, num_stages = (16 if is_exact else 32, 32, 4 if dims <= 64 or is_exact else 8, 2)
        if dims > 128:
            rows, keys, num_warps = 16, 16, 8
    elif is_exact:  # the fold so far takes as many registers as that of a segment
        rows, keys = 64 if dims <= 128 else 32, 64 if dims <= 128 and is_wide else 32
        num_warps, num_stages = 8, 5
        if head_dim < dims and not is_wide:
            keys = 16
    elif dims <= 128:
        rows, keys, num_warps, num_stages = 128, 64 if dims <= 64 or is_wide else 32, 8, 5
    else:
        rows, keys, num_warps, num_stages = 64, 32, 8, 5 if is_wide or capability == 80 else 4
    return {
        "ROWS": rows, "KEYS": keys, "HAS_FULL_TILES": dtype.itemsize == 2 and capability < 120, "num_warps": num_warps,
        "num_stages": num_stages,
    }  # fmt: skip


def decode_options(dims: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return a decode's tiles, and how they are compiled: 16 KiB of keys and as much of values, two of each in flight.

    That is 64 KiB for each of two programs on a processor, where 20 KiB would keep the memory busy. Heads of 32 have at
    most 4 KiB of each: more spill. A limit of 255 registers is none, but keeps ptxas from aiming at 168, so that three
    programs fit, at the price of spilling.
    """
    if dtype.itemsize == 4:
        keys, num_warps, num_stages = (16 if dims <= 32 else 32, 4, 5) if dims <= 128 else (16, 8, 2)
    else:
        keys, num_warps, num_stages = 64 if dims <= 32 else min(128, 8192 // dims), 4, 5
    return {
        "ROWS": DECODE_ROWS, "KEYS": keys, "HAS_FULL_TILES": False, "num_warps": num_warps, "num_stages": num_stages,
        "maxnreg": 255,
    }  # fmt: skip


def count_segments(context_len: int) -> int:
    """Return how many segments a context has: 16 up to 4,096 tokens, and 8 more for each doubling."""
    last, num_short = (context_len - 1) // int(SEGMENT.value), int(NUM_SHORT.value)
    octave = max(0, last.bit_length() - num_short.bit_length())
    later = num_short + octave * (num_short // 2) + (last - (num_short << octave)) // (2 << octave) + 1
    return last + 1 if last < num_short else later


def _attend(
    step: tuple[Any, ...], shape: dict[str, Any], metadata: AttentionMetadata, options: dict[str, Any]
) -> None:
    """Attend for the sequences of one query, or for the others (`is_exact`: for all), with a plan of the step."""
    query, num_seqs, sinks = step[0], step[7], step[-1]
    num_tokens, num_heads = query.shape[:2]
    is_decode, dims, num_kv_heads = shape["IS_DECODE"], shape["DIMS"], shape["NUM_KV_HEADS"]
    options["ROWS"] = max(options["ROWS"], shape["ROWS_PER_TOKEN"])
    if is_decode:  # a tile is one token
        shape["ROWS_PER_TOKEN"] = options["ROWS"]
    tokens = options["ROWS"] // shape["ROWS_PER_TOKEN"]
    num_rows = num_seqs if is_decode else num_tokens
    max_parts = count_segments(metadata.block_tables.shape[1] * metadata.block_size)
    row_bytes = num_heads * max_parts * (dims + 4) * 4
    if max_parts > 1 and not is_decode and num_rows * row_bytes > MAX_SCRATCH_BYTES:
        max_parts = 1
    plan = _plan(metadata, num_kv_heads, tokens, max_parts, shape)
    num_items = (num_seqs if is_decode else num_tokens // tokens + num_seqs) * max_parts  # at most
    scratch = (num_rows, num_heads, max_parts, dims + 4) if max_parts > 1 else (1,)
    partials = torch.empty(scratch, dtype=torch.float32, device=query.device)
    early = card.launch_options(query.device)
    _attend_kernel[(min(num_items, -(-NUM_PROGRAMS // num_kv_heads)), num_kv_heads)](
        *step, plan, partials, max_parts, **shape, **options, **early
    )
    if max_parts > 1:
        _combine_kernel[(num_rows, num_heads)](
            partials, step[3], metadata.query_starts, metadata.context_lens, plan, step[-2], sinks, num_seqs, max_parts,
            num_heads, TOKENS=tokens, BY_SEGMENT=is_decode or shape["IS_EXACT"], num_warps=4,
            KV=shape["KV"], HAS_SCALES=shape["HAS_SCALES"],
            **{name: shape[name] for name in ("WINDOW", "HEAD_DIM", "DIMS", "IS_DECODE", "IS_EXACT")}, **early,
        )  # fmt: skip


def _plan(
    metadata: AttentionMetadata, num_kv_heads: int, tokens: int, max_parts: int, shape: dict[str, Any]
) -> Tensor:
    """Return [num_seqs + 1] int32: how many items stand before each sequence's. Layers of one shape share a plan."""
    kind = shape["IS_DECODE"], shape["IS_EXACT"]
    key = (kind, num_kv_heads, tokens, max_parts, shape["WINDOW"])
    if key not in metadata.plans:
        num_seqs = len(metadata.context_lens)
        plan = torch.empty(num_seqs + 1, dtype=torch.int32, device=metadata.context_lens.device)
        aim = -(-(DECODE_ITEMS if kind[0] else CHUNK_ITEMS) // num_kv_heads)
        _plan_kernel[(1,)](
            metadata.query_starts, metadata.context_lens, plan, num_seqs, aim, max_parts, TOKENS=tokens,
            IS_DECODE=kind[0], IS_EXACT=kind[1], WINDOW=shape["WINDOW"], BLOCK=1024, num_warps=4,
        )  # fmt: skip
        metadata.plans[key] = plan
    kept: Tensor = metadata.plans[key]
    return kept


@triton.jit
def _count_segments(context_len):
    """Do what `count_segments` does, for any tensor: the number of segments that begin before `context_len`."""
    last = (context_len - 1) // SEGMENT  # the last token, in units
    octave = (tl.maximum(last, NUM_SHORT).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 131  # 16 units: octave 0
    later = NUM_SHORT + octave * (NUM_SHORT // 2) + (last - (NUM_SHORT << octave)) // (2 << octave) + 1
    return tl.where(last < NUM_SHORT, last + 1, later)


@triton.jit
def _begin_of(segment):
    """Return the first position of a segment."""
    octave = tl.maximum(segment - NUM_SHORT, 0) // (NUM_SHORT // 2)
    place = (segment - NUM_SHORT) % (NUM_SHORT // 2)
    later = ((NUM_SHORT * SEGMENT) << octave) + place * ((2 * SEGMENT) << octave)
    return tl.where(segment < NUM_SHORT, segment * SEGMENT, later)


@triton.jit
def _num_tiles(num_queries, context_len, TOKENS: tl.constexpr, IS_DECODE: tl.constexpr, IS_EXACT: tl.constexpr):
    """Return the tiles of a sequence in a launch: none if it is no sequence, or if the other launch attends for it."""
    is_here = context_len > 0
    if not IS_EXACT:
        is_here &= (num_queries == 1) if IS_DECODE else (num_queries > 1)
    return tl.where(is_here, (num_queries + TOKENS - 1) // TOKENS, 0)


@triton.jit
def _find(starts, index, num_seqs):
    """Return the last sequence that starts at `index` or before."""
    low, high = index * 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        is_later = tl.load(starts + middle) > index
        high = tl.where(is_later, middle, high)
        low = tl.where(is_later, low, middle)
    return low


@triton.jit(do_not_specialize=("num_seqs", "aim", "max_parts"))
def _plan_kernel(
    query_starts, context_lens, plan, num_seqs, aim, max_parts,
    TOKENS: tl.constexpr, IS_DECODE: tl.constexpr, IS_EXACT: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cut each sequence's tiles into items, so that there are about `aim` of the same length, or one for each tile.

    A unit of work is one tile of queries and SEGMENT tokens of context.
    """
    work = num_seqs * 0
    length = work
    for is_last in tl.static_range(2):
        before = num_seqs * 0
        for start in range(0, num_seqs, BLOCK):
            sequence = start + tl.arange(0, BLOCK)
            is_there = sequence < num_seqs
            first = tl.load(query_starts + sequence, mask=is_there, other=0)
            num_queries = tl.load(query_starts + sequence + 1, mask=is_there, other=0) - first
            context_len = tl.load(context_lens + sequence, mask=is_there, other=0)
            tiles = _num_tiles(num_queries, context_len, TOKENS, IS_DECODE, IS_EXACT)
            seen = context_len
            if WINDOW > 0:
                seen = tl.minimum(context_len, WINDOW + num_queries)
            units = (seen + SEGMENT - 1) // SEGMENT
            if is_last == 0:
                work += tl.sum(tiles * units, 0)
            else:
                parts = tl.minimum((units + length - 1) // length, tl.minimum(_count_segments(context_len), max_parts))
                items = tiles * tl.maximum(parts, 1)
                tl.store(plan + 1 + sequence, before + tl.cumsum(items, 0), mask=is_there)
                before += tl.sum(items, 0)
        length = tl.maximum((work + aim - 1) // aim, 1 if IS_DECODE else 2)
    tl.store(plan, 0)


@triton.jit
def _load(places, is_there, is_dim, IS_FULL: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Return what is at `places`, and zeros where nothing is: 0 times NaN is NaN.

    IS_FULL: all keys are there. IS_WHOLE: all dimensions are.
    """
    if not IS_FULL:
        found = tl.load(places, mask=is_there & is_dim, other=0)
    elif IS_WHOLE:
        found = tl.load(places)
    else:
        found = tl.load(places, mask=is_dim, other=0)
    return found


@triton.jit
def _fold_keys(
    query, positions, begin, end, first_seen, highest, total, weighted, key_cache, value_cache, table, scale, kv_head,
    key_scales, value_scales, KV: tl.constexpr, HAS_SCALES: tl.constexpr,
    IS_FULL: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend from rows at `positions` [ROWS] to keys [begin, end), of which those before `first_seen` are not there.

    Go on from the highest score, the sum of weights and the weighted values so far, [ROWS], [ROWS] and [ROWS, DIMS],
    base 2, and return them. A position of -1 sees nothing. Tiles of which a row sees nothing leave it exactly as it is.
    IS_FULL: every row that counts sees every key, in whole tiles. With a softcap, `scale` makes scores exponents of
    tanh. Sums of products are written as such, so that both forms round alike.
    """
    dims = tl.arange(0, DIMS)
    is_dim = dims < HEAD_DIM
    for start in range(begin // KEYS * KEYS, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_there = (keys >= first_seen) & (keys < end)
        if IS_FULL:
            block = tl.load(table + keys // BLOCK_SIZE).to(tl.int64)
        else:
            block = tl.load(table + keys // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
        heads = keys % BLOCK_SIZE * NUM_KV_HEADS + kv_head  # places among the heads of their blocks
        slots, scale_places = places_of(block, heads, BLOCK_SIZE * NUM_KV_HEADS, HEAD_DIM, HAS_SCALES)
        key_places, value_places = key_cache + slots[None, :] + dims[:, None], value_cache + slots[:, None] + dims[None]
        key = _load(key_places, is_there[None, :], is_dim[:, None], IS_FULL, HEAD_DIM == DIMS)  # [DIMS, KEYS]
        if HAS_SCALES:  # scales are read before what they belong to: else a register more is taken
            key_scale = _load(key_scales + scale_places, is_there, True, IS_FULL, True)
        scores = tl.dot(query, widen(key, KV, query.dtype), input_precision=PRECISION)
        if HAS_SCALES:
            scores *= key_scale[None, :]
        if SOFTCAP > 0:
            scores = tl.fma(1 / (1 + tl.exp2(scores * scale)), -2.0 * SOFTCAP, SOFTCAP)  # SOFTCAP * tanh
        if not IS_FULL:
            is_seen = keys[None, :] <= positions[:, None]
            if WINDOW > 0:
                is_seen &= keys[None, :] > positions[:, None] - WINDOW
            scores = tl.where(is_seen & is_there[None, :], scores, float("-inf"))
        factor = 1.0 if SOFTCAP > 0 else scale
        higher = tl.maximum(highest, tl.max(scores, 1) * factor)
        base = higher
        if not IS_FULL:
            base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf less -inf would be NaN
        weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
        rescale = tl.exp2(highest - base)
        if HAS_SCALES:
            value_scale = _load(value_scales + scale_places, is_there, True, IS_FULL, True)
        value = _load(value_places, is_there[:, None], is_dim[None, :], IS_FULL, HEAD_DIM == DIMS)  # [KEYS, DIMS]
        total = tl.fma(total, rescale, tl.sum(weights, 1))
        if HAS_SCALES:
            weights *= value_scale[None, :]
        value = widen(value, KV, query.dtype)
        weighted = tl.dot(weights.to(value.dtype), value, weighted * rescale[:, None], input_precision=PRECISION)
        highest = higher
    return highest, total, weighted


@triton.jit
def _fold(
    query, positions, begin, full_end, end, first_seen, key_cache, value_cache, table, scale, kv_head, key_scales,
    value_scales, KV: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_FULL_TILES: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Fold keys [begin, end) from nothing; those before `full_end`, which every row sees, without masks if asked to."""
    highest, total, weighted = _nothing(ROWS, DIMS)
    if HAS_FULL_TILES:
        full = tl.maximum(tl.minimum(full_end, end // KEYS * KEYS), begin)
        highest, total, weighted = _fold_keys(
            query, positions, begin, full, first_seen, highest, total, weighted, key_cache, value_cache, table, scale,
            kv_head, key_scales, value_scales, KV, HAS_SCALES,
            True, NUM_KV_HEADS, BLOCK_SIZE, WINDOW, HEAD_DIM, DIMS, KEYS, PRECISION, SOFTCAP,
        )  # fmt: skip
        begin = full
    return _fold_keys(
        query, positions, begin, end, first_seen, highest, total, weighted, key_cache, value_cache, table, scale,
        kv_head, key_scales, value_scales, KV, HAS_SCALES,
        False, NUM_KV_HEADS, BLOCK_SIZE, WINDOW, HEAD_DIM, DIMS, KEYS, PRECISION, SOFTCAP,
    )  # fmt: skip


@triton.jit
def _nothing(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Return the highest score, sum of weights and weighted values of rows that have seen no key."""
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    return highest, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIMS], tl.float32)


@triton.jit
def _add(highest, total, weighted, other_highest, other_total, other_weighted):
    """Return the fold of two parts, the earlier one first; one that has seen nothing leaves the other as it is."""
    higher = tl.maximum(highest, other_highest)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    rescale, other_rescale = tl.exp2(highest - base), tl.exp2(other_highest - base)
    total = tl.fma(total, rescale, other_total * other_rescale)
    if len(weighted.shape) == 2:
        rescale, other_rescale = rescale[:, None], other_rescale[:, None]
    return higher, total, tl.fma(weighted, rescale, other_weighted * other_rescale)


@triton.jit
def _mean(highest, total, weighted, value_scale, sinks, heads, is_row, KV: tl.constexpr, HAS_SCALES: tl.constexpr):
    """Return the means of weighted values; the sink of a row's head is one more key, of zeros."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0) * LOG2_E
        higher = tl.maximum(highest, sink)
        rescale = tl.exp2(highest - higher)
        factor = rescale / tl.fma(total, rescale, tl.exp2(sink - higher))
    else:
        factor = 1.0 / tl.where(total > 0, total, 1.0)
    if KV != "" and not HAS_SCALES:
        factor *= value_scale
    if len(weighted.shape) == 2:
        factor = factor[:, None]
    return weighted * factor


@triton.jit
def _item(plan, query_starts, item, num_seqs, TOKENS: tl.constexpr):
    """Return an item's sequence, its first token, its queries; the tile's first query; the part, and of how many."""
    sequence = _find(plan, item, num_seqs)
    first_token = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first_token
    place = item - tl.load(plan + sequence)
    num_parts = (tl.load(plan + sequence + 1) - tl.load(plan + sequence)) // tl.cdiv(num_queries, TOKENS)
    return sequence, first_token, num_queries, place // num_parts * TOKENS, place % num_parts, num_parts


@triton.jit(do_not_specialize=VARYING)
def _attend_kernel(
    query, key_cache, value_cache, out, block_tables, query_starts, context_lens, num_seqs,
    token_stride, head_stride, table_stride, scale, key_scales, value_scales, value_scale, sinks, plan, partials,
    max_parts, KV: tl.constexpr, HAS_SCALES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, HAS_FULL_TILES: tl.constexpr,
    IS_DECODE: tl.constexpr, IS_EXACT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Items of the plan for one key-value head: a few tokens of one sequence over a run of segments of its context.

    The only part of a context is the answer; of several, each leaves its highest score, sum of weights and weighted
    values: one for each segment, or of a chunk one for the part.
    """
    wait_for_inputs(OVERLAPS)
    TOKENS: tl.constexpr = ROWS // ROWS_PER_TOKEN
    BY_SEGMENT: tl.constexpr = IS_DECODE or IS_EXACT
    kv_head, num_items = tl.program_id(1), tl.load(plan + num_seqs)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item = num_items - 1 - number  # items that see most begin first
        sequence, first_token, num_queries, offset, part, num_parts = _item(plan, query_starts, item, num_seqs, TOKENS)
        context_len = tl.load(context_lens + sequence)
        queries = offset + rows // ROWS_PER_TOKEN
        heads = kv_head * GROUP + rows % ROWS_PER_TOKEN
        is_head = rows % ROWS_PER_TOKEN < GROUP
        is_row = (queries < num_queries) & is_head
        tokens = (first_token + queries).to(tl.int64)
        tile = tl.load(
            query + tokens[:, None] * token_stride + heads[:, None] * head_stride + dims[None, :],
            mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        first_position = context_len - num_queries + offset
        positions = tl.where(is_row, context_len - num_queries + queries, -1)
        end = tl.minimum(first_position + TOKENS, context_len)  # end of what the tile sees
        first_seen = first_position * 0
        if WINDOW > 0:
            first_seen = tl.maximum(first_position - WINDOW + 1, 0)
        first_segment = _count_segments(first_seen + 1) - 1
        num_segments = _count_segments(end) - first_segment
        segment = first_segment + part * num_segments // num_parts
        last_segment = first_segment + (part + 1) * num_segments // num_parts
        table = block_tables + sequence.to(tl.int64) * table_stride
        full_end = first_position * 0
        if HAS_FULL_TILES and WINDOW == 0:
            full_end = (first_position + 1) // KEYS * KEYS  # every row of a token sees all before
        if BY_SEGMENT:
            highest, total, weighted = _nothing(ROWS, DIMS)
            for index in range(segment, last_segment):
                own_highest, own_total, own_weighted = _fold(
                    tile, positions, tl.maximum(_begin_of(index), first_seen), full_end,
                    tl.minimum(_begin_of(index + 1), end), first_seen, key_cache, value_cache, table, scale, kv_head,
                    key_scales, value_scales, KV, HAS_SCALES,
                    HAS_FULL_TILES and WINDOW == 0, NUM_KV_HEADS, BLOCK_SIZE, WINDOW, HEAD_DIM, DIMS, KEYS, ROWS,
                    PRECISION, SOFTCAP,
                )  # fmt: skip
                if num_parts > 1:
                    own_tokens, own_is_row = _rows_of(query_starts, sequence, queries, is_head)
                    place = _place(
                        partials, sequence, own_tokens, heads, max_parts, NUM_KV_HEADS * GROUP, DIMS, IS_DECODE
                    )
                    _leave(place + index * (DIMS + 4), own_is_row, own_highest, own_total, own_weighted, DIMS)
                else:
                    highest, total, weighted = _add(highest, total, weighted, own_highest, own_total, own_weighted)
        else:
            highest, total, weighted = _fold(
                tile, positions, tl.maximum(_begin_of(segment), first_seen), full_end,
                tl.minimum(_begin_of(last_segment), end), first_seen, key_cache, value_cache, table, scale, kv_head,
                key_scales, value_scales, KV, HAS_SCALES,
                HAS_FULL_TILES and WINDOW == 0, NUM_KV_HEADS, BLOCK_SIZE, WINDOW, HEAD_DIM, DIMS, KEYS, ROWS,
                PRECISION, SOFTCAP,
            )  # fmt: skip
        tokens, is_row = _rows_of(query_starts, sequence, queries, is_head)
        if num_parts == 1:
            tl.store(
                out + (tokens * NUM_KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :],
                _mean(highest, total, weighted, value_scale, sinks, heads, is_row, KV, HAS_SCALES),
                mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
            )
        elif not BY_SEGMENT:
            place = _place(partials, sequence, tokens, heads, max_parts, NUM_KV_HEADS * GROUP, DIMS, IS_DECODE)
            _leave(place + part * (DIMS + 4), is_row, highest, total, weighted, DIMS)


@triton.jit
def _rows_of(query_starts, sequence, queries, is_head):
    """Return the tokens of rows, int64, and whether there is one of each.

    Read again after keys went by: else addresses of 8 rows are kept meanwhile, in 16 registers that the loop needs.
    """
    first = tl.load(query_starts + sequence, volatile=True)
    num_queries = tl.load(query_starts + sequence + 1, volatile=True) - first
    return (first + queries).to(tl.int64), (queries < num_queries) & is_head


@triton.jit
def _place(
    partials, sequence, tokens, heads, max_parts, HEADS: tl.constexpr, DIMS: tl.constexpr, IS_DECODE: tl.constexpr
):
    """Return where the parts of rows are left, pointers [ROWS]."""
    place = sequence.to(tl.int64) if IS_DECODE else tokens
    return partials + (place * HEADS + heads) * max_parts * (DIMS + 4)


@triton.jit
def _leave(place, is_row, highest, total, weighted, DIMS: tl.constexpr):
    """Store a part of rows at `place` [ROWS], in rows of DIMS + 4 floats: aligned to 16 bytes."""
    tl.store(place[:, None] + tl.arange(0, DIMS)[None, :], weighted, mask=is_row[:, None])
    tl.store(place + DIMS, highest, mask=is_row)
    tl.store(place + DIMS + 1, total, mask=is_row)


@triton.jit(do_not_specialize=VARYING)
def _combine_kernel(
    partials, out, query_starts, context_lens, plan, value_scale, sinks, num_seqs, max_parts, num_heads,
    WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TOKENS: tl.constexpr, IS_DECODE: tl.constexpr,
    IS_EXACT: tl.constexpr, BY_SEGMENT: tl.constexpr, KV: tl.constexpr, HAS_SCALES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One head of one token, or of the token of a sequence: its parts folded in ascending order, if it has several."""
    wait_for_inputs(OVERLAPS)
    row, head = tl.program_id(0), tl.program_id(1)
    sequence = row if IS_DECODE else _find(query_starts, row, num_seqs)
    token = tl.load(query_starts + sequence) if IS_DECODE else row
    context_len = tl.load(context_lens + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - tl.load(query_starts + sequence)
    num_items = tl.load(plan + sequence + 1) - tl.load(plan + sequence)
    num_parts = num_items // tl.maximum(_num_tiles(num_queries, context_len, TOKENS, IS_DECODE, IS_EXACT), 1)
    offset = token - tl.load(query_starts + sequence)
    if (num_parts > 1) & (offset < num_queries):  # not behind the last sequence, where a graph's padding is
        dims = tl.arange(0, DIMS)
        first, stop = num_parts * 0, num_parts
        if BY_SEGMENT:
            position = context_len - num_queries + offset
            if WINDOW > 0:
                first = _count_segments(tl.maximum(position - WINDOW + 1, 0) + 1) - 1
            stop = _count_segments(position + 1)
        place = partials + (row.to(tl.int64) * num_heads + head) * max_parts * (DIMS + 4)
        highest, total, weighted = float("-inf"), 0.0, tl.zeros([DIMS], tl.float32)
        for part in tl.range(first, stop, num_stages=4):
            own = place + part * (DIMS + 4)
            highest, total, weighted = _add(
                highest, total, weighted, tl.load(own + DIMS), tl.load(own + DIMS + 1), tl.load(own + dims)
            )
        mean = _mean(highest, total, weighted, value_scale, sinks, head, True, KV, HAS_SCALES)
        tl.store(out + (token.to(tl.int64) * num_heads + head) * HEAD_DIM + dims, mean, mask=dims < HEAD_DIM)
