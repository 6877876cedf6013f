"""Blocks of quantized GGUF tensors, against the gguf package's dequantization, to the bit."""

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.core.gguf_types import GGML_TYPES
from quire.model.checkpoints.gguf_blocks import READERS, read_blocks

KINDS = {kind.name: kind for kind in GGML_TYPES.values()}
HALVES = {  # places of float16 numbers in a block
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip


def random_rows(name: str, num_rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Return rows of random valid blocks: every byte random, but scales finite, of any sign, down to subnormal ones."""
    kind, random = KINDS[name], np.random.default_rng(seed)
    blocks = random.integers(0, 256, (num_rows * width // kind.block_size, kind.block_bytes), dtype=np.uint8)
    for place in HALVES[name]:
        scales = random.standard_normal(len(blocks)) * 10.0 ** random.integers(-7, 4, len(blocks))
        blocks[:, place : place + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        blocks[:, 0] = random.integers(0, 250, len(blocks))
    return blocks.reshape(num_rows, -1)


def bits(values: Tensor) -> Tensor:
    """Return the bits of float32 numbers: zeros of either sign differ."""
    return values.view(torch.int32)


@pytest.mark.parametrize("name", READERS)
def test_values_are_those_of_the_gguf_package_to_the_bit(name: str) -> None:
    package = pytest.importorskip("gguf", reason="the gguf package is not installed")
    rows = random_rows(name, 40, 512)
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
