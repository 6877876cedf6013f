"""Products with weights of every format in Triton, against the meaning of each; exact ones with themselves."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.test_quantized import random_weight
from quire.kernels.layers import Activation
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.quantized import a8_sums, quantize_activations
from quire.kernels.reference.linear import make_linear, reference
from quire.kernels.triton import card, products
from quire.kernels.triton.products import EXACT_ROWS, FEW_ROWS, Tile, exact_tile, exact_tiles, quantize
from quire.kernels.triton.triton_linear import CudaLinear
from support.interpreter import rows_alike
from support.pairwise import covering

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
SIZES = [(64, 32, 32), (96, 64, 64), (71, 32, 16), (100, 1000, 64), (100, 100, 100), (33, 128, 128)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on(device: torch.device, weight: LinearWeight) -> LinearWeight:
    """Return a weight on a device."""
    moved = {
        name: getattr(weight, name).to(device)
        for name in ("scales", "zero_points", "minimums", "codebook", "group_index")
        if isinstance(getattr(weight, name), Tensor)
    }
    return replace(weight, data=tuple(part.to(device) for part in weight.data), **moved)


@covering({"kind": ["constant", "zeros", "minimums"], "weight_format": ["int8", "int4"], "sizes": SIZES})
def test_sums_of_int8_activations_have_the_bits_of_their_meaning(
    sizes: tuple[int, int, int], weight_format: str, kind: str, device: torch.device
) -> None:
    width, group_size, activation_group_size = sizes
    x = random(3, width) * torch.tensor([[1.0], [1e-3], [1e4]])
    weight = random_weight((70, width), group_size, weight_format, kind, activation_group_size=activation_group_size)
    assert torch.equal(CudaLinear(on(device, weight))(x.to(device)).cpu(), a8_sums(x, weight))


def test_rounded_activations_have_the_bits_of_their_meaning(device: torch.device) -> None:
    x = random(4, 70) * torch.tensor([[1.0], [0.0], [1e-31], [1e30]])
    x[0, 3], x[3, 40] = float("nan"), float("inf")
    elements, scales, totals = quantize(x.to(device), 32)
    expected, wanted = quantize_activations(x, 32)
    assert torch.equal(elements.cpu(), expected)
    torch.testing.assert_close(scales.cpu(), wanted, rtol=0, atol=0, equal_nan=True)
    assert totals.tolist() == [[int(part.sum()) for part in row.int().split(32)] for row in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("weight_format", "kind"),
    [("int8", "constant"), ("int4", "zeros"), ("int4", "minimums"), ("fp8", ""), ("codebook4", "")],
)
@pytest.mark.parametrize("group_size", [24, 64])
def test_expanded_weights_match_the_dense_ones_that_they_stand_for(
    group_size: int, weight_format: str, kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    weight = random_weight((70, 120), group_size, weight_format, kind, dtype=dtype)
    x, bias, addend = random(3, 120, dtype=dtype), random(70, dtype=dtype, seed=2), random(3, 70, seed=3)
    layer = CudaLinear(on(device, weight), bias.to(device))
    tolerance = 1e-4 if dtype == torch.float32 else 5e-3
    for added in (None, addend):
        result = layer(x.to(device), None if added is None else added.to(device))
        expected = reference(x, weight, bias, addend=added)
        torch.testing.assert_close(result.cpu(), expected, rtol=tolerance, atol=tolerance)


def test_groups_that_a_checkpoint_scattered_are_multiplied_in_their_order(device: torch.device) -> None:
    weight = random_weight((9, 64), 32, "int4", "zeros", group_index=torch.arange(64, dtype=torch.int32) % 2)
    x = random(2, 64)
    torch.testing.assert_close(CudaLinear(on(device, weight))(x.to(device)).cpu(), make_linear(weight)(x))


@pytest.mark.parametrize(
    "activation", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "clamped_silu_and_mul", "gelu", "relu"]
)
@pytest.mark.parametrize("settings", [{"is_exact": True}, {}], ids=str)
def test_activation_is_part_of_the_product(
    settings: dict[str, Any], activation: Activation, device: torch.device
) -> None:
    weight = LinearWeight.dense(random(140, 40)) if settings else random_weight((140, 40), 32, activation_group_size=32)
    bias = random(140, seed=3)
    layer = CudaLinear(on(device, weight), bias.to(device), activation=activation, **settings)
    for num_rows in (3, FEW_ROWS + 1):
        x = random(num_rows, 40, seed=2)
        expected = reference(x, weight, bias, activation=activation)
        torch.testing.assert_close(layer(x.to(device)).cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("weight_format", ["dense", "int8", "int4"])
def test_row_of_an_exact_layer_has_the_same_bits_in_any_company(
    weight_format: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_alike(monkeypatch)
    dense = LinearWeight.dense(random(70, 200, dtype=dtype))
    weight = dense if weight_format == "dense" else random_weight((70, 200), 64, weight_format, dtype=dtype)
    layer = CudaLinear(on(device, weight), is_exact=True, dtype=torch.float32)
    x = random(EXACT_ROWS + 9, 200, dtype=dtype, seed=4).to(device)
    together = layer(x)
    for first, last in ((0, 1), (5, 22), (EXACT_ROWS - 1, EXACT_ROWS + 9)):
        assert torch.equal(layer(x[first:last]), together[first:last])
    assert together.dtype == torch.float32


@pytest.mark.parametrize("activation", ["none", "silu_and_mul"])
def test_row_has_the_same_bits_in_every_tile(
    activation: Activation, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tiles add the same slices in the same order, on a card by one instruction."""
    rows_alike(monkeypatch)
    capability = 90 if device.type == "cpu" else card.capability(device)  # 90 has the most tiles
    weight, bias = random(300, 600, dtype=torch.float16), random(300, dtype=torch.float16, seed=3).to(device)
    layer = CudaLinear(on(device, LinearWeight.dense(weight)), bias, is_exact=True, activation=activation)
    x, results = random(EXACT_ROWS + 9, 600, dtype=torch.float16, seed=4).to(device), list[Tensor]()
    for tile in exact_tiles(capability, is_gated=activation != "none"):
        monkeypatch.setattr(products, "exact_tile", lambda *_, tile=tile, **__: tile)
        results.append(layer(x))
    assert len(results) >= 4
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_tiles_make_enough_programs_for_a_card() -> None:
    """Products of an 8B model: outputs of attention, and of a gated layer; and the largest tiles for many rows."""

    def shape(num_rows: int, num_outputs: int, *, is_gated: bool = False) -> tuple[int, int]:
        tile = exact_tile(num_rows, num_outputs, 90, is_gated=is_gated)
        assert isinstance(tile, Tile)
        return tile.rows, tile.columns

    assert [shape(rows, 4096) for rows in (1, 16, 17, 64, 128, 256, 512, 2048)] == [
        (64, 16), (64, 16), (64, 32), (64, 32), (64, 64), (64, 128), (128, 128), (128, 256),
    ]  # fmt: skip
    assert [shape(rows, 14336, is_gated=True) for rows in (1, 64, 128, 256, 2048)] == [
        (64, 32), (64, 64), (64, 128), (128, 128), (128, 128),
    ]  # fmt: skip
    assert shape(1, 100) == (64, 16)
