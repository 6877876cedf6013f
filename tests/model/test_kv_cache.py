"""The tensors of the cache: shapes, zeros, and memory that is taken only where it is used."""

import resource
from pathlib import Path

import pytest
import torch

from quire.core.arrays import HUGE_PAGE_BYTES, dtype_name
from quire.core.config import KVDtype
from quire.core.errors import ConfigError
from quire.kernels.back_end import BackEnd
from quire.kernels.choice import choose_back_end
from quire.kernels.reference.back_ends import TORCH
from quire.model.kv_cache import ALIGNMENT, KVCache, KVGeometry, LayerKV, LayerTail


def geometry(dtype: str = "float32") -> KVGeometry:
    return KVGeometry((LayerKV(2, 8, dtype),) * 3)


@pytest.fixture(params=["torch", "auto"])
def back_end(request: pytest.FixtureRequest) -> BackEnd:
    return choose_back_end(torch.device("cpu"), request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cache_is_one_zeroed_aligned_tensor_per_layer_for_keys_and_for_values(dtype: torch.dtype) -> None:
    cache = KVCache.allocate(geometry(dtype_name(dtype)), 5, 16, TORCH)
    assert len(cache.keys) == len(cache.values) == 3
    for tensor in cache.tensors:
        assert tensor.shape == (5, 16, 2, 8)
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT == 0
        assert not tensor.any()
    assert [tensor.nbytes for tensor in cache.tensors] == geometry(dtype_name(dtype)).tensor_bytes(5, 16)


def test_joined_caches_are_the_same_tensors_and_may_differ_in_blocks() -> None:
    first, second = KVCache.allocate(geometry(), 5, 16, TORCH), KVCache.allocate(geometry("bfloat16"), 7, 16, TORCH)
    joined = first.joined(second)
    assert [len(tensor) for tensor in joined.tensors] == 2 * (3 * [5] + 3 * [7])
    for part, cache in zip(joined.split([3, 3]), (first, second), strict=True):
        assert all(ours is theirs for ours, theirs in zip(part.tensors, cache.tensors, strict=True))
    with pytest.raises(AssertionError, match="blocks of 16 and 8 tokens"):
        first.joined(KVCache.allocate(geometry(), 5, 8, TORCH))


def test_empty_cache_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = KVCache.allocate(geometry(), 1 << 18, 16, TORCH)
    nominal_kib = sum(tensor.nbytes for tensor in cache.tensors) // 1024
    assert nominal_kib > 1 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < nominal_kib // 20


def test_layers_may_differ_and_are_split_by_model(back_end: BackEnd) -> None:
    others = LayerKV(1, 16, "bfloat16"), LayerTail(3, 12, "float32"), LayerKV(1, 40, "float32", latent_dim=32)
    joined = geometry("float32").joined(KVGeometry(others))
    cache = KVCache.allocate(joined, 5, 16, back_end)
    assert [tensor.nbytes for tensor in cache.tensors] == joined.tensor_bytes(5, 16)
    assert [dtype_name(each.dtype) for each in cache.keys] == ["float32"] * 3 + ["bfloat16", "float32", "float32"]
    target, draft = cache.split([3, 3])
    assert all(a is b for a, b in zip(target.keys + draft.keys, cache.keys, strict=True))
    assert all(a is b for a, b in zip(target.values + draft.values, cache.values, strict=True))
    with pytest.raises(AssertionError, match=r"\[3\] of 6 layers"):
        cache.split([3])


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (LayerKV(2, 8, "int8"), "KV cache of int8 is not"),
        (LayerKV(2, 8, "float8_e5m2"), "KV cache of float8_e5m2 is not"),
        (LayerKV(2, 8, "bfloat16", scale_dtype="float32"), "KV cache of bfloat16 with scales of float32 is not"),
    ],
)
def test_dtype_that_no_kernel_reads_is_refused_by_name(layer: LayerKV, named: str, back_end: BackEnd) -> None:
    with pytest.raises(ConfigError, match=f"{named} supported; this back end stores .*float32"):
        KVCache.allocate(KVGeometry((layer,)), 5, 16, back_end)


def test_dtype_of_another_model_is_refused_by_name(back_end: BackEnd) -> None:
    layout, of = back_end.cache_layout, back_end.library.dtype
    stored = KVDtype("bfloat16")
    assert layout.stored_dtype(of("bfloat16")) == layout.stored_dtype(of("bfloat16"), "bfloat16") == stored
    with pytest.raises(ConfigError, match=r"kv_cache_dtype 'float32' is not supported: .* a bfloat16 model .* bfloat"):
        layout.stored_dtype(of("bfloat16"), "float32")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells the memory that a process has")
def test_first_block_of_every_tensor_takes_small_pages() -> None:
    cache = KVCache.allocate(KVGeometry((LayerKV(2, 64, "float32"),) * 24), 1024, 16, TORCH)
    assert all(tensor.nbytes >= 4 * HUGE_PAGE_BYTES for tensor in cache.tensors)
    before = resident_bytes()
    for tensor in cache.tensors:
        tensor[0] = 1
    assert resident_bytes() - before < len(cache.tensors) * HUGE_PAGE_BYTES / 4


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
