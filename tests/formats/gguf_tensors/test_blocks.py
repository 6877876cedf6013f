"""Blocks of quantized GGUF tensors, against the gguf package's dequantization, to the bit."""

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.formats.gguf_tensors.blocks import READERS, read_blocks
from support.gguf_blocks import HALVES, random_rows


def bits(values: Tensor) -> Tensor:
    """Return the bits of float32 numbers: zeros of either sign differ."""
    return values.view(torch.int32)


@pytest.mark.parametrize("name", READERS)
def test_values_are_those_of_the_gguf_package_to_the_bit(name: str) -> None:
    package = pytest.importorskip("gguf", reason="the gguf package is not installed")
    rows = random_rows(name, 40, 512, least=-50 if name == "MXFP4" else -7)
    expected = package.quants.dequantize(rows, package.GGMLQuantizationType[name])
    blocks = read_blocks(name, torch.from_numpy(rows))
    assert blocks.is_finite()
    assert torch.equal(bits(blocks.values()), bits(torch.from_numpy(expected)))
    assert int(blocks.elements.max()) < 2**blocks.bits
    assert blocks.group_size == {"Q6_K": 16}.get(name, 32)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q4_K", "Q6_K", "IQ4_XS"])
@pytest.mark.parametrize("half", [np.inf, -np.inf, np.nan])
def test_scales_that_are_no_numbers_are_seen(name: str, half: float) -> None:
    for place in HALVES[name]:
        rows = random_rows(name, 2, 256)
        rows[1, place : place + 2] = np.array([half], np.float16).view(np.uint8)
        assert not read_blocks(name, torch.from_numpy(rows)).is_finite()
