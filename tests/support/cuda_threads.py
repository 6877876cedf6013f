"""CUDA kernels of this project run on the CPU: compiled as C++, the threads of a block as coroutines."""

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from quire.kernels.cuda import cuda_attention
from quire.kernels.cuda.cuda_attention import PARTITION, _value, count_partitions, definitions, shared_floats, source
from quire.kernels.paged_attention import AttentionMetadata

HERE = Path(__file__).parent
NUM_THREADS = 128
# After the kernels: functions with a C interface that run a grid.
ENTRIES = """
extern "C" int run_attend(
    int heads, int seqs, int partitions, int shared_floats, int is_reversed, Element* out, float* partials,
    float* highests, float* totals, const Element* query, const Element* keys, const Element* values, const int* tables,
    const int* query_starts, const int* context_lens, int num_kv_heads, int table_stride, long long token_stride,
    long long head_stride, float scale, int window) {
  return cuda::run({heads, seqs, partitions}, NUM_THREADS, shared_floats, is_reversed, [&] {
    attend(out, partials, highests, totals, query, keys, values, tables, query_starts, context_lens, num_kv_heads,
           table_stride, token_stride, head_stride, scale, window);
  });
}
#if PARTITION > 0
extern "C" int run_combine(
    int heads, int seqs, int shared_floats, int is_reversed, Element* out, const float* partials,
    const float* highests, const float* totals, const int* query_starts, const int* context_lens, int partitions) {
  return cuda::run({heads, seqs, 1}, NUM_THREADS, shared_floats, is_reversed, [&] {
    combine(out, partials, highests, totals, query_starts, context_lens, partitions);
  });
}
#endif
"""
# Notes each load of a vector: the head of the block, the thread, and the address.
RECORDING = (
    ("  vector.whole = ", "  record(from);\n  vector.whole = "),
    ("union Vector", "inline std::vector<long long> loads;\ninline void record(const Element* from) {\n"
     "  loads.insert(loads.end(), {blockIdx.x, threadIdx.x, (long long)from});\n}\n"
     'extern "C" long long num_loads() { return loads.size(); }\n'
     'extern "C" long long* all_loads() { return loads.data(); }\nunion Vector'),
)  # fmt: skip


class StuckError(Exception):
    """Threads of a block wait for others that ended, or that wait elsewhere."""


class Load(NamedTuple):
    """One vector that a thread read."""

    head: int
    thread: int
    address: int


@cache
def compile_on_host(
    dtype: torch.dtype, head_dim: int, block_size: int, partition: int, *,
    code: str | None = None, is_recording: bool = False,
) -> ctypes.CDLL:  # fmt: skip
    """Return the kernels for one shape as a library, compiled once in a process; `code` replaces the source."""
    text = code or source()
    for old, new in RECORDING if is_recording else ():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        file, library = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
        file.write_text(f'#include "{HERE / "cuda_threads.hpp"}"\n{text}\n{ENTRIES}')
        defined = definitions(dtype, head_dim, block_size, partition)
        command = ["c++", "-std=c++17", "-O1", "-w", "-fPIC", "-shared", *defined, str(file), "-o", str(library)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
        return ctypes.CDLL(str(library))


def attend_on_host(
    library: ctypes.CDLL, query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, scale: float,
    window: int = 0, partition: int = PARTITION, *, is_reversed: bool = False,
) -> Tensor:  # fmt: skip
    """Return what the kernels compute [num_tokens, num_heads, head_dim]; NaN where they write nothing.

    Threads take turns in the order of their ids, or in the reverse order. Raises StuckError.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_seqs, longest = len(metadata.context_lens), int(metadata.context_lens.max())
    num_partitions = count_partitions(longest, partition)
    out = torch.full((num_tokens, num_heads, head_dim), torch.nan, dtype=query.dtype)
    partials = torch.full((num_seqs, num_heads, num_partitions, head_dim), torch.nan)
    highests, totals = (torch.full((num_seqs, num_heads, num_partitions), torch.nan) for _ in range(2))
    tables = metadata.block_tables

    def pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
        return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]

    sequences = pointers(metadata.query_starts, metadata.context_lens)
    is_stuck = library.run_attend(
        num_heads, num_seqs, num_partitions, shared_floats(longest, partition), int(is_reversed),
        *pointers(out, partials, highests, totals, query, keys, values, tables), *sequences, keys.shape[2],
        tables.stride(0), ctypes.c_longlong(query.stride(0)), ctypes.c_longlong(query.stride(1)),
        ctypes.c_float(scale), window,
    )  # fmt: skip
    if partition and not is_stuck:
        is_stuck = library.run_combine(
            num_heads, num_seqs, num_partitions, int(is_reversed), *pointers(out, partials, highests, totals),
            *sequences, num_partitions,
        )  # fmt: skip
    if is_stuck:
        raise StuckError("threads of a block wait at different places")
    return out


class HostModule:
    """Stands in for `launch.Module`: what is launched runs on the CPU, before the call returns."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def launch(
        self, name: str, grid: tuple[int, int, int], num_threads: int, shared_bytes: int, arguments: Sequence[Any]
    ) -> None:
        """Run a kernel. Raises StuckError."""
        assert num_threads == NUM_THREADS
        run, sizes = (self._library.run_attend, grid) if name == "attend" else (self._library.run_combine, grid[:2])
        if run(*sizes, shared_bytes // 4, 0, *map(_value, arguments)):
            raise StuckError("threads of a block wait at different places")


def run_on_host(patch: pytest.MonkeyPatch) -> None:
    """Let `kernels.cuda.cuda_attention` run its kernels on the CPU, and need no NVRTC."""

    @cache
    def module(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, partition: int) -> HostModule:
        return HostModule(compile_on_host(dtype, head_dim, block_size, partition))

    patch.setattr(cuda_attention, "_module", module)
    patch.setattr(cuda_attention, "library", lambda: None)


def recorded_loads(library: ctypes.CDLL) -> list[Load]:
    """Return the loads of vectors so far, in their order, of a library that records."""
    library.num_loads.restype = ctypes.c_longlong
    library.all_loads.restype = ctypes.POINTER(ctypes.c_longlong)
    numbers = library.all_loads()[: library.num_loads()]
    return [Load(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)]
