"""The paper's kernel in CUDA C++: its source run on the CPU, thread by thread, and compiled for cards by NVRTC."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire.core.errors import ConfigError
from quire.kernels.cuda import cuda_attention
from quire.kernels.cuda.cuda_attention import (
    PARTITION,
    compile_source,
    count_partitions,
    definitions,
    library,
    shared_floats,
    source,
)
from quire.kernels.paged_attention import AttentionMetadata, build_metadata
from quire.kernels.reference.paged_attention import reference
from support.cuda_threads import StuckError, attend_on_host, compile_on_host, recorded_loads
from support.paged_cache import plain_spec
from support.triton_compiler import resources

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
CONTEXTS = (1, 15, 16, 130, 513, 1041)  # a partition, one token more, three partitions
PAGE = Path(__file__).parents[3] / "docs/kernels.md"

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


def make_case(
    heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, contexts: tuple[int, ...] = CONTEXTS
) -> Case:
    """Return queries, caches and metadata. What no sequence holds is NaN, and blocks are in a random order."""
    (num_heads, num_kv_heads, head_dim), generator = heads, torch.Generator().manual_seed(0)
    counts = [-(-context // block_size) for context in contexts]
    blocks = (1 + torch.randperm(sum(counts), generator=generator)).int().split(counts)
    caches = torch.full((2, sum(counts) + 1, block_size, num_kv_heads, head_dim), torch.nan)
    tables = torch.full((len(contexts), max(counts) + 1), 10**6, dtype=torch.int32)
    for row, (context, own) in enumerate(zip(contexts, blocks, strict=True)):
        tables[row, : len(own)] = own
        at = torch.arange(context)
        filled = torch.randn(2, context, num_kv_heads, head_dim, generator=generator)
        caches[:, own[at // block_size].long(), at % block_size] = filled
    query = torch.randn(len(contexts), num_heads + 2, head_dim, generator=generator).to(dtype)[:, 1:-1]
    lens, starts = torch.tensor(contexts, dtype=torch.int32), torch.arange(len(contexts) + 1, dtype=torch.int32)
    keys, values = caches.to(dtype)
    return query, keys, values, build_metadata(tables, starts, lens, block_size)


SHAPES = [
    ((4, 2, 64), 16, torch.bfloat16), ((3, 1, 80), 16, torch.float16), ((2, 2, 24), 32, torch.float32),
    ((2, 1, 256), 8, torch.float32), ((2, 1, 40), 64, torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("partition", [0, PARTITION], ids=["v1", "v2"])
@pytest.mark.parametrize(("heads", "block_size", "dtype"), SHAPES, ids=str)
def test_kernels_match_the_reference(
    heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, partition: int
) -> None:
    query, keys, values, metadata = make_case(heads, block_size, dtype)
    kernels = compile_on_host(dtype, heads[2], block_size, partition)
    for window in (0, 100):
        spec = plain_spec(query, keys.shape[2], 0.3, window=window or None)
        expected = reference(spec, query, keys, values, metadata)
        for is_reversed in (False, True):
            found = attend_on_host(
                kernels, query, keys, values, metadata, 0.3, window, partition, is_reversed=is_reversed
            )
            torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_short_contexts_have_the_same_bits_in_both_versions() -> None:
    contexts, found = (1, 300, PARTITION), []
    query, keys, values, metadata = make_case((2, 1, 64), 16, torch.float32, contexts)
    for partition in (0, PARTITION):
        kernels = compile_on_host(torch.float32, 64, 16, partition)
        found.append(attend_on_host(kernels, query, keys, values, metadata, 0.2, 0, partition))
    assert torch.equal(*found)


def test_long_contexts_have_longer_partitions() -> None:
    """In partitions of 16 tokens: 16 of them, then 8 for each doubling up to 4,096 tokens, then one for each 256."""
    contexts = (15, 256, 257, 513, 1000, 1025, 2049, 4096, 4400)
    query, keys, values, metadata = make_case((2, 1, 64), 16, torch.float32, contexts)
    kernels = compile_on_host(torch.float32, 64, 16, 16)
    for window in (0, 300):
        spec = plain_spec(query, keys.shape[2], 0.3, window=window or None)
        expected = reference(spec, query, keys, values, metadata)
        found = attend_on_host(kernels, query, keys, values, metadata, 0.3, window, 16)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert [count_partitions(context, 16) for context in contexts] == [1, 16, 17, 25, 32, 33, 41, 48, 50]


def test_partials_of_a_long_context_are_bounded() -> None:
    """Of 131,072 tokens 256 rows of 32 heads left 1.1 GB in partitions of 512 tokens."""
    assert count_partitions(131_072, PARTITION) == 48
    assert count_partitions(1 << 20, PARTITION) == 160
    assert shared_floats(1 << 20, PARTITION) == shared_floats(131_072, PARTITION) == 8192
    assert shared_floats(8192, PARTITION) == PARTITION
    assert count_partitions(PARTITION + 1, PARTITION) == 2


def test_sequences_of_several_queries_are_left_out() -> None:
    query, keys, values, metadata = make_case((2, 1, 64), 16, torch.float32, (40, 50))
    kernels = compile_on_host(torch.float32, 64, 16, 0)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    two = AttentionMetadata(metadata.block_tables, starts, metadata.context_lens, 16)
    found = attend_on_host(kernels, torch.cat([query, query[:1]]), keys, values, two, 0.2, 0, 0)
    assert found[0].isfinite().all()
    assert found[1:].isnan().all()


FAULTS = {
    "query unseen by other warps": ("load(own + i * VECTOR);\n  __syncthreads();", "load(own + i * VECTOR);"),
    "half of a group's sum": ("mask = GROUP / 2", "mask = GROUP / 4"),
    "value behind the context": ("position < first || position >= end", "position < first || position > end"),
    "block of another warp": (
        "NUM_WARPS) {\n    const long long physical = table[block];\n    for (int offset = lane / LANES",
        "1) {\n    const long long physical = table[block];\n    for (int offset = lane / LANES",
    ),
    "rows of a warp left out": ("mask >= LANES", "mask > LANES"),
    "reduction without a barrier": ("of_warps[warp] = value;\n  __syncthreads();", "of_warps[warp] = value;"),
    "warps fold over what is unread": (
        "folded[warp][lane][j];\n    }\n    __syncthreads();", "folded[warp][lane][j];\n    }",
    ),
    "head of another group": ("head / (gridDim.x / num_kv_heads)", "head % num_kv_heads"),
    "partitions not weighed": ("totals[row + i] * expf", "expf"),
    "sum of a warp alone": ("value + of_warps[i]", "value"),
    "window of one more": ("context - window : 0", "context - window - 1 : 0"),
    "barrier for some": (
        "highest = reduce<false>(highest, of_warps[0]);\n  float total",
        "if (lane > 0) __syncthreads();\n  highest = reduce<false>(highest, of_warps[0]);\n  float total",
    ),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str) -> None:
    old, new = FAULTS[name]
    code = source()
    assert old in code, old
    query, keys, values, metadata = make_case((4, 2, 64), 16, torch.float32, (600, 100))
    expected = reference(plain_spec(query, keys.shape[2], 0.3, window=95), query, keys, values, metadata)
    plain = reference(plain_spec(query, keys.shape[2], 0.3), query, keys, values, metadata)
    kernels = compile_on_host(torch.float32, 64, 16, PARTITION, code=code.replace(old, new, 1))

    def is_found(is_reversed: bool, window: int, right: torch.Tensor) -> bool:
        try:
            found = attend_on_host(
                kernels, query, keys, values, metadata, 0.3, window, PARTITION, is_reversed=is_reversed
            )
        except StuckError:
            return True
        return not torch.allclose(found, right, rtol=1e-5, atol=1e-5)

    runs = [is_found(order, window, right) for order in (False, True) for window, right in ((0, plain), (95, expected))]
    assert any(runs)


def figure() -> Iterator[str]:
    """Yield the rows of the page's figure: what threads read, for heads of 64 in bfloat16 and blocks of 16 tokens."""
    query, keys, values, metadata = make_case((1, 1, 64), 16, torch.bfloat16, (128,))
    kernels = compile_on_host(torch.bfloat16, 64, 16, 0, is_recording=True)
    attend_on_host(kernels, query, keys, values, metadata, 1.0, 0, 0)
    token_of = {int(block): 16 * i for i, block in enumerate(metadata.block_tables[0, :8])}
    reads = dict[tuple[int, str], dict[int, list[int]]]()
    for load in recorded_loads(kernels):
        for name, cache in (("keys", keys), ("values", values)):
            at = (load.address - cache.data_ptr()) // 2
            if 0 <= at < cache.numel():
                slot, dim = divmod(at, 64)
                token = token_of[slot // 16] + slot % 16
                reads.setdefault((load.thread, name), {}).setdefault(token, []).append(dim // 8)
    for thread in (0, 1, 2, 3, 31, 32, 96, 127):
        texts = (
            "; ".join(f"{token}: {' '.join(map(str, vectors))}" for token, vectors in reads[thread, name].items())
            for name in ("keys", "values")
        )
        yield f"| {thread // 32} | {thread} | {' | '.join(texts)} |"


def test_figure_of_the_page_is_what_threads_read(tmp_path: Path) -> None:
    rows = list(figure())
    page = PAGE.read_text(encoding="utf-8")
    assert "\n".join(rows) in page, "\n".join(rows)


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(("heads", "block_size", "dtype"), SHAPES, ids=str)
def test_kernels_compile_for_cards_without_spilling(
    heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, capability: int
) -> None:
    pytest.importorskip("triton", reason="Triton brings ptxas")
    try:
        library()
    except ConfigError as error:
        pytest.skip(str(error))
    for partition in (0, PARTITION):
        defined = definitions(dtype, heads[2], block_size, partition)
        ptx = compile_source(source(), [f"-arch=compute_{capability}", *defined], to_ptx=True).decode()
        registers, spilled = resources(ptx)
        assert (registers <= 128, spilled) == (True, 0), f"{registers} registers, {spilled} bytes spilled"
        assert "ld.global.v4" in ptx or "ld.global.nc.v4" in ptx, "keys and values by 16 bytes"
        assert compile_source(source(), [f"-arch=sm_{capability}", *defined])[:4] == b"\x7fELF"


def test_compiler_names_the_fault() -> None:
    try:
        library()
    except ConfigError as error:
        pytest.skip(str(error))
    with pytest.raises(ConfigError, match="identifier"):
        compile_source("__global__ void f() { nothing(); }", ["-arch=sm_90"])


def test_shapes_that_have_no_vectors_are_refused() -> None:
    with pytest.raises(AssertionError, match="heads of 20"):
        definitions(torch.bfloat16, 20, 16, 0)
    assert shared_floats(100, 0) == 100
    assert shared_floats(8_000, PARTITION) == PARTITION


class Driver:
    """Stands in for the CUDA driver: notes the calls, each of which succeeds."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.calls.append((name, arguments))
            return 0

        return call


@pytest.mark.parametrize(("shared_bytes", "is_asked"), [(32 << 10, False), (44 << 10, True), (48 << 10, True)])
def test_more_memory_than_a_kernel_has_beside_its_own_is_asked_for(
    shared_bytes: int, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program has 48 KiB unasked, those of its own variables among them: else the launch is refused."""
    driver = Driver()
    monkeypatch.setattr(cuda_attention, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    cuda_attention.Module(b"").launch("attend", (1, 1, 1), 128, shared_bytes, ())
    asked = [arguments[2] for name, arguments in driver.calls if name == "cuFuncSetAttribute"]
    assert asked == ([shared_bytes] if is_asked else [])
    assert driver.calls[-1][0] == "cuLaunchKernel"


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("block_size", [8, 128])
def test_memory_of_a_kernels_own_is_what_the_launch_leaves_for_it(block_size: int, dtype: torch.dtype) -> None:
    library()
    options = ["-arch=compute_90", "--std=c++17", *definitions(dtype, 256, block_size, PARTITION)]
    ptx = compile_source(source(), options, to_ptx=True).decode()
    own = [int(size) for size in re.findall(r"\.shared .*\.b8 \w+\[(\d+)\]", ptx)]
    assert own
    assert sum(own) <= (48 << 10) - cuda_attention.SHARED_BYTES
