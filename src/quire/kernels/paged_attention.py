"""Causal attention of a flat batch of tokens over paged keys and values (Kwon et al. 2023, section 4.1).

The stand-in works in float32 on pairs of a query tile and a key tile (`attention_tiling`), all pairs of a round at
once: it gathers keys and values, multiplies, masks, and folds the round into a running softmax (Milakov and Gimelshein
2018). A row's sums run over key tiles in ascending order. Within a tile the matrix library chooses the order, by the
shape of the product and maybe by the row's place in it: so both are the same in every step (docs/decisions/0002).
"""

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from quire.core.config import KERNEL_BLOCK_SIZES
from quire.kernels.attention_tiling import (
    ROWS_PER_PRODUCT,
    SLOTS_PER_KEY_TILE,
    HeadShape,
    Round,
    StepShape,
    TileGroup,
    slots_per_unit,
    tile_step,
)

LOWEST = torch.finfo(torch.float32).min  # a maximum that has seen nothing: with -inf, -inf - -inf would be NaN


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of a step share: who the queries belong to and where their context lies."""

    step: StepShape
    _groups: dict[HeadShape, list[TileGroup]] = field(default_factory=dict)

    def groups(self, heads: HeadShape) -> list[TileGroup]:
        """Return the groups of query tiles for layers of this shape, cut when the first such layer asks."""
        if heads not in self._groups:
            self._groups[heads] = tile_step(self.step, heads)
        return self._groups[heads]


def prepare(block_tables: Tensor, query_starts: Tensor, context_lens: Tensor, block_size: int) -> AttentionPlan:
    """Gather what every layer of a step needs to know; arguments as in `reference`.

    Table entries past a context, or before every window, may hold anything: they are never followed.
    """
    assert len(query_starts) == len(context_lens) + 1 == len(block_tables) + 1
    assert block_size in KERNEL_BLOCK_SIZES, f"block size {block_size} is not one of {KERNEL_BLOCK_SIZES}"
    return AttentionPlan(StepShape(block_tables, query_starts, context_lens, block_size))


def reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend: the meaning that every back end must match.

    query [num_tokens, num_heads, head_dim], sequences end to end; caches [num_blocks, block_size, num_kv_heads,
    head_dim]; block_tables [num_seqs, max_blocks], query_starts [num_seqs + 1], context_lens [num_seqs], all int32. A
    sequence's queries are the last tokens of its context. With a window, a token sees itself and the `window` - 1
    tokens before it. Sums in float32; returns query's shape and dtype.
    """
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = query.shape[1] // num_kv_heads  # query heads per key-value head
    out = torch.empty_like(query)
    for i, (start, stop) in enumerate(pairwise(query_starts.tolist())):
        context_len = int(context_lens[i])
        first = 0 if window is None else max(0, context_len - (stop - start) - window + 1)
        pos = torch.arange(first, context_len, device=query.device)
        where = block_tables[i, pos // block_size].long(), pos % block_size
        k = key_cache[where].float().repeat_interleave(group, dim=1)  # [context_len, num_heads, head_dim]
        v = value_cache[where].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,lhd->hql", query[start:stop].float(), k) * scale
        query_pos = torch.arange(context_len - (stop - start), context_len, device=query.device)[:, None]
        scores.masked_fill_(pos > query_pos, float("-inf"))  # a token sees itself and what came before
        if window is not None:
            scores.masked_fill_(pos <= query_pos - window, float("-inf"))
        out[start:stop] = torch.einsum("hql,lhd->qhd", scores.softmax(dim=-1), v).to(out.dtype)
    return out


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scale: float, window: int | None = None
) -> Tensor:
    """Attend as `reference` does, with the plan of the step; caches contiguous."""
    num_tokens, num_heads, head_dim = query.shape
    heads = HeadShape(num_heads, key_cache.shape[2], head_dim, window)
    out = query.new_empty(num_tokens + 1, num_heads, head_dim)  # the last row takes what unfilled tiles compute
    for group in plan.groups(heads):
        softmax = _RunningSoftmax(_query_rows(query, group, heads, scale), heads)
        for each in group.rounds:
            softmax.fold(each, _gather(key_cache, each.units), _gather(value_cache, each.units))
        out.index_copy_(0, group.targets, softmax.result().to(query.dtype))
    return out[:num_tokens]


def plain_paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scale: float, window: int | None = None
) -> Tensor:
    """Attend by the reference itself."""
    step = plan.step
    tables = step.block_tables, step.query_starts, step.context_lens
    return reference(query, key_cache, value_cache, *tables, scale, window)


