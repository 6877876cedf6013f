"""Keys and values of 8 bits in Triton: the bytes of the CPU, and attention over them against the reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.core.config import QUANTIZED
from quire.kernels.choice import cuda_back_end
from quire.kernels.kv_cache import ONES, KVScales
from quire.kernels.reference import kv_cache
from quire.kernels.reference.back_ends import REFERENCE
from quire.kernels.reference.kv_cache import copy_blocks
from support.paged_cache import Paging, Part, Tokens, attend, rotary_spec, scales_behind
from support.pairwise import covering

OPS = pytest.importorskip("triton") and cuda_back_end()
KV = list(QUANTIZED)
# A GPU's arithmetic with what is not finite says nothing.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
SPANS = [(16, 17), (0, 3), (30, 70), (269, 270)]


def caches_of(kv: str, heads: int, head_dim: int, device: torch.device) -> list[torch.Tensor]:
    stored = QUANTIZED[kv]
    shape = (3, 16, heads, head_dim + stored.scale_bytes)
    return [torch.zeros(shape, dtype=torch.int8, device=device).view(getattr(torch, stored.element)) for _ in range(2)]


def hostile(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return numbers of many magnitudes, with zeros, a head that is not finite and ties between two elements."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x *= 10.0 ** torch.arange(-3, 2)[:, None, None]
    x[1, 0], x[2, 0, 3], x[3, 0, 2] = 0, torch.nan, torch.inf
    x[4, 0] = (torch.arange(x.shape[2]) % 9 + 0.5) / 254
    x[4, 0, 0] = 1
    return x.to(dtype)


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rotary_dim", "is_interleaved"), [(None, False), (16, False), (24, True)])
def test_written_bytes_are_those_of_the_cpu(
    kv: str, dtype: torch.dtype, rotary_dim: int | None, is_interleaved: bool, device: torch.device
) -> None:
    query, key, value = (hostile(5, heads, 24, dtype=dtype, seed=heads) for heads in (6, 2, 3))
    key, value = key[:, :2], value[:, :2]
    table = None if rotary_dim is None else torch.randn(9, rotary_dim)
    slots, positions = torch.tensor([7, -1, 0, 33, 16]), torch.tensor([3, 0, 8, 1, 2])
    scales = KVScales(0.05, 0.3) if kv == "fp8" else ONES
    expected = caches_of(kv, 2, 24, torch.device("cpu"))
    spec = rotary_spec(query, key, table, is_interleaved=is_interleaved, kv_scales=scales)
    turned = kv_cache.write_kv(spec, query.clone(), key.clone(), value.clone(), positions, *expected, slots)
    caches = caches_of(kv, 2, 24, device)
    rows = torch.cat([query, key, value], 1).to(device).split([6, 2, 2], dim=1)
    spec = replace(spec, cos_sin=None if table is None else table.to(device))
    result = OPS.write_kv(spec, *rows, positions.to(device), *caches, slots.to(device))
    torch.testing.assert_close(result.cpu(), turned, rtol=2e-3, atol=2e-3, equal_nan=True)
    for cache, wanted in zip(caches, expected, strict=True):
        behind = scales_behind(wanted, 24)
        assert torch.equal(cache.cpu().view(torch.uint8), behind.view(torch.uint8))


@covering(
    {
        "kv": KV, "window": [None, 50],
        ("heads", "dtype"): [((3, 1, 80), torch.float16), ((4, 2, 24), torch.float32)],
    }
)  # fmt: skip
def test_step_matches_the_reference(
    kv: str, window: int | None, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    parts = [Part(Tokens.random(stop, heads, dtype, seed), start, stop) for seed, (start, stop) in enumerate(SPANS)]
    scales = KVScales(0.05, 0.3) if kv == "fp8" else ONES
    results = attend(parts, Paging(16, 1), window, OPS, device, kv=kv, scales=scales)
    wanted = attend(parts, Paging(16, 1), window, REFERENCE, kv=kv, scales=scales)
    tolerance = 2e-5 if dtype == torch.float32 else 3e-3
    for result, expected in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kv", KV)
def test_softcap_and_sinks_match_the_reference(kv: str, device: torch.device) -> None:
    parts = [Part(Tokens.random(stop, (3, 1, 24), seed=seed), start, stop) for seed, (start, stop) in enumerate(SPANS)]
    more = {"softcap": 1.5, "sinks": torch.tensor([-3.0, 0.5, 6.0])}
    results = attend(parts, Paging(16, 1), None, OPS, device, kv=kv, **more)
    for result, wanted in zip(results, attend(parts, Paging(16, 1), None, REFERENCE, kv=kv, **more), strict=True):
        torch.testing.assert_close(result, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kv", ["int8_per_token_head", "fp8"])
def test_context_in_parts_and_copied_blocks_match_the_reference(kv: str, device: torch.device) -> None:
    parts = [Part(Tokens.random(stop, (2, 1, 16)), start, stop) for start, stop in [(1195, 1200), (900, 901)]]
    results = attend(parts, Paging(32), None, OPS, device, kv=kv)
    for result, wanted in zip(results, attend(parts, Paging(32), None, REFERENCE, kv=kv), strict=True):
        torch.testing.assert_close(result, wanted, rtol=2e-5, atol=2e-5)
    caches = caches_of(kv, 2, 24, device)
    for cache in caches:
        cache.view(torch.int8).copy_(torch.randint(-128, 128, cache.shape, dtype=torch.int8))
    expected = [cache.clone() for cache in caches]
    copy_blocks(expected, expected, np.array([0]), np.array([2]))
    OPS.copy_blocks(caches, caches, np.array([0]), np.array([2]))
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8))


def test_number_that_is_not_finite_reaches_the_answer(device: torch.device) -> None:
    """So that its request fails, as in 16 bits."""
    for kv in KV:
        tokens = Tokens.random(20, (2, 1, 16))
        tokens.value[4, 0, 3] = torch.nan
        (result,) = attend([Part(tokens, 19, 20)], Paging(16), None, OPS, device, kv=kv)
        assert result.isnan().any(), kv
