"""Writing keys and values into their slots."""

import pytest
import torch
from torch import Tensor

from quire.core.config import QUANTIZED
from quire.kernels.reference.kv_cache import encode, write_kv
from support.paged_cache import rotary_spec


def write_one_by_one(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write what `write_kv` is to write, token by token."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache.flatten(0, 1)[slot] = key[token]
            value_cache.flatten(0, 1)[slot] = value[token]


def write_alone(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write without turning anything."""
    query = key.clone()
    spec = rotary_spec(query, key)
    assert write_kv(spec, query, key, value, slot_mapping, key_cache, value_cache, slot_mapping) is query
    assert torch.equal(query, key)


def step(
    slots: list[int], dtype: torch.dtype = torch.float32, heads: int = 3, head_dim: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(slots))
    key, value = (torch.randn(len(slots), heads, head_dim, generator=generator).to(dtype) for _ in range(2))
    return key, value, torch.tensor(slots, dtype=torch.int64)


def caches(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.full((6, 16, 3, 8), 7.0, dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tokens_land_in_their_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    slots = [95, 0, 17, 16, 40]
    key, value, slot_mapping = step(slots, dtype)
    key_cache, value_cache = caches(dtype)
    write_alone(key, value, key_cache, value_cache, slot_mapping)
    for new, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.view(96, 3, 8)
        assert torch.equal(flat[slots], new)
        untouched = torch.ones(96, dtype=torch.bool)
        untouched[slots] = False
        assert (flat[untouched] == 7.0).all()


@pytest.mark.parametrize("slots", [[-1, 5, -1, 0], [-1, -1], []])
def test_slot_of_minus_one_writes_nothing(slots: list[int]) -> None:
    key, value, slot_mapping = step(slots)
    key_cache, value_cache = caches()
    write_alone(key, value, key_cache, value_cache, slot_mapping)
    written = [slot for slot in slots if slot >= 0]
    assert int((key_cache != 7.0).flatten(2).any(-1).sum()) == len(written)
    assert torch.equal(value_cache.view(96, 3, 8)[written], value[[slots.index(slot) for slot in written]])


@pytest.mark.parametrize("kv", QUANTIZED)
def test_quantized_tokens_land_in_their_slots_and_nowhere_else(kv: str) -> None:
    stored, slots = QUANTIZED[kv], [95, 0, -1, 16, 40]
    key, value, slot_mapping = step(slots, torch.bfloat16)
    dtype, width = getattr(torch, stored.element), 8 + stored.scale_bytes
    key_cache, value_cache = (torch.full((6, 16, 3, width), 7, dtype=torch.int8).view(dtype) for _ in range(2))
    write_alone(key, value, key_cache, value_cache, slot_mapping)
    written = [95, 0, 16, 40]
    for new, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.view(torch.int8).view(96, 3, width)
        assert torch.equal(flat[written], encode(new[[0, 1, 3, 4]], dtype, width))
        flat[written] = 7
        assert (flat == 7).all()


def test_back_end_matches_reference_on_random_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 17, 60):
        slots = torch.randperm(96, generator=generator)[:count]
        slots[torch.rand(count, generator=generator) < 0.2] = -1
        key, value, slot_mapping = step(slots.tolist())
        ours, plain = caches(), caches()
        write_alone(key, value, *ours, slot_mapping)
        write_one_by_one(key, value, *plain, slot_mapping)
        assert torch.equal(ours[0], plain[0])
        assert torch.equal(ours[1], plain[1])


def test_keys_cut_from_a_fused_projection_are_written() -> None:
    fused = torch.randn(4, 5 * 24, generator=torch.Generator().manual_seed(0))
    key, value = (fused[:, begin : begin + 24].view(4, 3, 8) for begin in (48, 96))
    key_cache, value_cache = caches()
    write_alone(key, value, key_cache, value_cache, torch.tensor([3, 50, 20, 90]))
    assert torch.equal(key_cache.view(96, 3, 8)[[3, 50, 20, 90]], key)
    assert torch.equal(value_cache.view(96, 3, 8)[[3, 50, 20, 90]], value)