def _query_rows(query: Tensor, group: TileGroup, heads: HeadShape, scale: float) -> Tensor:
    """Return scaled queries in float32, [num_products, num_tiles, num_kv_heads, ROWS_PER_PRODUCT, head_dim]."""
    taken = query.index_select(0, group.sources).view(-1, heads.num_kv_heads, heads.group, heads.head_dim)
    rows = torch.zeros(len(taken), heads.num_kv_heads, heads.rows_per_token, heads.head_dim)
    rows[:, :, : heads.group] = taken
    rows = rows.mul_(scale).view(
        -1,  # query tiles
        group.height // heads.tokens_per_product,
        heads.tokens_per_product,
        heads.num_kv_heads,
        heads.products_per_token,
        heads.rows_per_token // heads.products_per_token,
        heads.head_dim,
    )
    rows = rows.permute(1, 4, 0, 3, 2, 5, 6)
    return rows.reshape(-1, *rows.shape[2:4], ROWS_PER_PRODUCT, heads.head_dim)


def _rows_of_tokens(rows: Tensor, heads: HeadShape) -> Tensor:
    """Undo the layout of `_query_rows`: [num_tiles * height, num_heads, head_dim]."""
    num_tiles = rows.shape[1]
    tokens = rows.view(
        -1,  # parts of a query tile's height
        heads.products_per_token,
        num_tiles,
        heads.num_kv_heads,
        heads.tokens_per_product,
        heads.rows_per_token // heads.products_per_token,
        heads.head_dim,
    ).permute(2, 0, 4, 3, 1, 5, 6)
    tokens = tokens.reshape(-1, heads.num_kv_heads, heads.rows_per_token, heads.head_dim)
    return tokens[:, :, : heads.group].flatten(1, 2)


def _gather(cache: Tensor, units: Tensor) -> Tensor:
    """Return key tiles of keys or values in float32, [num_pairs, num_kv_heads, SLOTS_PER_KEY_TILE, head_dim]."""
    _, block_size, num_kv_heads, head_dim = cache.shape
    gathered = cache.view(-1, slots_per_unit(block_size) * num_kv_heads * head_dim).index_select(0, units)
    gathered = gathered.view(-1, SLOTS_PER_KEY_TILE, num_kv_heads, head_dim).transpose(1, 2)
    return torch.empty(gathered.shape).copy_(gathered)


class _RunningSoftmax:
    """Weighted sums of values for a group of query tiles, under a softmax that has not seen all its scores yet."""

    def __init__(self, rows: Tensor, heads: HeadShape) -> None:
        self._rows = rows  # [num_products, num_tiles, num_kv_heads, ROWS_PER_PRODUCT, head_dim]
        self._heads = heads
        self._highest = torch.full((*rows.shape[:4], 1), LOWEST)
        self._weight = torch.zeros_like(self._highest)
        self._weighted = torch.zeros(rows.shape)

    def fold(self, each: Round, keys: Tensor, values: Tensor) -> None:
        """Fold one round in; what a row does not see leaves the row as it is."""
        scores = _products(self._rows.index_select(1, each.tiles), keys.transpose(2, 3))  # [.., rows, slots]
        _mask(scores, values, each, self._heads)
        self._raise(each, scores.amax(-1, keepdim=True))
        weights = scores.sub_(self._highest.index_select(1, each.tiles)).exp_()
        weight, weighted = weights.sum(-1, keepdim=True), _products(weights, values)
        for begin, end, pair in each.segments:
            self._weight[:, begin:end] += weight[:, pair : pair + end - begin]
            self._weighted[:, begin:end] += weighted[:, pair : pair + end - begin]

    def _raise(self, each: Round, highest_of_pair: Tensor) -> None:
        """Take the round's scores into the maxima and rescale the sums to them."""
        highest = self._highest.clone()
        for begin, end, pair in each.segments:
            seen = highest[:, begin:end]
            seen.copy_(torch.maximum(seen, highest_of_pair[:, pair : pair + end - begin]))
        rescale = (self._highest - highest).exp_()
        self._weight *= rescale
        self._weighted *= rescale
        self._highest = highest

    def result(self) -> Tensor:
        """Return the weighted means, [num_tiles * height, num_heads, head_dim] float32."""
        return _rows_of_tokens(self._weighted / self._weight, self._heads)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Return left [num_products, num_pairs, num_kv_heads, rows, n] times right [num_pairs, num_kv_heads, n, columns].

    Product by product, for the right-hand sides stand in memory once.
    """
    right = right.flatten(0, 1)
    out = torch.empty(*left.shape[:4], right.shape[2])
    for rows, product in zip(left.flatten(1, 2), out.flatten(1, 2), strict=True):
        torch.bmm(rows, right, out=product)
    return out


def _mask(scores: Tensor, values: Tensor, each: Round, heads: HeadShape) -> None:
    """Hide slots from the tokens that do not see them; zero values that nobody sees, for 0 times NaN is NaN."""
    masked = scores[:, each.masked_from :]
    by_token = torch.unflatten(masked, 3, (heads.tokens_per_product, -1))
    hidden = torch.unflatten(each.hidden, 1, (-1, heads.tokens_per_product)).transpose(0, 1)
    hidden = hidden.repeat_interleave(heads.products_per_token, dim=0)  # [num_products, num_masked, tokens, slots]
    by_token.masked_fill_(hidden[:, :, None, :, None, :], float("-inf"))
    values[each.masked_from :].masked_fill_(each.dead[:, None, :, None], 0.0)
