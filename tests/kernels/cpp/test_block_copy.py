"""Copying blocks within the cache in C++."""

import pytest
import torch
from torch import Tensor

from quire.kernels import block_copy
from quire.kernels.cpp.block_copy import copy_blocks

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
    copy_blocks(ours, src, dst)
    block_copy.reference(expected, src, dst)
    assert all(map(torch.equal, ours, expected))


def test_caches_whose_blocks_differ_in_size_are_refused() -> None:
    block = torch.tensor([0])
    with pytest.raises(AssertionError, match="differ"):
        copy_blocks([torch.zeros(3, 4), torch.zeros(3, 5)], block, block)
