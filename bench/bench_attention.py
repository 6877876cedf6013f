"""The C++ attention kernel alone: decoding against the memory, a prompt's chunk against the dense kernels.

    python bench/bench_attention.py [--isa amx] [--dtype bfloat16] [--block-size 16] [--repeats 30]
    python bench/bench_attention.py --kv-cache-dtype int8_per_token_head    # beside a cache of --dtype, in turn
    python bench/bench_attention.py --chunks 256,512,2048 --contexts 16384,65536 --decodes none    # long prompts

Decoding: bytes of keys and values over time, as a share of what a plain parallel read of as many bytes reaches in the
same run; kernel and read take turns, because the speed of a shared machine drifts. The caches of many layers are read
in turn, so that nothing comes from the processor's own caches; --cache-mib must be well above the last of those. A
chunk: arithmetic over time, beside that of a dense layer with as many rows, in turn. Medians, and in brackets the
quartiles.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import numpy as np
import typer

from quire.core.arrays import FLOAT32, Array, DType, address, dtype_name
from quire.core.config import QUANTIZED, KVDtype
from quire.extension import _kernels
from quire.extension.isas import set_threads_of_kernels, threads_of_kernels
from quire.kernels.conversion import converted
from quire.kernels.cpp.cpp_attention import paged_attention
from quire.kernels.cpp.cpp_kv_cache import cache_shapes
from quire.kernels.cpp.cpp_linear import CppLinear
from quire.kernels.cpp.cpp_packing import PackedMemory
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.paged_attention import AttentionMetadata, AttentionSpec, Heads, build_metadata
from quire.kernels.tensors import NUMPY_LIBRARY

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 14, 2, 64  # as in bench-0.5b
SPEC = AttentionSpec(Heads(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM), HEAD_DIM**-0.5)
DECODES = [(1, 2048), (1, 8192), (1, 32768), (8, 2048), (8, 8192), (32, 2048), (32, 4096), (32, 8192)]  # batch, context
DENSE = (896, 9728)  # inputs and outputs of the dense layer beside a chunk
GENERATOR = np.random.default_rng(0)
CACHE_MIB = 256  # all layers' caches together, more than most last-level caches hold


def random_values(shape: tuple[int, ...], dtype: DType) -> Array:
    """Return values around 0 with a variance of 1."""
    return converted(GENERATOR.standard_normal(shape, FLOAT32), dtype)


def read(memory: Sequence[Array]) -> None:
    """Read memory and do nothing else, with all threads."""
    for each in memory:
        _kernels.all_finite_bf16(address(each), each.nbytes // 2)


def random_cache(memory: PackedMemory, shape: tuple[int, ...], dtype: DType) -> Array:
    """Return a cache on huge pages, as the engine has it; small ones share them."""
    count = int(np.prod(shape))
    if dtype.itemsize == 1:
        elements = memory.take(count, np.dtype(np.int8))
        elements[:] = np.resize(GENERATOR.integers(-100, 100, 1 << 16, np.int8), count)
        num_tokens, width = shape[2:]
        scales = np.full(num_tokens * (width - HEAD_DIM) // 4, 0.01, FLOAT32)
        elements.reshape(*shape[:2], -1)[..., num_tokens * HEAD_DIM :] = scales.view(np.int8)
        return elements.view(dtype).reshape(shape)
    cache = memory.take(count, dtype)
    cache[:] = np.resize(random_values((1 << 16,), dtype), count)
    return cache.reshape(shape)


def make_metadata(batch: int, before: int, num_tokens: int, block_size: int) -> AttentionMetadata:
    """Give every sequence shuffled blocks of its own."""
    length = before + num_tokens
    num_blocks = -(-length // block_size)
    tables = GENERATOR.permutation(batch * num_blocks).astype(np.int32).reshape(batch, -1)
    starts = np.arange(0, batch * num_tokens + 1, num_tokens, dtype=np.int32)
    return build_metadata(tables, starts, np.full(batch, length, np.int32), block_size)


def in_turns(
    calls: list[Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Return the seconds of each call, all of them in every round."""
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 2):
        for call, times in zip(calls, seconds, strict=True):
            begin = clock()
            call()
            if turn > 1:
                times.append(clock() - begin)
    return seconds


