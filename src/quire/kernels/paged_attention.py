"""Causal attention of a flat batch of tokens over paged keys and values (Kwon et al. 2023, section 4.1)."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of a step share: who the queries belong to and where their context lies."""

    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_size: int


def prepare(block_tables: Tensor, query_starts: Tensor, context_lens: Tensor, block_size: int) -> AttentionPlan:
    """Gather what every layer of a step needs to know; see `reference` for the arguments."""
    return AttentionPlan(block_tables, query_starts, context_lens, block_size)


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
    """Attend as `reference` does, with the plan of the step."""
    return reference(
        query, key_cache, value_cache, plan.block_tables, plan.query_starts, plan.context_lens, scale, window
    )
