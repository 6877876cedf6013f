"""Paged attention in Triton: one op for decodes and for chunks of prompts (Kwon et al. 2023, section 4.1).

A row is one query head of one token. The heads that share a key-value head stand in one tile, so that keys and values
are read once for all of them; a tile of a chunk holds several tokens besides. Keys go by in tiles that begin at
multiples of their size, in ascending order, under a running softmax (Milakov and Gimelshein 2018). A table entry is
read once per tile, for keys and values, and never past what the tile sees.

A sequence that advances by one token is cut into partitions of its context, which several programs share; a second
kernel puts them together. How long a partition is depends on the context alone, so the order in which a row is reduced
does, too: not on the batch, nor on how many programs there are. A chunk's tile sees its whole context in one program.

Per token of context and key-value head, 2 * head_dim elements are read. Nothing has been measured on a GPU yet.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.paged_attention import AttentionMetadata

MAX_HEAD_DIM = 256
PARTITION = 256       # least tokens of context in a partition; a multiple of every key tile
MAX_PARTITIONS = 32   # beyond, partitions double: what they leave behind stays small, and 8 heads still fill a card
TARGET_PROGRAMS = 2048  # about four on each of 132 processors, with as much again for uneven contexts
DECODE_ROWS = 16      # least height of a product on matrix units

VARYING = ("num_seqs", "table_stride", "max_partitions")  # by the step: they get no kernels of their own
LOG2_E = tl.constexpr(1.4426950408889634)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend as `reference` does, with the metadata of the step; caches contiguous, in the plain layout.

    query [num_tokens, num_heads, head_dim] may be a slice of a wider projection. A context of 0 is no sequence:
    its rows of the result hold anything.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_seqs, num_kv_heads = len(metadata.context_lens), key_cache.shape[2]
    assert key_cache.shape == value_cache.shape == (len(key_cache), metadata.block_size, num_kv_heads, head_dim)
    assert key_cache.is_contiguous() and value_cache.is_contiguous(), "caches with gaps"
    assert key_cache.dtype == value_cache.dtype == query.dtype, f"queries {query.dtype}, caches {key_cache.dtype}"
    assert num_heads % num_kv_heads == 0, f"{num_heads} heads over {num_kv_heads}"
    assert head_dim <= MAX_HEAD_DIM, f"head size {head_dim}"
    assert query.stride(2) == 1, "queries with gaps"
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous())
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    shape = tile_shape(num_heads // num_kv_heads, head_dim, query.dtype)
    shape |= {"NUM_KV_HEADS": num_kv_heads, "BLOCK_SIZE": metadata.block_size, "WINDOW": window or 0}
    shape["SOFTCAP"] = softcap * LOG2_E.value
    step = (
        query, key_cache, value_cache, out, metadata.block_tables, metadata.query_starts, metadata.context_lens,
        num_seqs, query.stride(0), query.stride(1), metadata.block_tables.stride(0),
        LOG2_E.value * (2 * scale / softcap if softcap else scale), sinks,
    )  # fmt: skip
    if num_tokens > num_seqs:
        options = chunk_options(shape["DIMS"], query.dtype, capability(query.device))
        options["ROWS"] = max(options["ROWS"], shape["ROWS_PER_TOKEN"])
        tokens = options["ROWS"] // shape["ROWS_PER_TOKEN"]
        grid = (num_tokens // tokens + num_seqs, num_kv_heads)  # at most so many tiles, each sequence's last not full
        _chunk_kernel[grid](*step, **shape, **options)
    _attend_decodes(step, shape, metadata, query, out)
    return out


@cache
def capability(device: torch.device) -> int:
    """Return 10 times the card's compute capability; of the interpreter, that of the oldest card that is served."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    return 10 * major + minor


