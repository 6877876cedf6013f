"""Attention of a flat batch of tokens over paged keys and values (Kwon et al. 2023, section 4.1); causal, or not.

`paged_attention` works in float32, tile by tile: a key tile is SLOTS_PER_KEY_TILE consecutive positions, and the
queries at the positions of one key tile are multiplied with all key tiles up to it. All borders stand at fixed absolute
positions, every product of a layer has one shape, and a row one place in it, because the matrix library chooses the
order of a sum by both (docs/decisions/0002). So neither how a sequence is chunked nor what else runs changes a bit.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.paged_attention import AttentionMetadata, AttentionSpec
from quire.kernels.reference.kv_cache import (
    LARGEST,
    as_bytes,
    decode,
    decode_latents,
    integer_queries,
    integer_weights,
    is_quantized,
)

SLOTS_PER_KEY_TILE = 64
ROWS_PER_PRODUCT = 16  # divides SLOTS_PER_KEY_TILE; fewer rows than these may take another path through the library


def reference(
    spec: AttentionSpec, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata, *,
    in_integers: bool = False,
) -> Tensor:  # fmt: skip
    """Attend: the meaning that every back end must match.

    query [num_tokens, num_heads, head_dim], sequences end to end; caches [num_blocks, block_size, num_kv_heads,
    head_dim], those of 8-bit elements [.., width] as `kv_cache.stored_rows` fills them with the spec's scales; with
    a `value_dim` values are the first dimensions of keys, and `value_cache` is not read. A
    sequence's queries are the last tokens of its context. Sums in float32. A key's scale is multiplied onto its scores,
    a value's onto its softmax weights, which are summed without it. `in_integers`: queries and weights are rounded as
    products with int8 elements in integers round them (`kv_quantization`). Returns [num_tokens, num_heads, output_dim]
    in query's dtype.
    """
    value_cache = key_cache if spec.value_dim else value_cache
    block_size, window = key_cache.shape[1], spec.window
    group = spec.heads.num_heads // spec.heads.num_kv_heads  # query heads per key-value head
    out = query.new_empty(*query.shape[:2], spec.output_dim)
    query = integer_queries(query) if in_integers else query.float()
    for i, (start, stop) in enumerate(pairwise(metadata.query_starts.tolist())):
        context_len = int(metadata.context_lens[i])
        first = 0 if window is None else max(0, context_len - (stop - start) - window + 1)
        pos = torch.arange(first, context_len, device=query.device)
        where = metadata.block_tables[i, pos // block_size].long(), pos % block_size
        (k, key_scales), (v, value_scales) = (
            _elements(spec, as_bytes(cache)[where].repeat_interleave(group, dim=1), cache.dtype, own)
            for cache, own in zip((key_cache, value_cache), spec.kv_scales, strict=True)
        )  # [context_len, num_heads, head_dim], [context_len, num_heads]
        scores = _times(torch.einsum("qhd,lhd->hql", query[start:stop], k), key_scales) * spec.scale
        scores = _capped(scores, spec.softcap)
        query_pos = torch.arange(context_len - (stop - start), context_len, device=query.device)[:, None]
        ends = query_pos + 1 + spec.num_ahead if metadata.seen_ends is None else metadata.seen_ends[start:stop, None]
        scores.masked_fill_(pos >= ends, float("-inf"))
        if window is not None:
            scores.masked_fill_(pos <= query_pos - window, float("-inf"))
        if spec.sinks is not None:
            scores = torch.cat([scores, spec.sinks[:, None, None].expand(-1, stop - start, 1)], dim=-1)
        weights = _times(scores.softmax(dim=-1)[..., : len(pos)], value_scales)
        if in_integers:
            weights = integer_weights(pad(weights, (first, 0)))[..., first:]
        out[start:stop] = torch.einsum("hql,lhd->qhd", weights, v[..., : spec.output_dim]).to(out.dtype)
    return out


def _elements(
    spec: AttentionSpec, stored: Tensor, dtype: torch.dtype, scale: float
) -> tuple[Tensor, Tensor | float]:
    """Return elements [.., head_dim] in float32, and their scales [..], or one for all. Latents are times their own."""
    head_dim = spec.heads.head_dim
    if dtype not in LARGEST:
        return stored.float(), 1.0
    if spec.value_dim and stored.shape[-1] > head_dim:
        return decode_latents(stored, dtype, spec.value_dim, head_dim), 1.0
    return decode(stored, dtype, head_dim, scale)


def _capped(scores: Tensor, softcap: float) -> Tensor:
    return scores.div_(softcap).tanh_().mul_(softcap) if softcap else scores


def _times(scores: Tensor, scales: Tensor | float) -> Tensor:
    """Return scores or weights [num_heads, num_queries, num_keys] times scales [num_keys, num_heads]."""
    return scores * (scales.T[:, None] if isinstance(scales, Tensor) else scales)


class _Span(NamedTuple):
    """Queries at consecutive positions of one key tile, [start, stop), from row `row` of the flat batch on.

    They see keys at positions before `end`, at most; `ends`: each before its own.
    """

    table: Tensor
    row: int
    start: int
    stop: int
    end: int
    ends: Tensor | None


def paged_attention(
    spec: AttentionSpec, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """Attend as `reference` does; caches contiguous."""
    out = query.new_empty(*query.shape[:2], spec.output_dim)
    for span in _spans(metadata, spec.num_ahead):
        rows = slice(span.row, span.row + span.stop - span.start)
        caches = key_cache, key_cache if spec.value_dim else value_cache
        out[rows] = _attend(spec, query[rows].float() * spec.scale, caches, span).to(query.dtype)
    return out


def _spans(metadata: AttentionMetadata, ahead: int) -> Iterator[_Span]:
    """Cut the step's queries at the borders of key tiles."""
    rows = pairwise(metadata.query_starts.tolist())
    for table, (row, end), context_len in zip(metadata.block_tables, rows, metadata.context_lens.tolist(), strict=True):
        first = start = context_len - (end - row)
        while start < context_len:
            stop = min(context_len, (start // SLOTS_PER_KEY_TILE + 1) * SLOTS_PER_KEY_TILE)
            own = None if metadata.seen_ends is None else metadata.seen_ends[row + start - first : row + stop - first]
            seen = min(stop + ahead, context_len) if own is None else int(own[-1])
            yield _Span(table, row + start - first, start, stop, seen, own)
            start = stop


def _attend(spec: AttentionSpec, query: Tensor, caches: tuple[Tensor, Tensor], span: _Span) -> Tensor:
    """Attend with scaled float32 queries [num_queries, num_heads, head_dim]; the last dimension becomes output_dim.

    A token's query heads, padded to a power of two, stand in the same rows of a product wherever it is computed.
    """
    num_queries, (num_heads, num_kv_heads, head_dim), window, sinks = len(query), spec.heads, spec.window, spec.sinks
    group = num_heads // num_kv_heads                                   # query heads per key-value head
    rows_per_token = 1 << (group - 1).bit_length()
    height = max(1, ROWS_PER_PRODUCT // rows_per_token)                 # tokens of a product
    begin = span.start // height * height
    num_products = -(-(span.stop - begin) // height)
    rows = query.new_zeros(num_products * height, num_kv_heads, rows_per_token, head_dim)
    taken = slice(span.start - begin, span.stop - begin)
    rows[taken, :, :group] = query.view(num_queries, num_kv_heads, group, head_dim)
    rows = rows.view(num_products, height, num_kv_heads, rows_per_token, head_dim)
    rows = rows.transpose(1, 2).flatten(2, 3)                           # [num_products, num_kv_heads, rows, head_dim]

    tile_start = span.start // SLOTS_PER_KEY_TILE * SLOTS_PER_KEY_TILE
    first = 0 if window is None else max(0, tile_start - window + 1) // SLOTS_PER_KEY_TILE * SLOTS_PER_KEY_TILE
    num_tiles = -(-(span.end - first) // SLOTS_PER_KEY_TILE)
    slots = torch.arange(first, first + num_tiles * SLOTS_PER_KEY_TILE)  # positions in the sequence
    # A slot that no query sees is replaced by one that is seen: it may hold anything, and 0 times NaN is NaN.
    seen = slots.clamp(0 if window is None else max(0, span.start - window + 1), span.end - 1)
    block_size = caches[0].shape[1]
    places = span.table[seen // block_size].long() * block_size + seen % block_size
    (keys, key_scales), (values, value_scales) = (
        _gather(spec, cache, places, own) for cache, own in zip(caches, spec.kv_scales, strict=True)
    )
    values = values[..., : spec.output_dim].contiguous()
    positions = torch.arange(begin, begin + num_products * height)[:, None]
    ends = positions + spec.num_ahead + 1
    if span.ends is not None:
        ends[taken] = span.ends[:, None].long()
    hidden = (slots >= ends) | (slots >= span.end)
    if window is not None:
        hidden |= slots <= positions - window
    hidden = hidden.view(num_products, height, -1, SLOTS_PER_KEY_TILE).transpose(1, 2)  # [.., num_tiles, height, slots]

    scores = _products(rows.repeat(1, len(keys) // num_kv_heads, 1, 1), keys.transpose(1, 2))
    if is_quantized(caches[0]):
        scores *= key_scales
    scores = _capped(scores, spec.softcap)
    scores = scores.view(*hidden.shape[:2], num_kv_heads, height, rows_per_token, SLOTS_PER_KEY_TILE)
    scores.masked_fill_(hidden[:, :, None, :, None, :], float("-inf"))
    highest = scores.amax((1, 5), keepdim=True)
    if sinks is not None:
        sunk = sinks.new_full((num_kv_heads, 1, rows_per_token, 1), float("-inf"))
        sunk[:, 0, :group, 0] = sinks.view(num_kv_heads, group)
        highest = highest.maximum(sunk)
    weights = scores.sub_(highest).exp_()
    total = _sum_tiles(weights.sum(-1, keepdim=True))                   # [num_products, num_kv_heads, height, .., 1]
    if sinks is not None:
        total += (sunk - highest[:, 0]).exp_()
    weights = weights.view(num_products, len(keys), -1, SLOTS_PER_KEY_TILE)
    weighted = _products(weights.mul_(value_scales) if is_quantized(caches[1]) else weights, values)
    result = _sum_tiles(weighted.view(*scores.shape[:-1], spec.output_dim)) / total
    return result.transpose(1, 2).flatten(0, 1)[taken, :, :group].flatten(1, 2)


def _gather(spec: AttentionSpec, cache: Tensor, places: Tensor, scale: float) -> tuple[Tensor, Tensor | float]:
    """Return key tiles of keys or values in float32, [num_tiles * num_kv_heads, SLOTS_PER_KEY_TILE, head_dim].

    And their scales, [num_tiles * num_kv_heads, 1, SLOTS_PER_KEY_TILE], or the one for all. `places`: of the tokens of
    the tiles, block * block_size + offset.
    """
    num_kv_heads, width = cache.shape[2:]
    taken = as_bytes(cache).view(-1, num_kv_heads * width).index_select(0, places)
    taken = taken.view(-1, SLOTS_PER_KEY_TILE, num_kv_heads, width).transpose(1, 2).flatten(0, 1)
    elements, scales = _elements(spec, taken, cache.dtype, scale)
    return elements, scales[:, None] if isinstance(scales, Tensor) else scales


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Return left [num_products, count, rows, n] times right [count, n, columns], product by product.

    Every product has the same shape, however many there are.
    """
    out = torch.empty(*left.shape[:3], right.shape[2])
    for rows, product in zip(left, out, strict=True):
        torch.bmm(rows, right, out=product)
    return out


def _sum_tiles(parts: Tensor) -> Tensor:
    """Sum over dimension 1, in ascending order whatever the number of tiles."""
    total = parts[:, 0].clone()
    for tile in range(1, parts.shape[1]):
        total += parts[:, tile]
    return total
