"""Cache writes, block copies and swaps, norms and activations in Triton against their references."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.kernels.choice import cuda_back_end
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.reference import activation as activations
from quire.kernels.reference import kv_cache, norm
from support.paged_cache import rotary_spec

dense = LinearWeight.dense

CUDA_OPS = pytest.importorskip("triton") and cuda_back_end()
# A GPU's exp of a large number is infinite, too, and nothing is said of it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float16: {"rtol": 2e-3, "atol": 2e-3}}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(6, 2, 24), (3, 3, 80), (8, 1, 64)], ids=str)
@pytest.mark.parametrize(
    ("rotary_dim", "is_interleaved"), [(None, False), (16, False), ("all", False), (16, True), ("all", True)]
)
def test_write_stores_turned_keys_and_values_where_the_slots_say(
    heads: tuple[int, int, int], rotary_dim: int | str | None, is_interleaved: bool, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    num_heads, num_kv_heads, head_dim = heads
    rotary_dim = head_dim if rotary_dim == "all" else rotary_dim
    counts = [num_heads, num_kv_heads, num_kv_heads]
    projected = random(5, sum(counts), head_dim, dtype=dtype)
    slots, positions = torch.tensor([7, -1, 0, 33, 16]), torch.tensor([3, 0, 8, 1, 2])
    caches = [torch.full((3, 16, num_kv_heads, head_dim), torch.nan, dtype=dtype) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    caches = [cache.to(device) for cache in caches]
    query, key, value = projected.clone().to(device).split(counts, dim=1)  # slices of one projection
    table = random(9, rotary_dim) if isinstance(rotary_dim, int) else None
    spec = rotary_spec(query, key, table, is_interleaved=is_interleaved)
    turned = kv_cache.write_kv(spec, *projected.split(counts, dim=1), positions, *expected, slots)
    spec = replace(spec, cos_sin=None if table is None else table.to(device))
    result = CUDA_OPS.write_kv(spec, query, key, value, positions.to(device), *caches, slots.to(device))
    torch.testing.assert_close(result.cpu(), turned, **TOLERANCE[dtype])
    for cache, wanted in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache.cpu(), wanted, equal_nan=True, **TOLERANCE[dtype])


@pytest.mark.parametrize("dst", [[5, 0, 3], [5, 2, 1]], ids=["apart", "read and written"])
@pytest.mark.parametrize("num_heads", [1, 300], ids=["part of a program", "several programs"])
def test_copies_move_whole_blocks_in_every_cache(num_heads: int, dst: list[int], device: torch.device) -> None:
    caches = [random(6, 8, num_heads, 8, dtype=torch.float16, seed=seed) for seed in range(3)]
    expected, src = [cache.clone() for cache in caches], np.array([1, 2, 4])
    kv_cache.copy_blocks(expected, expected, src, np.array(dst))
    caches = [cache.to(device) for cache in caches]
    CUDA_OPS.copy_blocks(caches, caches, src, np.array(dst))
    assert all(torch.equal(cache.cpu(), wanted) for cache, wanted in zip(caches, expected, strict=True))


def test_swaps_move_blocks_between_the_cache_and_host_memory(device: torch.device) -> None:
    caches = [random(6, 8, 2, 8, seed=seed).to(device) for seed in range(2)]
    space = [torch.zeros(4, 8, 2, 8, pin_memory=device.type == "cuda") for _ in range(2)]
    CUDA_OPS.copy_blocks(caches, space, np.array([5, 1]), np.array([0, 3]))
    if device.type == "cuda":
        torch.cuda.synchronize()
    for cache, places in zip(caches, space, strict=True):
        assert torch.equal(places[0], cache[5].cpu())
        assert torch.equal(places[3], cache[1].cpu())
        assert not places[1:3].any()
    before = [cache.clone() for cache in caches]
    CUDA_OPS.copy_blocks(space, caches, np.array([3]), np.array([2]))
    for cache, was in zip(caches, before, strict=True):
        assert torch.equal(cache[2], was[1])
        assert torch.equal(cache[3:], was[3:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 1030])
@pytest.mark.parametrize("kind", ["rms", "layer", "layer without bias", "rms, 1 + weight"])
@pytest.mark.parametrize("has_residual", [False, True])
def test_norm_matches_its_reference(
    kind: str, has_residual: bool, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = random(5, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    bias = random(width, dtype=dtype, seed=2) if kind == "layer" else None
    centers, offset = kind.startswith("layer"), 1.0 if kind == "rms, 1 + weight" else None
    residual = random(5, width, dtype=dtype, seed=3) if has_residual else None
    expected = norm.TorchNorm(weight, bias, 1e-5, centers, offset)(x, residual)
    norm_op = CUDA_OPS.norm(weight.to(device), None if bias is None else bias.to(device), 1e-5, centers, offset)
    results = norm_op(x.clone().to(device), None if residual is None else residual.clone().to(device))
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), wanted, **TOLERANCE[dtype])


def test_norm_takes_a_slice_of_heads(device: torch.device) -> None:
    projected, weight = random(4, 5, 32), random(32, seed=1)
    normed, _ = CUDA_OPS.norm(weight.to(device), None, 1e-6, False)(projected.to(device)[:, 1:3])
    torch.testing.assert_close(normed.cpu(), norm.TorchNorm(weight, None, 1e-6, False)(projected[:, 1:3])[0])


@pytest.mark.parametrize("centers", [False, True])
def test_norm_takes_heads_with_weights_of_their_own(centers: bool, device: torch.device) -> None:
    projected, weight = random(4, 5, 24), random(2, 24, seed=1)
    normed, _ = CUDA_OPS.norm(weight.to(device), None, 1e-6, centers)(projected.to(device)[:, 1:3])
    torch.testing.assert_close(normed.cpu(), norm.TorchNorm(weight, None, 1e-6, centers)(projected[:, 1:3])[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name",
    ["none", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "gelu_tanh", "gelu", "quick_gelu", "relu", "relu2"],
)
def test_linear_layer_activates_its_result(name: str, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = random(3, 32, dtype=dtype), random(2400, 32, dtype=dtype, seed=1), random(2400, dtype=dtype)
    product = torch.nn.functional.linear(x, weight, bias)
    expected = product if name == "none" else getattr(activations, name)(product)
    layer = CUDA_OPS.linear(dense([w.to(device) for w in weight.split(1000)]), bias.to(device), activation=name)
    torch.testing.assert_close(layer(x.to(device)).cpu(), expected, **TOLERANCE[dtype])
    assert layer.num_bytes == weight.nbytes


def test_head_in_half_precision_gives_float32(device: torch.device) -> None:
    x, weight = random(3, 64, dtype=torch.float16), random(50, 64, dtype=torch.float16, seed=1)
    logits = CUDA_OPS.linear(dense(weight.to(device)), dtype=torch.float32)(x.to(device))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.cpu(), x.float() @ weight.float().T, rtol=1e-5, atol=1e-4)