def tile_shape(group: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return what all tiles are cut to; `group` is query heads per key-value head."""
    return {
        "GROUP": group,
        "ROWS_PER_TOKEN": triton.next_power_of_2(group),
        "HEAD_DIM": head_dim,
        "DIMS": max(16, triton.next_power_of_2(head_dim)),
        "PRECISION": "ieee" if dtype.itemsize == 2 else "tf32x3",  # three products of upper and lower bits
    }


def chunk_options(dims: int, dtype: torch.dtype, capability: int) -> dict[str, int]:
    """Return a chunk's tiles, and how they are compiled: the largest that spill no register on sm_80 and sm_90.

    Five stages make two buffers of keys and two of values: the read of the block table before them takes the others.
    For the largest heads that is more than the 99 KiB of a program on other cards.
    """
    if dtype.itemsize == 4:
        rows, keys, num_warps, num_stages = (32, 32, 4, 2) if dims <= 128 else (16, 16, 8, 2)
    elif dims <= 128:
        rows, keys, num_warps, num_stages = 128, 64 if dims <= 64 or capability >= 90 else 32, 8, 5
    else:
        rows, keys, num_warps, num_stages = 64, 32, 8, 5 if capability in (80, 90, 100) else 4
    return {"ROWS": rows, "KEYS": keys, "num_warps": num_warps, "num_stages": num_stages}


def decode_options(dims: int, dtype: torch.dtype) -> dict[str, int]:
    """Return a decode's tiles, and how they are compiled: 16 KiB of keys and as much of values, two of each in flight.

    That is 32 to 64 KiB for each of two or three programs on a processor, where 20 KiB would keep the memory busy.
    """
    if dtype.itemsize == 4:
        keys, num_warps, num_stages = (32, 4, 5) if dims <= 128 else (16, 8, 2)
    else:
        keys, num_warps, num_stages = min(128, 8192 // dims), 4, 5
    return {"KEYS": keys, "num_warps": num_warps, "num_stages": num_stages}


def _attend_decodes(
    step: tuple[object, ...], shape: dict[str, Any], metadata: AttentionMetadata, query: Tensor, out: Tensor
) -> None:
    """Attend for the sequences of one query: partition by partition, then all of them together."""
    num_seqs, num_heads, dims = len(metadata.context_lens), query.shape[1], shape["DIMS"]
    max_partitions = min(MAX_PARTITIONS, -(-metadata.block_tables.shape[1] * metadata.block_size // PARTITION))
    partials = torch.empty(
        (num_seqs, num_heads, max_partitions, dims + 2) if max_partitions > 1 else (1,),
        dtype=torch.float32,
        device=query.device,
    )
    num_programs = min(max_partitions, -(-TARGET_PROGRAMS // (num_seqs * shape["NUM_KV_HEADS"])))
    limits = {"PARTITION": PARTITION, "MAX_PARTITIONS": MAX_PARTITIONS}
    _decode_kernel[(num_seqs, shape["NUM_KV_HEADS"], num_programs)](
        *step, partials, max_partitions, ROWS=max(DECODE_ROWS, shape["ROWS_PER_TOKEN"]),
        **shape, **limits, **decode_options(dims, query.dtype),
    )  # fmt: skip
    if max_partitions > 1:
        _combine_kernel[(num_seqs, num_heads)](
            partials, out, metadata.query_starts, metadata.context_lens, step[-1], max_partitions, num_heads,
            HEAD_DIM=shape["HEAD_DIM"], DIMS=dims, **limits, num_warps=4,
        )  # fmt: skip


@triton.jit
def _partition(context_len, PARTITION: tl.constexpr, MAX_PARTITIONS: tl.constexpr):
    """Return how many tokens a partition of this context has: as few as MAX_PARTITIONS of them allow."""
    length = context_len * 0 + PARTITION
    while length * MAX_PARTITIONS < context_len:
        length *= 2
    return length


@triton.jit
def _fold_keys(
    query, positions, begin, end, first_seen, key_cache, value_cache, table, scale, kv_head,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend from rows at `positions` [ROWS] to keys [begin, end), of which those before `first_seen` are not there.

    Return the highest score, the sum of weights and the weighted values, [ROWS], [ROWS] and [ROWS, DIMS], base 2. A
    position of -1 sees nothing. Tiles of which a row sees nothing leave it exactly as it is. Of a row that sees
    anything, the sum is at least the 1 of its highest score. With a softcap, `scale` is what makes scores exponents of
    tanh.
    """
    dims = tl.arange(0, DIMS)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, DIMS], tl.float32)
    for start in range(begin // KEYS * KEYS, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_there = (keys >= first_seen) & (keys < end)
        block = tl.load(table + keys // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
        slots = ((block * BLOCK_SIZE + keys % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
        key = tl.load(
            key_cache + slots[None, :] + dims[:, None], mask=is_there[None, :] & (dims < HEAD_DIM)[:, None], other=0.0
        )  # [DIMS, KEYS]
        scores = tl.dot(query, key, input_precision=PRECISION) * scale
        if SOFTCAP > 0:
            scores = SOFTCAP - 2 * SOFTCAP / (1 + tl.exp2(scores))  # SOFTCAP * tanh
        is_seen = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            is_seen &= keys[None, :] > positions[:, None] - WINDOW
        scores = tl.where(is_seen & is_there[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf less -inf would be NaN
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(highest - base)
        value = tl.load(
            value_cache + slots[:, None] + dims[None, :], mask=is_there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0
        )  # [KEYS, DIMS]; zero where nothing is: 0 times NaN is NaN
        total = total * rescale + tl.sum(weights, 1)
        weighted = tl.dot(weights.to(value.dtype), value, weighted * rescale[:, None], input_precision=PRECISION)
        highest = higher
    return highest, total, weighted


@triton.jit
def _mean(highest, total, weighted, sinks, heads, is_row):
    """Return the means [ROWS, DIMS] of weighted values; the sink of a row's head is one more key, of zeros."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0) * LOG2_E
        higher = tl.maximum(highest, sink)
        rescale = tl.exp2(highest - higher)
        return weighted * (rescale / (total * rescale + tl.exp2(sink - higher)))[:, None]
    return weighted / tl.maximum(total, 1.0)[:, None]


@triton.jit(do_not_specialize=VARYING)
def _decode_kernel(
    query, key_cache, value_cache, out, block_tables, query_starts, context_lens, num_seqs,
    token_stride, head_stride, table_stride, scale, sinks, partials, max_partitions,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, PARTITION: tl.constexpr,
    MAX_PARTITIONS: tl.constexpr,
):  # fmt: skip
    """One sequence of one query and one key-value head: every `num_programs`-th partition of its context.

    One partition is the answer; of several, each leaves its weighted values, highest score and sum of weights.
    """
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_starts + sequence)
    context_len = tl.load(context_lens + sequence)
    if (tl.load(query_starts + sequence + 1) - token == 1) & (context_len > 0):
        rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
        is_row = rows < GROUP
        heads = kv_head * GROUP + rows
        tile = tl.load(
            query + token.to(tl.int64) * token_stride + heads[:, None] * head_stride + dims[None, :],
            mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        positions = tl.where(is_row, context_len - 1, -1)
        first_seen = context_len * 0
        if WINDOW > 0:
            first_seen = tl.maximum(context_len - WINDOW, 0)
        length = _partition(context_len, PARTITION, MAX_PARTITIONS)
        num_partitions = tl.cdiv(context_len, length)
        for partition in range(tl.program_id(2), num_partitions, tl.num_programs(2)):
            highest, total, weighted = _fold_keys(
                tile, positions, tl.maximum(partition * length, first_seen),
                tl.minimum((partition + 1) * length, context_len), first_seen, key_cache, value_cache,
                block_tables + sequence.to(tl.int64) * table_stride, scale, kv_head,
                NUM_KV_HEADS, BLOCK_SIZE, WINDOW, HEAD_DIM, DIMS, KEYS, ROWS, PRECISION, SOFTCAP,
            )  # fmt: skip
            if num_partitions == 1:
                tl.store(
                    out + (token.to(tl.int64) * NUM_KV_HEADS * GROUP + heads[:, None]) * HEAD_DIM + dims[None, :],
                    _mean(highest, total, weighted, sinks, heads, is_row),
                    mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
                )
            else:
                place = (sequence.to(tl.int64) * NUM_KV_HEADS * GROUP + heads) * max_partitions + partition
                place = partials + place * (DIMS + 2)
                tl.store(place[:, None] + dims[None, :], weighted, mask=is_row[:, None])
                tl.store(place + DIMS, highest, mask=is_row)
                tl.store(place + DIMS + 1, total, mask=is_row)


@triton.jit(do_not_specialize=("max_partitions",))
def _combine_kernel(
    partials, out, query_starts, context_lens, sinks, max_partitions, num_heads,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, PARTITION: tl.constexpr, MAX_PARTITIONS: tl.constexpr,
):  # fmt: skip
    """One sequence of one query and one head: the mean of its partitions, weighed; those beyond it add exact zeros."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_starts + sequence)
    context_len = tl.load(context_lens + sequence)
    length = _partition(context_len, PARTITION, MAX_PARTITIONS)
    is_one_query = tl.load(query_starts + sequence + 1) - token == 1
    if is_one_query & (context_len > length):
        index, dims = tl.arange(0, MAX_PARTITIONS), tl.arange(0, DIMS)
        is_there = index < tl.cdiv(context_len, length)
        place = partials + ((sequence.to(tl.int64) * num_heads + head) * max_partitions + index) * (DIMS + 2)
        highest = tl.load(place + DIMS, mask=is_there, other=float("-inf"))
        highest_of_all = tl.max(highest, 0)
        if sinks is not None:
            sink = tl.load(sinks + head) * LOG2_E
            highest_of_all = tl.maximum(highest_of_all, sink)
        weights = tl.exp2(highest - highest_of_all)
        total = tl.sum(weights * tl.load(place + DIMS + 1, mask=is_there, other=0.0), 0)
        if sinks is not None:
            total += tl.exp2(sink - highest_of_all)
        weighted = tl.load(place[:, None] + dims[None, :], mask=is_there[:, None], other=0.0)
        mean = tl.sum(weighted * weights[:, None], 0) / total
        tl.store(out + (token.to(tl.int64) * num_heads + head) * HEAD_DIM + dims, mean, mask=dims < HEAD_DIM)


@triton.jit(do_not_specialize=("num_seqs", "table_stride"))
def _chunk_kernel(
    query, key_cache, value_cache, out, block_tables, query_starts, context_lens, num_seqs,
    token_stride, head_stride, table_stride, scale, sinks,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr,
    ROWS_PER_TOKEN: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A few consecutive tokens of one sequence and one key-value head, over the whole context that they see.

    Sequence i has its tiles from index query_starts[i] // TOKENS + i on, which leaves room for all before it.
    """
    TOKENS: tl.constexpr = ROWS // ROWS_PER_TOKEN
    index, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # those that see most begin first
    low, high = index * 0, num_seqs  # the tile's sequence is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        is_later = tl.load(query_starts + middle) // TOKENS + middle > index
        high = tl.where(is_later, middle, high)
        low = tl.where(is_later, low, middle)
    first_token = tl.load(query_starts + low)
    num_queries = tl.load(query_starts + low + 1) - first_token
    offset = (index - first_token // TOKENS - low) * TOKENS  # of the tile's first token in its sequence
    if (num_queries > 1) & (offset < num_queries):
        rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
        queries = offset + rows // ROWS_PER_TOKEN
        heads = kv_head * GROUP + rows % ROWS_PER_TOKEN
        is_row = (queries < num_queries) & (rows % ROWS_PER_TOKEN < GROUP)
        is_element = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        tokens = (first_token + queries).to(tl.int64)
        tile = tl.load(
            query + tokens[:, None] * token_stride + heads[:, None] * head_stride + dims[None, :],
            mask=is_element,
            other=0.0,
        )
        first_position = tl.load(context_lens + low) - num_queries + offset
        positions = tl.where(is_row, first_position + rows // ROWS_PER_TOKEN, -1)
        first_seen = first_position * 0
        if WINDOW > 0:
            first_seen = tl.maximum(first_position - WINDOW + 1, 0)
        highest, total, weighted = _fold_keys(
            tile, positions, first_seen, tl.max(positions, 0) + 1, first_seen, key_cache, value_cache,
            block_tables + low.to(tl.int64) * table_stride, scale, kv_head,
            NUM_KV_HEADS, BLOCK_SIZE, WINDOW, HEAD_DIM, DIMS, KEYS, ROWS, PRECISION, SOFTCAP,
        )  # fmt: skip
        place = out + (tokens * NUM_KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(place, _mean(highest, total, weighted, sinks, heads, is_row), mask=is_element)