def clock_of_threads() -> Callable[[], float]:
    """Return the clock of one thread's running time, or wall time of more."""
    return time.process_time if threads_of_kernels() == 1 else time.perf_counter


def spread(values: list[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:8.3f} [{low:.3f}, {high:.3f}]"


def bench_decode(batch: int, context: int, block_size: int, dtype: DType, repeats: int, cache_bytes: int) -> None:
    metadata = make_metadata(batch, context - 1, 1, block_size)
    shapes = cache_shapes(metadata.block_tables.size, block_size, NUM_KV_HEADS, HEAD_DIM, dtype)
    layer_bytes = 2 * dtype.itemsize * int(np.prod(shapes[0]))
    num_layers = max(2, -(-cache_bytes // layer_bytes))
    memory = PackedMemory()
    layers = [tuple(random_cache(memory, shape, dtype) for shape in shapes) for _ in range(num_layers)]
    caches = [cache for pair in layers for cache in pair]
    query = random_values((batch, NUM_HEADS, HEAD_DIM), dtype)
    ours, plain = in_turns([partial(attend_all, query, layers, metadata), partial(read, caches)], repeats)
    rate = [num_layers * layer_bytes / s * 1e-9 for s in ours]
    reads = [num_layers * layer_bytes / s * 1e-9 for s in plain]
    share = statistics.median(rate) / statistics.median(reads)
    print(f"decode {batch:3} x {context:6}: GB/s {spread(rate)}, plain read {spread(reads)}, share {share:.2f}, "
          f"us per layer {statistics.median(ours) / num_layers * 1e6:.0f}")


def bench_storage(
    metadata: AttentionMetadata, num_queries: int, dtype: DType, name: str, repeats: int, num_layers: int
) -> str:
    """Return the milliseconds of a layer over a cache of `dtype` and over one stored as `name`, in turn; the ratios."""
    query, calls, sizes = random_values((num_queries, NUM_HEADS, HEAD_DIM), dtype), list[Callable[[], object]](), []
    memory = PackedMemory()
    for stored in (KVDtype(dtype_name(dtype)), QUANTIZED[name]):
        element, num_blocks = NUMPY_LIBRARY.dtype(stored.element), metadata.block_tables.size
        shapes = cache_shapes(
            num_blocks, metadata.block_size, NUM_KV_HEADS, HEAD_DIM, element, stored.scale_bytes
        )
        layers = [tuple(random_cache(memory, shape, element) for shape in shapes) for _ in range(num_layers)]
        sizes.append(2 * element.itemsize * int(np.prod(shapes[0])) / 1e6)
        calls.append(partial(attend_all, query, layers, metadata))
    own, other = in_turns(calls, repeats, clock_of_threads())
    ratios = [a / b for a, b in zip(own, other, strict=True)]
    own_ms, other_ms = (statistics.median(seconds) / num_layers * 1e3 for seconds in (own, other))
    return (f"{dtype_name(dtype)} {own_ms:.3f} ms of {sizes[0]:.1f} MB, {name} {other_ms:.3f} ms of {sizes[1]:.1f} MB, "
            f"ratio {spread(ratios)}")


def attend_all(query: Array, layers: list[tuple[Array, ...]], metadata: AttentionMetadata) -> None:
    """Attend over the caches of all layers."""
    for keys, values in layers:
        paged_attention(SPEC, query, keys, values, metadata)


def compare_storages(
    chunks: list[tuple[int, int]], decodes: list[tuple[int, int]], dtype: DType, name: str, block_size: int,
    repeats: int, cache_bytes: int,
) -> None:  # fmt: skip
    """Print the times of chunks and of decoding over two storages."""
    for before, num_tokens in chunks:
        metadata = make_metadata(1, before, num_tokens, block_size)
        found = bench_storage(metadata, num_tokens, dtype, name, repeats, 1)
        print(f"chunk {before:6} + {num_tokens}: {found}", flush=True)
    for batch, context in decodes:
        metadata = make_metadata(batch, context - 1, 1, block_size)
        layer_bytes = 4 * batch * context * NUM_KV_HEADS * HEAD_DIM
        found = bench_storage(metadata, batch, dtype, name, repeats, max(2, -(-cache_bytes // layer_bytes)))
        print(f"decode {batch:3} x {context:6}: {found}", flush=True)


def bench_chunk(before: int, num_tokens: int, block_size: int, dtype: DType, repeats: int) -> None:
    metadata = make_metadata(1, before, num_tokens, block_size)
    shapes = cache_shapes(metadata.block_tables.size, block_size, NUM_KV_HEADS, HEAD_DIM, dtype)
    memory = PackedMemory()
    keys, values = (random_cache(memory, shape, dtype) for shape in shapes)
    query = random_values((num_tokens, NUM_HEADS, HEAD_DIM), dtype)
    width, out = DENSE
    dense = CppLinear(LinearWeight.dense(random_values((out, width), dtype)), None, memory=PackedMemory())
    x = random_values((num_tokens, width), dtype)
    calls = [lambda: paged_attention(SPEC, query, keys, values, metadata), lambda: dense(x)]
    times, dense_times = in_turns(calls, repeats, clock_of_threads())
    pairs = num_tokens * before + num_tokens * (num_tokens + 1) // 2
    rate = [4 * pairs * NUM_HEADS * HEAD_DIM / s * 1e-9 for s in times]
    dense_rate = [2 * num_tokens * width * out / s * 1e-9 for s in dense_times]
    share = statistics.median(rate) / statistics.median(dense_rate)
    print(f"chunk {before:6} + {num_tokens}: GFLOP/s {spread(rate)}, dense {spread(dense_rate)}, share {share:.2f}, "
          f"ms {spread([s * 1e3 for s in times])}", flush=True)


def main(
    isa: Annotated[str, typer.Option(help="instruction set, as in --cpu-isa")] = _kernels.usable_isas()[0],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32")] = "bfloat16",
    block_size: Annotated[int, typer.Option(help="tokens per block")] = 16,
    repeats: Annotated[int, typer.Option(help="timed rounds")] = 15,
    threads: Annotated[int, typer.Option(help="threads of the kernels")] = threads_of_kernels(),
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, or a storage to compare with --dtype")] = "auto",
    chunks: Annotated[str, typer.Option(help="tokens of chunks")] = "2048",
    contexts: Annotated[str, typer.Option(help="context lengths at the end of a chunk")] = "2048,8192",
    decodes: Annotated[str, typer.Option(help="all or none")] = "all",
    cache_mib: Annotated[int, typer.Option(help="MiB of all layers' caches, of --dtype, while decoding")] = CACHE_MIB,
) -> None:
    """Measure and print."""
    _kernels.use_isa(isa)
    set_threads_of_kernels(threads)
    model_dtype = NUMPY_LIBRARY.dtype(dtype)
    print(f"{isa}, {dtype}, blocks of {block_size}, {threads_of_kernels()} threads")
    sizes = [(int(end) - int(size), int(size)) for end in contexts.split(",") for size in chunks.split(",")]
    batches = DECODES if decodes == "all" else []
    if kv_cache_dtype != "auto":
        compare_storages(sizes, batches, model_dtype, kv_cache_dtype, block_size, repeats, cache_mib << 20)
        return
    for before, num_tokens in sizes:
        bench_chunk(before, num_tokens, block_size, model_dtype, repeats)
    for batch, context in batches:
        bench_decode(batch, context, block_size, model_dtype, repeats, cache_mib << 20)


if __name__ == "__main__":
    typer.run(main)
