"""Linear layers of quantized weights without int8 activations, to the bit against layers of the dense ones."""

from dataclasses import replace
from itertools import cycle
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.cpp.cpp_packing import PackedMemory
from quire.kernels.layers import Activation
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.quantized import expand
from quire.model.quantization import WHOLE_ROW, WeightScheme
from quire_lab.sim.footprint import CPU_PACKING, packed_bytes
from support.cpp_kernels import CppLinear
from support.pairwise import covering

WHOLE = 1 << 20  # a group longer than any row
NUM_ROWS = (1, 2, 3, 5, 6, 15, 17, 33, 64, 65, 97, 200)
DTYPES = (torch.bfloat16, torch.float32)

# A format, and what is taken off its elements.
KINDS = [
    *((each, taken) for each in ("int8", "int4") for taken in ("zero point", "zero points", "minimums")),
    ("fp8", ""),
    ("codebook4", ""),
]

# Outputs, inputs, inputs of a group: odd widths, groups of odd and of even numbers of inputs, a short last group.
SHAPES = [
    (1, 1, 16),
    (7, 13, 16),
    (17, 33, WHOLE),
    (33, 96, 32),
    (48, 257, 64),
    (50, 131, 5),
    (16, 300, 1),
    (40, 896, 128),
    (64, 172, WHOLE),
    (36, 2101, 48),
]

NF4 = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
       0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]  # fmt: skip
