"""Linear layers of quantized weights with int8 activations, to the bit against their sums in PyTorch."""

from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.cpp.cpp_packing import PackedMemory
from quire.kernels.layers import Activation
from quire.kernels.linear_weight import INTEGER_FORMATS, LinearWeight
from quire.kernels.quantized import a8_sums, exact_product, round_to_nearest
from quire.model.quantization import WHOLE_ROW, WeightScheme
from quire_lab.sim.footprint import CPU_PACKING, packed_bytes
from support.cpp_kernels import CppLinear
from support.pairwise import covering
from support.threads import set_num_threads

NUM_ROWS = (1, 2, 3, 4, 5, 6, 7, 11, 16, 17, 31, 64, 65, 97, 200)
KINDS = ("zero point", "zero points", "minimums")
WHOLE = 1 << 20  # a group longer than any row

# Outputs, inputs, group of the weight and of the activations: odd widths, groups that fill no tile, a short last group.
SHAPES = [
    (1, 1, 32, 32),
    (7, 13, 32, 32),
    (33, 96, 32, 32),
    (34, 200, 16, 16),
    (48, 257, 64, 64),
    (40, 896, 128, 128),
    (17, 300, 128, 32),
    (50, 1000, 96, 48),
    (64, 172, WHOLE, WHOLE),
    (20, 2500, WHOLE, 256),
    (36, 4099, WHOLE, WHOLE),
]
CASES = [*zip(SHAPES, cycle((torch.float32, torch.bfloat16)), strict=False)]


