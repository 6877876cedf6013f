"""Paged attention of decodes by the kernels in CUDA C++; Triton's serve steps with chunks of prompts.

v2 serves, and v1 where a table has no more than one partition: then both give the same bits, so that the bits of a
row depend on its context alone. Nothing has run on a card yet.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from quire.kernels.cuda.launch import Module
from quire.kernels.cuda.nvrtc import compile_source
from quire.kernels.cuda.source import PARTITION, definitions, shared_floats, source
from quire.kernels.paged_attention import AttentionMetadata

NUM_THREADS = 128


@cache
def _module(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, partition: int) -> Module:
    major, minor = torch.cuda.get_device_capability(device)
    defined = definitions(dtype, head_dim, block_size, partition)
    return Module(compile_source(source(), [f"-arch=sm_{major}{minor}", "--std=c++17", *defined]))


def attend(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata, scale: float,
    window: int | None = None, partition: int | None = None,
) -> Tensor:  # fmt: skip
    """Attend as `paged_attention.reference` does, for one query of each sequence; caches in the plain layout.

    `partition`: None chooses; 0 is v1. Raises ConfigError if NVRTC or the driver is missing or fails.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_seqs, num_kv_heads = len(metadata.context_lens), key_cache.shape[2]
    assert num_tokens == num_seqs, f"{num_tokens} queries of {num_seqs} sequences"
    assert key_cache.is_contiguous(), "keys with gaps"
    assert value_cache.is_contiguous(), "values with gaps"
    assert key_cache.dtype == value_cache.dtype == query.dtype, f"queries {query.dtype}, caches {key_cache.dtype}"
    longest = metadata.block_tables.shape[1] * metadata.block_size
    if partition is None:
        partition = PARTITION if longest > PARTITION else 0
    module = _module(query.device, query.dtype, head_dim, metadata.block_size, partition)
    num_partitions = -(-longest // partition) if partition else 1
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    rows = (num_seqs, num_heads, num_partitions) if partition else (1,)
    partials = torch.empty((*rows, head_dim), dtype=torch.float32, device=query.device)
    highests, totals = torch.empty((2, *rows), dtype=torch.float32, device=query.device)
    left, sequences = (partials, highests, totals), (metadata.query_starts, metadata.context_lens)
    strides = ctypes.c_longlong(query.stride(0)), ctypes.c_longlong(query.stride(1))
    module.launch(
        "attend", (num_heads, num_seqs, num_partitions), NUM_THREADS, 4 * shared_floats(longest, partition),
        (out, *left, query, key_cache, value_cache, metadata.block_tables, *sequences, num_kv_heads,
         metadata.block_tables.stride(0), *strides, ctypes.c_float(scale), window or 0),
    )  # fmt: skip
    if partition:
        arguments = (out, *left, *sequences, num_partitions)
        module.launch("combine", (num_heads, num_seqs, 1), NUM_THREADS, 4 * num_partitions, arguments)
    return out
