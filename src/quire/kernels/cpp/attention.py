"""Paged attention in C++; the meaning is `quire.kernels.paged_attention.reference`'s. csrc/attention.cpp tells how.

The caches are laid out as `cache_layout` says.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.config import KERNEL_BLOCK_SIZES
from quire.kernels.cpp.cache_layout import check_caches
from quire.kernels.cpp.dtypes import kernel_dtype, pair

_KERNELS = pair("attention")


@dataclass(frozen=True, slots=True)
class CppAttentionPlan:
    """What all layers of a step share: who the queries belong to and where their context lies.

    The kernel cuts the work itself, in every layer: that takes microseconds.
    """

    block_tables: Tensor   # [num_seqs, max_blocks] int32; these three as in `paged_attention.reference`
    query_starts: Tensor   # [num_seqs + 1] int32
    context_lens: Tensor   # [num_seqs] int32
    block_size: int
    num_tokens: int


def prepare(block_tables: Tensor, query_starts: Tensor, context_lens: Tensor, block_size: int) -> CppAttentionPlan:
    """Gather what every layer of a step needs to know; arguments as in `reference`.

    Table entries past a context, or before every window, may hold anything: they are never followed.
    """
    assert len(query_starts) == len(context_lens) + 1 == len(block_tables) + 1
    assert block_size in KERNEL_BLOCK_SIZES, f"block size {block_size} is not one of {KERNEL_BLOCK_SIZES}"
    assert all(x.dtype == torch.int32 for x in (block_tables, query_starts, context_lens)), "int32 tables and lengths"
    tables = block_tables if block_tables.stride(1) == 1 else block_tables.contiguous()
    return CppAttentionPlan(
        tables, query_starts.contiguous(), context_lens.contiguous(), block_size, int(query_starts[-1])
    )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: CppAttentionPlan,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend as `reference` does, with the plan of the step; caches in the kernels' layout, scale above 0.

    query [num_tokens, num_heads, head_dim] may be a slice of a wider projection: only a token's heads stand together.
    """
    dtype = kernel_dtype(query.dtype)
    if dtype != query.dtype:
        return paged_attention(query.to(dtype), key_cache, value_cache, plan, scale, window).to(query.dtype)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[1]
    assert num_tokens == plan.num_tokens, f"{num_tokens} queries for a plan of {plan.num_tokens}"
    assert key_cache.dtype == dtype, f"queries {dtype}, caches {key_cache.dtype}"
    check_caches(key_cache, value_cache, num_kv_heads, plan.block_size, head_dim)
    assert num_heads % num_kv_heads == 0, f"{num_heads} heads over {num_kv_heads}"
    assert scale > 0, f"scale {scale}"
    token_stride, head_stride, stride = query.stride()
    if stride != 1 or head_stride != head_dim:
        query, token_stride = query.contiguous(), num_heads * head_dim
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=dtype)
    _KERNELS[dtype](
        query.data_ptr(),
        token_stride,
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        out.data_ptr(),
        num_heads * head_dim,
        plan.block_tables.data_ptr(),
        plan.query_starts.data_ptr(),
        plan.context_lens.data_ptr(),
        plan.block_tables.stride(0),
        len(plan.context_lens),
        num_heads,
        num_kv_heads,
        head_dim,
        plan.block_size,
        scale,
        window or 0,
    )
    return out
