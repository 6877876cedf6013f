"""Blocks of quantized GGUF tensors: the extension against NumPy, and both against the gguf package, to the bit."""

import numpy as np
import pytest

from quire.core.arrays import BFLOAT16, FLOAT32, Array, DType, bits, dtype_name
from quire.extension.isas import usable_isas
from quire.formats.gguf import blocks as module
from quire.formats.gguf.blocks import (
    KINDS,
    BlockedTable,
    WeightBlocks,
    copy_blocks,
    empty_blocks,
    read_blocks,
    read_values,
    reference,
)
from quire.kernels.conversion import converted
from support.gguf_blocks import HALVES, random_rows

LEAST = {"MXFP4": -50}  # magnitudes of scales
WIDTH = 512


@pytest.fixture(params=["cpp", "numpy"], autouse=True)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have blocks read by the extension, or by NumPy as where there is none."""
    if request.param == "numpy":
        monkeypatch.setattr(module, "usable_isas", tuple)
    elif not usable_isas():
        pytest.skip("the C++ kernels were not built")


def assert_same(found: Array, expected: Array) -> None:
    """Assert equal bits: zeros of either sign differ."""
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(bits(found), bits(expected))


def read(name: str, rows: Array) -> tuple[WeightBlocks, bool]:
    blocks = empty_blocks(name, len(rows), WIDTH)
    return blocks, read_blocks(name, rows, blocks)


@pytest.mark.parametrize("name", KINDS)
def test_values_are_those_of_the_gguf_package_to_the_bit(name: str) -> None:
    package = pytest.importorskip("gguf", reason="the gguf package is not installed")
    rows = random_rows(name, 40, WIDTH, least=LEAST.get(name, -7))
    expected = package.quants.dequantize(rows, package.GGMLQuantizationType[name])
    blocks, is_finite = read(name, rows)
    assert is_finite
    assert_same(blocks.values(), expected)
    assert_same(read_values(name, rows), expected)
    assert int(blocks.elements.max()) < 2**blocks.bits
    assert blocks.group_size == {"Q6_K": 16}.get(name, 32)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("num_rows", [1, 3, 1100], ids=["one row", "few rows", "rows for several threads"])
def test_blocks_are_those_of_the_reference_to_the_bit(name: str, num_rows: int) -> None:
    rows = random_rows(name, 2 * num_rows, WIDTH, least=LEAST.get(name, -7))[::2]  # with gaps between
    blocks, is_finite = read(name, rows)
    expected = reference(name, rows)
    assert is_finite
    assert blocks._replace(elements=0, scales=0, minimums=0) == expected._replace(elements=0, scales=0, minimums=0)
    assert_same(blocks.elements, expected.elements)
    assert_same(blocks.scales, expected.scales)
    assert (blocks.minimums is None) == (expected.minimums is None)
    if blocks.minimums is not None and expected.minimums is not None:
        assert_same(blocks.minimums, expected.minimums)


@pytest.mark.parametrize("name", [name for name in KINDS if HALVES[name]])
def test_every_float16_scale_is_read(name: str) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    per_row = random_rows(name, 1, WIDTH).size // module._LAYOUTS[name].block_bytes
    rows = random_rows(name, len(halves) // per_row, WIDTH)
    for place in HALVES[name]:
        rows.reshape(len(halves), -1)[:, place : place + 2] = halves[:, None].view(np.uint8)
    blocks, is_finite = read(name, rows)
    expected = reference(name, rows)
    assert not is_finite
    numbers = ~np.isnan(expected.scales)  # NaN has no bits of its own
    assert_same(blocks.scales[numbers], expected.scales[numbers])
    np.testing.assert_array_equal(np.isnan(blocks.scales), ~numbers)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=dtype_name)
@pytest.mark.parametrize("name", KINDS)
def test_rows_of_a_table_in_blocks_are_those_of_its_values_to_the_bit(name: str, dtype: DType) -> None:
    rows = random_rows(name, 50, WIDTH, least=LEAST.get(name, -7))
    copy = np.empty_like(rows)
    assert copy_blocks(name, rows, copy)
    table, ids = BlockedTable(name, copy, dtype), np.array([49, 0, 3, 3, 17])
    assert table.num_bytes == rows.nbytes
    assert_same(table.look_up(ids), converted(read_values(name, rows), dtype)[ids])


@pytest.mark.parametrize("token", [-1, 50])
def test_id_past_a_table_in_blocks_is_an_error(token: int) -> None:
    table = BlockedTable("Q8_0", random_rows("Q8_0", 50, WIDTH), BFLOAT16)
    with pytest.raises(IndexError):
        table.look_up(np.array([0, token]))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q4_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("half", [np.inf, -np.inf, np.nan])
def test_scales_that_are_no_numbers_are_seen(name: str, half: float) -> None:
    for place in HALVES[name]:
        rows = random_rows(name, 2, WIDTH)
        rows[1, place : place + 2] = np.array([half], np.float16).view(np.uint8)
        assert not read(name, rows)[1]
        assert not copy_blocks(name, rows, np.empty_like(rows))
