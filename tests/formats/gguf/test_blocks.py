"""Blocks of quantized GGUF tensors: the extension against PyTorch, and both against the gguf package, to the bit."""

import numpy as np
import pytest
import torch
from torch import Tensor

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
from quire.kernels.cpp.cpp_back_end import usable_isas
from quire.kernels.cpp.cpp_embedding import embed
from support.gguf_blocks import HALVES, random_rows

LEAST = {"MXFP4": -50}  # magnitudes of scales
WIDTH = 512


@pytest.fixture(params=["cpp", "torch"], autouse=True)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have blocks read by the extension, or by PyTorch as where there is none."""
    if request.param == "torch":
        monkeypatch.setattr(module, "usable_isas", tuple)
    elif not usable_isas():
        pytest.skip("the C++ kernels were not built")


def bits(values: Tensor) -> Tensor:
    """Return the bits of float32 numbers: zeros of either sign differ."""
    return values.view(torch.int32)


def read(name: str, rows: Tensor) -> tuple[WeightBlocks, bool]:
    blocks = empty_blocks(name, len(rows), WIDTH)
    return blocks, read_blocks(name, rows, blocks)


@pytest.mark.parametrize("name", KINDS)
def test_values_are_those_of_the_gguf_package_to_the_bit(name: str) -> None:
    package = pytest.importorskip("gguf", reason="the gguf package is not installed")
    rows = random_rows(name, 40, WIDTH, least=LEAST.get(name, -7))
    expected = bits(torch.from_numpy(package.quants.dequantize(rows, package.GGMLQuantizationType[name])))
    blocks, is_finite = read(name, torch.from_numpy(rows))
    assert is_finite
    assert torch.equal(bits(blocks.values()), expected)
    assert torch.equal(bits(read_values(name, torch.from_numpy(rows))), expected)
    assert int(blocks.elements.max()) < 2**blocks.bits
    assert blocks.group_size == {"Q6_K": 16}.get(name, 32)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("num_rows", [1, 3, 1100], ids=["one row", "few rows", "rows for several threads"])
def test_blocks_are_those_of_the_reference_to_the_bit(name: str, num_rows: int) -> None:
    rows = torch.from_numpy(random_rows(name, 2 * num_rows, WIDTH, least=LEAST.get(name, -7)))[::2]  # with gaps between
    blocks, is_finite = read(name, rows)
    expected = reference(name, rows)
    assert is_finite
    assert blocks._replace(elements=0, scales=0, minimums=0) == expected._replace(elements=0, scales=0, minimums=0)
    assert torch.equal(blocks.elements, expected.elements)
    assert torch.equal(bits(blocks.scales), bits(expected.scales))
    assert (blocks.minimums is None) == (expected.minimums is None)
    if blocks.minimums is not None and expected.minimums is not None:
        assert torch.equal(bits(blocks.minimums), bits(expected.minimums))


@pytest.mark.parametrize("name", [name for name in KINDS if HALVES[name]])
def test_every_float16_scale_is_read(name: str) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    per_row = random_rows(name, 1, WIDTH).size // module._LAYOUTS[name].block_bytes
    rows = random_rows(name, len(halves) // per_row, WIDTH)
    for place in HALVES[name]:
        rows.reshape(len(halves), -1)[:, place : place + 2] = halves[:, None].view(np.uint8)
    blocks, is_finite = read(name, torch.from_numpy(rows))
    expected = reference(name, torch.from_numpy(rows))
    assert not is_finite
    numbers = ~expected.scales.isnan()  # NaN has no bits of its own
    assert torch.equal(bits(blocks.scales)[numbers], bits(expected.scales)[numbers])
    assert torch.equal(blocks.scales.isnan(), expected.scales.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_rows_of_a_table_in_blocks_are_those_of_its_values_to_the_bit(name: str, dtype: torch.dtype) -> None:
    rows = torch.from_numpy(random_rows(name, 50, WIDTH, least=LEAST.get(name, -7)))
    copy = torch.empty_like(rows)
    assert copy_blocks(name, rows, copy)
    table, ids = BlockedTable(name, copy, dtype), torch.tensor([49, 0, 3, 3, 17])
    assert table.num_bytes == rows.nbytes
    assert torch.equal(table.look_up(ids), read_values(name, rows).to(dtype)[ids])
    added = torch.randn(9, WIDTH).to(dtype)
    assert torch.equal(embed(table, ids[:2], added, torch.tensor([8, 1])), table.look_up(ids[:2]) + added[[8, 1]])


@pytest.mark.parametrize("token", [-1, 50])
def test_id_past_a_table_in_blocks_is_an_error(token: int) -> None:
    table = BlockedTable("Q8_0", torch.from_numpy(random_rows("Q8_0", 50, WIDTH)), torch.bfloat16)
    with pytest.raises(IndexError):
        table.look_up(torch.tensor([0, token]))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q4_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("half", [np.inf, -np.inf, np.nan])
def test_scales_that_are_no_numbers_are_seen(name: str, half: float) -> None:
    for place in HALVES[name]:
        rows = random_rows(name, 2, WIDTH)
        rows[1, place : place + 2] = np.array([half], np.float16).view(np.uint8)
        assert not read(name, torch.from_numpy(rows))[1]
        assert not copy_blocks(name, torch.from_numpy(rows), torch.empty(rows.shape, dtype=torch.uint8))