MXFP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def random_weight(
    shape: tuple[int, int, int], kind: tuple[str, str], dtype: torch.dtype, *, seed: int = 0
) -> LinearWeight:
    """A weight of all elements but NaN, with scales of few and of many bits: halves between two bfloat16 occur."""
    (out, width, group_size), (weight_format, taken) = shape, kind
    generator = torch.Generator().manual_seed(seed)
    top = 16 if weight_format in ("int4", "codebook4") else 256
    data = torch.randint(top, (out, width), generator=generator).to(torch.uint8)
    data[(data & 0x7F) == 0x7F] -= int(weight_format == "fp8")
    grouped = out, -(-width // group_size)
    scales = torch.rand(grouped, generator=generator) / 100 + 1e-4
    scales[::2] = scales[::2].bfloat16().float()
    zeros = torch.randint(top, grouped, generator=generator).to(torch.uint8)
    return LinearWeight(
        weight_format,
        (data,),
        out,
        width,
        scales,
        {"zero point": top // 2, "zero points": zeros}.get(taken),
        group_size,
        minimums=torch.randn(grouped, generator=generator) / 10 if taken == "minimums" else None,
        codebook=torch.tensor(NF4) if weight_format == "codebook4" else None,
        dtype=dtype,
    )


def twin(weight: LinearWeight) -> LinearWeight:
    """The dense weight that a quantized one stands for."""
    return LinearWeight.dense(expand(weight))


def rows_of(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal to the bit; any NaN is one."""
    assert found.dtype == expected.dtype
    as_bits = {2: torch.int16, 4: torch.int32}[found.element_size()]
    both_nan = found.isnan() & expected.isnan()
    return bool((both_nan | (found.view(as_bits) == expected.view(as_bits))).all())


@covering(
    {
        ("shape", "dtype"): [*zip(SHAPES, cycle(DTYPES), strict=False)],
        "kind": KINDS,
        "num_threads": [1, 2],
    },
    indirect=["num_threads"],
)
def test_layer_has_the_bits_of_the_dense_one_for_any_number_of_rows(
    shape: tuple[int, int, int], dtype: torch.dtype, kind: tuple[str, str], num_threads: int
) -> None:
    weight, x = random_weight(shape, kind, dtype), rows_of(max(NUM_ROWS), shape[1], dtype)
    layer, dense = CppLinear(weight, dtype=torch.float32), CppLinear(twin(weight), dtype=torch.float32)
    expected = dense(x)
    for num_rows in NUM_ROWS:
        assert same_bits(layer(x[:num_rows]), expected[:num_rows]), f"{num_rows} rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_every_element_is_expanded_to_its_value(kind: tuple[str, str], dtype: torch.dtype) -> None:
    """A unit row picks one column of the weight."""
    for shape in ((71, 333, 32), (31, 64, 16)):
        weight = random_weight(shape, kind, dtype)
        assert same_bits(CppLinear(weight)(torch.eye(shape[1], dtype=dtype)).T, 0 + expand(weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 2**-9, 0.0237, 1e38])
def test_all_bytes_of_fp8_are_decoded(scale: float, dtype: torch.dtype) -> None:
    data = torch.arange(256, dtype=torch.uint8).view(1, 256).expand(3, 256)
    weight = LinearWeight("fp8", (data,), 3, 256, torch.full((3, 1), scale), None, 256, dtype=dtype)
    for num_rows in (1, 40):
        for first in (0, 128):  # the last one is NaN, and there may be infinity where the scale is large
            x = torch.zeros(num_rows, 256, dtype=dtype)
            x[:, first + 1 : first + 9], x[:, first + 90] = 1, -2
            assert same_bits(CppLinear(weight)(x), CppLinear(twin(weight))(x))
    memory = PackedMemory()
    columns = (replace(weight, data=(data[:, i : i + 1],), in_features=1, group_size=1) for i in range(256))
    values = torch.cat([CppLinear(each, memory=memory)(torch.ones(1, 1, dtype=dtype)) for each in columns])
    assert same_bits(values, 0 + expand(weight).T)
    assert values[[0x7F, 0xFF]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codebook", [NF4, MXFP4, [*range(-8, 7), float("nan")]], ids=["NF4", "MXFP4", "with NaN"])
def test_codebook_is_looked_up(codebook: list[float], dtype: torch.dtype) -> None:
    weight = replace(random_weight((18, 48, 32), ("codebook4", ""), dtype), codebook=torch.tensor(codebook))
    memory = PackedMemory()
    for column in range(48):
        part = replace(weight, data=(weight.data[0][:, column, None],), in_features=1, group_size=1,
                       scales=weight.scales[:, column // 32, None])  # fmt: skip
        found = CppLinear(part, memory=memory)(torch.ones(1, 1, dtype=dtype))[0]
        assert same_bits(found, 0 + expand(weight)[:, column])


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF - (1 << 32), 0x7F800001, 0x7F800000])
@pytest.mark.parametrize("kind", [("int8", "zero points"), ("int4", "minimums"), ("fp8", "")], ids=" ".join)
def test_scale_that_is_not_finite_makes_its_output_nan(kind: tuple[str, str], bits: int) -> None:
    weight = random_weight((20, 40, 16), kind, torch.bfloat16)
    assert weight.scales is not None
    weight.scales[3, 1] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    weight.data[0][3, 16:18] = torch.tensor([0, 15], dtype=torch.uint8)
    x = rows_of(9, 40, torch.bfloat16)
    x[:, 16:32] = torch.tensor([1.0, -1.0] * 8)
    found = CppLinear(weight)(x)
    assert same_bits(found, CppLinear(twin(weight))(x))
    assert not found[:, 3].isfinite().any()
    assert found[:, :3].isfinite().all()


@covering({"activation": get_args(Activation), "dtype": [*DTYPES, torch.float16], "num_rows": [1, 23]})
def test_sums_are_finished_as_those_of_a_dense_layer(activation: Activation, dtype: torch.dtype, num_rows: int) -> None:
    for kind in KINDS:
        weight = random_weight((86, 130, 32), kind, dtype)
        x, generator = rows_of(num_rows, 130, dtype), torch.Generator().manual_seed(2)
        bias = torch.randn(86, generator=generator).to(dtype)
        addend = torch.randn(num_rows, 90, generator=generator)[:, :86]
        dense = LinearWeight.dense(expand(weight))
        layer = CppLinear(weight, bias, dtype=dtype, activation=activation)
        expected = CppLinear(dense, bias, dtype=dtype, activation=activation)
        assert same_bits(layer(x), expected(x))
        assert same_bits(layer(x, addend), expected(x, addend))


@covering(
    {
        "counts": [(96,), (48, 16, 32), (33, 33), (7, 9, 13, 3), (0, 32)],
        "activation": ["none", "silu_and_mul"],
        "kind": KINDS,
    },
)
def test_packing_in_parts_gives_the_bytes_of_the_whole(
    counts: tuple[int, ...], activation: Activation, kind: tuple[str, str]
) -> None:
    whole = random_weight((sum(counts), 51, 16), kind, torch.bfloat16)
    parts = replace(whole, data=tuple(whole.data[0].split(counts)))
    of_whole, of_parts = (CppLinear(each, activation=activation).packed_weight.packed for each in (whole, parts))
    assert np.array_equal(of_parts, of_whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_of_scattered_groups_keep_their_order(dtype: torch.dtype) -> None:
    weight = random_weight((33, 201, 64), ("int4", "zero points"), dtype)
    index = (torch.arange(201) // 64)[torch.randperm(201, generator=torch.Generator().manual_seed(0))]
    weight = replace(weight, group_index=index.int())
    layer, dense = CppLinear(weight), CppLinear(twin(weight))
    for num_rows in (1, 7, 100):
        x = rows_of(num_rows, 201, dtype)
        assert same_bits(layer(x), dense(x))


def test_input_of_no_group_is_refused() -> None:
    weight = random_weight((16, 40, 16), ("int4", "zero points"), torch.bfloat16)
    for outside in (-1, 3):
        with pytest.raises(AssertionError, match="an input of no group"):
            CppLinear(replace(weight, group_index=torch.full((40,), outside, dtype=torch.int32)))


def test_memory_is_that_of_elements_and_scales() -> None:
    sizes = {("int4", "zero point"): 0.5 + 4 / 32, ("int4", "minimums"): 0.5 + 8 / 32, ("codebook4", ""): 0.5 + 4 / 32,
             ("int8", "zero points"): 1 + 8 / 32, ("fp8", ""): 1 + 4 / 32}  # fmt: skip
    memory = PackedMemory()
    weights = {kind: random_weight((64, 512, 32), kind, torch.bfloat16, seed=i) for i, kind in enumerate(sizes)}
    layers = {kind: CppLinear(weight, memory=memory) for kind, weight in weights.items()}
    x = rows_of(3, 512, torch.bfloat16)
    for kind, layer in layers.items():
        assert layer.num_bytes == 64 * 512 * sizes[kind]
        assert same_bits(layer(x), CppLinear(twin(weights[kind]))(x))


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_plan_knows_the_bytes_of_a_packed_weight(kind: tuple[str, str]) -> None:
    memory = PackedMemory()
    for shape in SHAPES:
        out, width, group_size = shape
        correction = {"zero points": "zeros", "minimums": "minimums"}.get(kind[1], "constant")
        scheme = WeightScheme(kind[0], WHOLE_ROW if group_size == WHOLE else group_size, 0, correction)
        layer = CppLinear(random_weight(shape, kind, torch.bfloat16), memory=memory)
        assert layer.num_bytes == packed_bytes(scheme, out, width, "bfloat16", CPU_PACKING)


def test_no_rows_give_no_rows() -> None:
    layer = CppLinear(random_weight((5, 40, 16), ("int8", "zero point"), torch.float32))
    assert layer(torch.ones(0, 40)).shape == (0, 5)
