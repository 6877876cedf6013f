"""Memory for packed weights: the pages under it, and no byte belongs to two."""

import gc
from pathlib import Path

import numpy as np
import pytest

from quire.core.arrays import BFLOAT16, FLOAT32, UINT8, DType, address, bits, dtype_name
from quire.extension import _kernels
from quire.kernels.conversion import converted
from quire.kernels.cpp.cpp_linear import CppHead
from quire.kernels.cpp.cpp_packing import ALIGNMENT, MAPPED_AT_ONCE, PackedMemory
from quire.kernels.linear_weight import LinearWeight

MAPS = Path("/proc/self/maps")
pytestmark = pytest.mark.parametrize("isa", _kernels.usable_isas()[:1], indirect=True)  # memory knows none


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=dtype_name)
@pytest.mark.parametrize("width", [1, 31, 64])
def test_rows_of_a_table_are_those_that_were_packed(dtype: DType, width: int) -> None:
    rows = converted(np.random.default_rng(0).standard_normal((50, width), np.float32), dtype)
    ids = np.array([49, 0, 3, 3, 17, 32])
    found = CppHead(LinearWeight.dense(rows)).table.look_up(ids)
    np.testing.assert_array_equal(bits(found), bits(rows[ids]))
    with pytest.raises(IndexError, match="row 50 of a table of 50"):
        CppHead(LinearWeight.dense(rows)).table.look_up(np.array([50]))


def test_weights_share_pages_and_no_bytes() -> None:
    memory = PackedMemory()
    sizes = [1, 100, 33, MAPPED_AT_ONCE // 2, 7, MAPPED_AT_ONCE, 5, 2 * MAPPED_AT_ONCE, 3]
    taken = [memory.take(size, UINT8) for size in sizes]
    for i, array in enumerate(taken):
        array[0] = array[-1] = i + 1
    assert [len(array) for array in taken] == sizes
    assert [(int(array[0]), int(array[-1])) for array in taken] == [(i + 1, i + 1) for i in range(len(sizes))]
    assert all(address(array) % ALIGNMENT == 0 for array in taken)
    assert address(taken[1]) - address(taken[0]) == ALIGNMENT


@pytest.mark.usefixtures("tests_frozen")
@pytest.mark.skipif(not MAPS.exists(), reason="the system does not tell what is mapped")
def test_memory_goes_back_with_the_last_weight() -> None:
    memory = PackedMemory()
    taken = [memory.take(MAPPED_AT_ONCE - 100, UINT8), memory.take(MAPPED_AT_ONCE, UINT8)]
    first = address(taken[0])
    assert is_mapped(first)
    del taken[0]
    gc.collect()
    assert not is_mapped(first)


def is_mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in MAPS.read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)