def random_weight(
    shape: tuple[int, int, int, int], weight_format: str, kind: str, dtype: torch.dtype = torch.float32, seed: int = 0
) -> LinearWeight:
    out, width, group_size, activation_group_size = shape
    generator = torch.Generator().manual_seed(seed)
    top = 256 if weight_format == "int8" else 16
    grouped = out, -(-width // group_size)
    return LinearWeight(
        weight_format,
        (torch.randint(top, (out, width), generator=generator).to(torch.uint8),),
        out,
        width,
        torch.rand(grouped, generator=generator) / 100 + 1e-4,
        {
            "zero point": top // 2,
            "zero points": torch.randint(top, grouped, generator=generator).to(torch.uint8),
            "minimums": None,
        }[kind],
        group_size,
        activation_group_size=activation_group_size,
        minimums=torch.randn(grouped, generator=generator) / 10 if kind == "minimums" else None,
        dtype=dtype,
    )


def random_rows(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, some of them zeros."""
    generator = torch.Generator().manual_seed(1)
    sizes = 10.0 ** torch.randint(-6, 6, (num_rows, 1), generator=generator)
    rows = torch.randn(num_rows, width, generator=generator) * sizes
    rows[torch.rand(num_rows, generator=generator) < 0.05] = 0
    return rows.to(dtype)


def expected_of(x: Tensor, weight: LinearWeight) -> Tensor:
    return a8_sums(x, weight, exact_product).to(weight.value_dtype)


@cache
def case(shape: tuple[int, int, int, int], weight_format: str, kind: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows and the layer's results, which are the same for every instruction set."""
    x = random_rows(max(NUM_ROWS), shape[1], dtype)
    return x, expected_of(x, random_weight(shape, weight_format, kind, dtype))


@covering({("shape", "dtype"): CASES, "weight_format": INTEGER_FORMATS, "kind": KINDS})
def test_layer_has_the_bits_of_the_sums_for_any_number_of_rows_and_threads(
    shape: tuple[int, int, int, int], dtype: torch.dtype, weight_format: str, kind: str
) -> None:
    x, expected = case(shape, weight_format, kind, dtype)
    layer = CppLinear(random_weight(shape, weight_format, kind, dtype))
    for place, num_rows in enumerate(NUM_ROWS):
        set_num_threads(1 + place % 2)
        chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(num_rows))[:num_rows]
        assert torch.equal(layer(x[chosen]), expected[chosen]), f"{num_rows} rows"
    set_num_threads(2)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("weight_format", INTEGER_FORMATS)
@pytest.mark.parametrize("element", ["zeros", "highest", "rising", "alternating"])
@pytest.mark.parametrize("width", [512, 4096, 66_000])
def test_largest_products_do_not_saturate(width: int, element: str, weight_format: str) -> None:
    """Products of the same sign, as large as they can be, over the longest group that there may be."""
    top = 255 if weight_format == "int8" else 15
    row = {
        "zeros": torch.zeros(width),
        "highest": torch.full((width,), top),
        "rising": torch.arange(width) % (top + 1),
        "alternating": torch.arange(width) % 2 * top,
    }[element]
    data = row.to(torch.uint8).expand(18, width)
    x = torch.stack([torch.ones(width), -torch.ones(width), torch.arange(width) % 2 * 2.0 - 1, torch.ones(width)])
    x[3, width // 2 :] = -1
    for zero in (0, (top + 1) // 2, top):
        weight = LinearWeight(weight_format, (data,), 18, width, torch.full((18, 1), 0.5), zero, width,
                              activation_group_size=width, dtype=torch.float32)  # fmt: skip
        assert torch.equal(CppLinear(weight)(x), expected_of(x, weight)), f"zero point {zero}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_format", INTEGER_FORMATS)
def test_value_that_is_not_finite_makes_its_row_nan_and_no_other(weight_format: str, dtype: torch.dtype) -> None:
    weight = random_weight((33, 200, 64, 64), weight_format, "zero points", dtype)
    x = random_rows(8, 200, dtype)
    x[1, 199], x[3, 0], x[6, 70] = float("nan"), float("inf"), float("-inf")
    found, broken = CppLinear(weight)(x), [1, 3, 6]
    assert found[broken].isnan().all()
    x[broken] = 0
    assert torch.equal(found[[0, 2, 4, 5, 7]], expected_of(x, weight)[[0, 2, 4, 5, 7]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_smallest_and_largest_activations(dtype: torch.dtype) -> None:
    x = torch.tensor([[9e-31] * 40, [1.1e-30] * 40, [3e38, *[1e30] * 39], [0.0] * 39 + [-1e-45]]).to(dtype)
    weight = random_weight((5, 40, 32, 32), "int8", "zero point", dtype)
    assert torch.equal(CppLinear(weight)(x), expected_of(x, weight))


@covering(
    {
        "weight_format": INTEGER_FORMATS,
        "activation": get_args(Activation),
        "dtype": [torch.float32, torch.bfloat16, torch.float16],
        "num_rows": [1, 23],
    },
)
def test_sums_are_finished_as_those_of_a_dense_layer(
    weight_format: str, activation: Activation, dtype: torch.dtype, num_rows: int
) -> None:
    """Addend, bias, rounding and activation: a dense layer of zeros with the sums as its addend gives the same bits."""
    weight = random_weight((86, 130, 64, 64), weight_format, "zero point", dtype)
    x, generator = torch.randn(num_rows, 130, generator=torch.Generator().manual_seed(2)).to(dtype), torch.Generator()
    bias = torch.randn(86, generator=generator).to(dtype)
    wide = torch.randn(num_rows, 90, generator=generator)
    zeros = CppLinear(LinearWeight.dense(torch.zeros(86, 130, dtype=dtype)), bias, activation=activation)
    layer = CppLinear(weight, bias, activation=activation)
    assert torch.equal(layer(x), zeros(x, a8_sums(x, weight)))
    assert torch.equal(layer(x, wide[:, :86]), zeros(x, a8_sums(x, weight) + wide[:, :86]))
    assert layer(x).dtype == dtype
    assert CppLinear(weight)(x).dtype == dtype


@pytest.mark.parametrize("num_rows", [1, 23])
@pytest.mark.parametrize("weight_format", INTEGER_FORMATS)
def test_addends_are_added_where_sums_are_only_rounded_besides(weight_format: str, num_rows: int) -> None:
    """Full strips without a bias and an activation are stored by a shorter way, which has no addends."""
    weight = random_weight((96, 130, 64, 64), weight_format, "zero point", torch.bfloat16)
    x, addend = random_rows(num_rows, 130, torch.bfloat16), torch.randn(num_rows, 96)
    expected = (a8_sums(x, weight, exact_product) + addend).bfloat16()
    assert torch.equal(CppLinear(weight)(x, addend), expected)


@pytest.mark.parametrize("weight_format", INTEGER_FORMATS)
def test_logits_of_a_bfloat16_model_come_as_float32_sums(weight_format: str) -> None:
    weight = random_weight((300, 257, 64, 64), weight_format, "zero point", torch.bfloat16)
    x = random_rows(9, 257, torch.bfloat16)
    logits = CppLinear(weight, dtype=torch.float32)(x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, a8_sums(x, weight, exact_product))


@covering(
    {
        "counts": [(96,), (48, 16, 32), (33, 33), (32, 15, 1), (7, 9, 13, 3), (0, 32)],
        "activation": ["none", "silu_and_mul"],
        "weight_format": INTEGER_FORMATS,
        "kind": KINDS,
    },
)
def test_packing_in_parts_gives_the_bytes_of_the_whole(
    counts: tuple[int, ...], activation: Activation, weight_format: str, kind: str
) -> None:
    whole = random_weight((sum(counts), 150, 64, 32), weight_format, kind)
    parts = replace(whole, data=tuple(whole.data[0].split(counts)))
    of_whole, of_parts = (CppLinear(each, activation=activation).packed_weight.packed for each in (whole, parts))
    assert np.array_equal(of_parts, of_whole)


@pytest.mark.parametrize("weight_format", INTEGER_FORMATS)
def test_rows_of_a_weight_are_packed_as_its_strips(weight_format: str) -> None:
    """Ranges of outputs cut at 16, as the ranks of tensor parallelism have them, are ranges of the packed bytes."""
    whole = random_weight((80, 150, 64, 64), weight_format, "zero points")
    scales, zeros = whole.scales, whole.zero_points
    assert isinstance(scales, Tensor)
    assert isinstance(zeros, Tensor)
    packed = []
    for rows in (slice(0, 48), slice(48, 64), slice(64, 80)):
        data = whole.data[0][rows]
        part = replace(whole, data=(data,), out_features=len(data), scales=scales[rows], zero_points=zeros[rows])
        packed.append(CppLinear(part).packed_weight.packed)
    assert np.array_equal(np.concatenate(packed), CppLinear(whole).packed_weight.packed)


@pytest.mark.parametrize("num_threads", [1, 3], indirect=True)
@pytest.mark.parametrize("group_size", [32, 128, WHOLE])
@pytest.mark.parametrize("weight_format", INTEGER_FORMATS)
def test_packing_keeps_every_element(weight_format: str, group_size: int, num_threads: int) -> None:
    """A unit row picks one column of the weight: 127 / 127 of it."""
    weight = random_weight((71, 333, group_size, group_size), weight_format, "zero points")
    x = torch.eye(333)
    assert torch.equal(CppLinear(weight)(x), expected_of(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_of_scattered_inputs_are_put_together(dtype: torch.dtype) -> None:
    weight = random_weight((33, 200, 64, 32), "int4", "zero points", dtype)
    index = (torch.arange(200) // 64)[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    weight = replace(weight, group_index=index.int())
    x = random_rows(7, 200, dtype)
    layer = CppLinear(weight)
    assert torch.equal(layer(x), expected_of(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_format", INTEGER_FORMATS)
def test_rows_may_have_gaps_between_them(weight_format: str, dtype: torch.dtype) -> None:
    weight = random_weight((34, 50, 32, 32), weight_format, "minimums", dtype)
    x = random_rows(10, 50, dtype)
    wide = torch.full((10, 80), float("nan"), dtype=dtype)
    wide[:, 13:63] = x
    assert torch.equal(CppLinear(weight)(wide[:, 13:63]), expected_of(x, weight))


def test_no_rows_give_no_rows() -> None:
    assert CppLinear(random_weight((5, 40, 32, 32), "int8", "zero point"))(torch.ones(0, 40)).shape == (0, 5)


def test_layers_in_one_memory_take_the_bytes_of_their_elements_and_scales() -> None:
    memory = PackedMemory()
    weights = [random_weight((64, 512, 128, 128), weight_format, "zero point") for weight_format in INTEGER_FORMATS]
    layers = [CppLinear(weight, memory=memory) for weight in weights]
    assert [layer.num_bytes for layer in layers] == [64 * (512 + 4 * 4), 64 * (256 + 4 * 4)]
    x = random_rows(3, 512, torch.float32)
    for layer, weight in zip(layers, weights, strict=True):
        assert torch.equal(layer(x), expected_of(x, weight))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plan_knows_the_bytes_of_a_packed_weight(shape: tuple[int, int, int, int], kind: str) -> None:
    out, width, group_size, activation_group_size = shape
    for weight_format in INTEGER_FORMATS:
        correction = {"zero point": "constant", "zero points": "zeros"}.get(kind, kind)
        size = WHOLE_ROW if group_size == WHOLE else group_size
        scheme = WeightScheme(weight_format, size, activation_group_size, correction)
        layer = CppLinear(random_weight(shape, weight_format, kind))
        assert layer.num_bytes == packed_bytes(scheme, out, width, "float32", CPU_PACKING)


def test_rounded_weight_is_close_to_what_it_was() -> None:
    dense = torch.randn(48, 256, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    weight = round_to_nearest(dense, "int8", 128, activation_group_size=128)
    torch.testing.assert_close(CppLinear(weight)(x), x @ dense.T, rtol=0.05, atol=0.5)
