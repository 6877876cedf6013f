"""Paged attention of decodes by the kernels in CUDA C++: --attention-backend cuda. Triton's serve chunks of prompts.

v2 serves, and v1 where a table has no more than one partition: then both give the same bits, so that the bits of a
row depend on its context alone. Nothing has run on a card yet.
"""

import ctypes
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from quire.kernels.cuda.cuda_source import (
    ELEMENTS,
    MAX_HEAD_DIM,
    PARTITION,
    VECTOR_BYTES,
    Module,
    compile_source,
    count_partitions,
    definitions,
    library,
    shared_floats,
    source,
)
from quire.kernels.paged_attention import AttentionBackEnd, AttentionMetadata, AttentionSpec

NUM_THREADS = 128


@cache
def _module(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, partition: int) -> Module:
    major, minor = torch.cuda.get_device_capability(device)
    defined = definitions(dtype, head_dim, block_size, partition)
    return Module(compile_source(source(), [f"-arch=sm_{major}{minor}", "--std=c++17", *defined]))


def attend(
    out: Tensor, spec: AttentionSpec, query: Tensor, key_cache: Tensor, value_cache: Tensor,
    metadata: AttentionMetadata, partition: int | None = None,
) -> None:  # fmt: skip
    """Attend as `paged_attention.reference` does for the sequences of one query; write their rows of `out` alone.

    out [num_tokens, num_heads, head_dim], contiguous; caches in the plain layout. The launches follow from the shapes
    of the arguments, so a step can be captured as a graph. `partition`: None chooses; 0 is v1. Raises ConfigError if
    NVRTC or the driver is missing or fails.
    """
    num_seqs, (num_heads, num_kv_heads, head_dim) = len(metadata.context_lens), spec.heads
    assert out.shape == query.shape, f"a result of {tuple(out.shape)} for queries of {tuple(query.shape)}"
    assert out.is_contiguous(), "a result with gaps"
    assert key_cache.is_contiguous(), "keys with gaps"
    assert value_cache.is_contiguous(), "values with gaps"
    assert key_cache.dtype == value_cache.dtype == query.dtype, f"queries {query.dtype}, caches {key_cache.dtype}"
    longest = metadata.block_tables.shape[1] * metadata.block_size
    if partition is None:
        partition = PARTITION if longest > PARTITION else 0
    module = _module(query.device, query.dtype, head_dim, metadata.block_size, partition)
    num_partitions = count_partitions(longest, partition)
    rows = (num_seqs, num_heads, num_partitions) if partition else (1,)
    partials = torch.empty((*rows, head_dim), dtype=torch.float32, device=query.device)
    highests, totals = torch.empty((2, *rows), dtype=torch.float32, device=query.device)
    left, sequences = (partials, highests, totals), (metadata.query_starts, metadata.context_lens)
    strides = ctypes.c_longlong(query.stride(0)), ctypes.c_longlong(query.stride(1))
    module.launch(
        "attend", (num_heads, num_seqs, num_partitions), NUM_THREADS, 4 * shared_floats(longest, partition),
        (out, *left, query, key_cache, value_cache, metadata.block_tables, *sequences, num_kv_heads,
         metadata.block_tables.stride(0), *strides, ctypes.c_float(spec.scale), spec.window or 0),
    )  # fmt: skip
    if partition:
        arguments = (out, *left, *sequences, num_partitions)
        module.launch("combine", (num_heads, num_seqs, 1), NUM_THREADS, 4 * num_partitions, arguments)


def _make(attend_by_triton: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the op: decodes by `attend`, chunks of prompts by Triton. ConfigError if NVRTC is missing."""
    library()
    return partial(attend_by_triton, attend_decodes=attend)


CUDA_ATTENTION = AttentionBackEnd(
    name="cuda",
    make=_make,
    serves=lambda dtype, head_dim: (
        dtype in ELEMENTS and head_dim <= MAX_HEAD_DIM and head_dim * dtype.itemsize % VECTOR_BYTES == 0
    ),
    shapes=f"heads of up to {MAX_HEAD_DIM} that are multiples of {VECTOR_BYTES} bytes",
)
