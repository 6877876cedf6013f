"""Copying blocks within the cache."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.kernels import block_copy
from quire.kernels.block_copy import copy_blocks

COPIERS = [block_copy.reference, copy_blocks]


def layers(count: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(10, 16, 2, 8, generator=generator).to(dtype) for _ in range(2 * count)]


@pytest.mark.parametrize("copy", COPIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_blocks_are_copied_in_every_layer_and_nothing_else_changes(
    copy: Callable[..., None], dtype: torch.dtype
) -> None:
    caches = layers(dtype=dtype)
    before = [cache.clone() for cache in caches]
    copy(caches, torch.tensor([1, 1, 7]), torch.tensor([0, 9, 3]))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[0, 9, 3]], old[[1, 1, 7]])
        assert torch.equal(cache[[1, 2, 4, 5, 6, 7, 8]], old[[1, 2, 4, 5, 6, 7, 8]])


@pytest.mark.parametrize("copy", COPIERS)
def test_a_block_may_be_read_and_overwritten_in_one_step(copy: Callable[..., None]) -> None:
    caches = layers()
    before = [cache.clone() for cache in caches]
    copy(caches, torch.tensor([2, 5, 2]), torch.tensor([5, 2, 6]))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[5, 2, 6]], old[[2, 5, 2]])


@pytest.mark.parametrize("copy", COPIERS)
def test_no_copies_change_nothing(copy: Callable[..., None]) -> None:
    caches = layers()
    before = [cache.clone() for cache in caches]
    copy(caches, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    assert all(map(torch.equal, caches, before))
