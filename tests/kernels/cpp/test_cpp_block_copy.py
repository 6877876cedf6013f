"""Copying blocks within the cache, and between the cache and the swap space, in C++."""

import mmap

import pytest
import torch
from torch import Tensor

from quire.kernels.reference import kv_cache
from support.cpp_kernels import copy_blocks

COPIES = {
    "apart": ([1, 1, 7], [0, 9, 3]),
    "read and overwritten": ([2, 5, 2, 7], [5, 2, 6, 0]),
    "onto itself": ([4], [4]),
    "none": ([], []),
}


def layers(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(10, 2, 8, 16, generator=generator).to(dtype) for _ in range(6)]


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES.keys())
def test_blocks_are_copied_in_every_layer_as_the_reference_does(
    copies: tuple[list[int], list[int]], dtype: torch.dtype, num_threads: int
) -> None:
    ours, expected = layers(dtype), layers(dtype)
    src, dst = (torch.tensor(blocks, dtype=torch.int64) for blocks in copies)
    copy_blocks(ours, ours, src, dst)
    kv_cache.copy_blocks(expected, expected, src, dst)
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES.keys())
def test_layers_may_have_blocks_of_different_sizes(copies: tuple[list[int], list[int]]) -> None:
    ours, expected = (
        [*layers(torch.float32)[:3], *(cache[:, :, :3].contiguous() for cache in layers(torch.bfloat16))]
        for _ in range(2)
    )
    ours, expected = [ours[0], ours[4], *ours[1:4]], [expected[0], expected[4], *expected[1:4]]
    src, dst = (torch.tensor(blocks, dtype=torch.int64) for blocks in copies)
    copy_blocks(ours, ours, src, dst)
    kv_cache.copy_blocks(expected, expected, src, dst)
    assert all(map(torch.equal, ours, expected))


def swap_space(caches: list[Tensor], num_blocks: int) -> list[Tensor]:
    """Caches of another number of blocks, in one mapping, as a swap file is."""
    shapes = [(num_blocks, *cache.shape[1:]) for cache in caches]
    num_bytes = num_blocks * caches[0][0].nbytes
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes * len(caches)), dtype=torch.uint8)
    return [
        part.view(cache.dtype).view(shape)
        for part, cache, shape in zip(memory.split(num_bytes), caches, shapes, strict=True)
    ]


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("copies", [([1, 1, 9], [0, 3, 2]), ([4], [4]), ([], [])], ids=["some", "one", "none"])
def test_blocks_are_swapped_in_every_layer_as_the_reference_does(
    copies: tuple[list[int], list[int]], dtype: torch.dtype, num_threads: int
) -> None:
    caches = layers(dtype)
    ours, expected = swap_space(caches, 5), swap_space(caches, 5)
    src, dst = (torch.tensor(blocks, dtype=torch.int64) for blocks in copies)
    copy_blocks(caches, ours, src, dst)
    kv_cache.copy_blocks(caches, expected, src, dst)
    assert all(map(torch.equal, ours, expected))
    assert all(map(torch.equal, caches, layers(dtype)))
    if len(copies[0]) == 1:
        copy_blocks(ours, caches, dst, src + 1)
        assert all(torch.equal(cache[5], cache[4]) for cache in caches)


def test_pools_that_do_not_go_together_are_refused() -> None:
    caches, block = layers(torch.float32), torch.tensor([0])
    with pytest.raises(AssertionError, match="share memory"):
        copy_blocks(caches, caches[::-1], block, block)
    with pytest.raises(AssertionError, match="differ"):
        copy_blocks(caches, [torch.zeros(3, 5) for _ in caches], block, block)
    with pytest.raises(AssertionError):
        copy_blocks(caches, swap_space(caches, 2)[1:], block, block)
