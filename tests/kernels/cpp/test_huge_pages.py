"""Memory for packed weights: the pages under it, and no byte belongs to two."""

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.kernels.cpp import _kernels
from quire.kernels.cpp.huge_pages import ALIGNMENT, HUGE_PAGE_BYTES, MAPPED_AT_ONCE, PackedMemory, huge_pages

MAPS = Path("/proc/self/maps")
pytestmark = pytest.mark.parametrize("isa", _kernels.usable_isas()[:1], indirect=True)  # memory knows none


def test_memory_begins_with_a_page_and_is_zero() -> None:
    memory = huge_pages(3 * HUGE_PAGE_BYTES // 2, torch.bfloat16)
    assert memory.data_ptr() % HUGE_PAGE_BYTES == 0
    assert memory.numel() == 3 * HUGE_PAGE_BYTES // 2
    assert not memory.any()
    memory.fill_(1.0)
    assert huge_pages(10, torch.float32).numel() == 10


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not tell what is mapped")
def test_memory_is_private() -> None:
    """Memory that could be shared between processes gets no huge pages unless the system is set to give them."""
    memory = huge_pages(HUGE_PAGE_BYTES, torch.bfloat16)
    assert mapping_of(memory).split()[1] == "rw-p"


def mapping_of(tensor: Tensor) -> str:
    """Return the line of the system's table of mappings in which a tensor lies."""
    for line in MAPS.read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line
    raise AssertionError("mapped nowhere")


def test_weights_share_pages_and_no_bytes() -> None:
    memory = PackedMemory()
    sizes = [1, 100, 33, MAPPED_AT_ONCE // 2, 7, MAPPED_AT_ONCE, 5, 2 * MAPPED_AT_ONCE, 3]
    taken = [memory.take(size, torch.uint8) for size in sizes]
    for i, tensor in enumerate(taken):
        tensor[0] = tensor[-1] = i + 1
    assert [tensor.numel() for tensor in taken] == sizes
    assert [(int(tensor[0]), int(tensor[-1])) for tensor in taken] == [(i + 1, i + 1) for i in range(len(sizes))]
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in taken)
    assert taken[1].data_ptr() - taken[0].data_ptr() == ALIGNMENT


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not tell what is mapped")
def test_memory_goes_back_with_the_last_weight() -> None:
    memory = PackedMemory()
    taken = [memory.take(MAPPED_AT_ONCE - 100, torch.uint8), memory.take(MAPPED_AT_ONCE, torch.uint8)]
    first = taken[0].data_ptr()
    assert is_mapped(first)
    del taken[0]
    gc.collect()
    assert not is_mapped(first)


def is_mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in MAPS.read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)
