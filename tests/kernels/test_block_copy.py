"""Copying blocks within the cache, and between the cache and the swap space."""

import pytest
import torch
from torch import Tensor

from quire.kernels.reference.kv_cache import as_bytes, copy_blocks


def layers(count: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(10, 16, 2, 8, generator=generator).to(dtype) for _ in range(2 * count)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str
)
def test_blocks_are_copied_in_every_layer_and_nothing_else_changes(dtype: torch.dtype) -> None:
    caches = layers(dtype=dtype)
    before = [cache.clone() for cache in caches]
    copy_blocks(caches, caches, torch.tensor([1, 1, 7]), torch.tensor([0, 9, 3]))
    for cache, old in zip(map(as_bytes, caches), map(as_bytes, before), strict=True):
        assert torch.equal(cache[[0, 9, 3]], old[[1, 1, 7]])
        assert torch.equal(cache[[1, 2, 4, 5, 6, 7, 8]], old[[1, 2, 4, 5, 6, 7, 8]])


def test_a_block_may_be_read_and_overwritten_in_one_step() -> None:
    caches = layers()
    before = [cache.clone() for cache in caches]
    copy_blocks(caches, caches, torch.tensor([2, 5, 2]), torch.tensor([5, 2, 6]))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[5, 2, 6]], old[[2, 5, 2]])


def test_no_copies_change_nothing() -> None:
    caches = layers()
    before = [cache.clone() for cache in caches]
    copy_blocks(caches, caches, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    assert all(map(torch.equal, caches, before))


def test_blocks_are_swapped_out_and_in_again_wherever_there_is_room() -> None:
    caches, before = layers(), layers()
    space = [torch.zeros(4, *cache.shape[1:]) for cache in caches]
    copy_blocks(caches, space, torch.tensor([9, 2]), torch.tensor([0, 3]))
    for cache in caches:
        cache[[9, 2]] = torch.nan
    copy_blocks(space, caches, torch.tensor([3, 0]), torch.tensor([5, 7]))
    for cache, held, old in zip(caches, space, before, strict=True):
        assert torch.equal(cache[[5, 7]], old[[2, 9]])
        assert torch.equal(cache[[0, 1, 3, 4, 6, 8]], old[[0, 1, 3, 4, 6, 8]])
        assert not held[[1, 2]].any()
