"""Linear layers in C++ against a plain product, and to the bit against themselves among other rows and threads."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels.cpp.cpp_packing import PackedMemory
from quire.kernels.layers import Activation
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.reference.linear import reference
from support.cpp_kernels import CppHead, CppLinear
from support.pairwise import covering
from support.threads import set_num_threads

dense = LinearWeight.dense

# Odd sizes, exact tiles, and shapes of real layers; inputs that fill neither a pair nor a tile, or are taken in parts.
SHAPES = [(1, 1), (7, 13), (16, 32), (17, 33), (172, 64), (64, 172), (300, 257), (512, 64), (40, 2100), (1152, 896)]
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
NUM_ROWS = (1, 2, 3, 8, 15, 16, 17, 31, 33, 48, 64, 65, 80, 97, 150)  # one tile, up to four, and the blocked loop


def revealing(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and a weight whose products cancel but for rounding, so that any change of order shows."""
    generator = torch.Generator().manual_seed(0)
    half = in_features // 2
    rows = torch.randn(num_rows, in_features, generator=generator).to(dtype)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    rows[:, half : 2 * half], weight[:, half : 2 * half] = -rows[:, :half].flip(1), weight[:, :half].flip(1)
    return rows, weight


def random_case(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    return torch.randn(70, shape[1], generator=generator).to(dtype), weight.to(dtype), torch.randn(shape[0]).to(dtype)


@covering({"shape": SHAPES, "has_bias": [False, True], ("dtype", "tol"): DTYPES})
def test_layer_matches_a_plain_product(
    shape: tuple[int, int], has_bias: bool, dtype: torch.dtype, tol: float
) -> None:
    x, weight, bias = random_case(shape, dtype)
    expected = F.linear(x.float(), weight.float(), bias.float() if has_bias else None)
    result = CppLinear(dense(weight), bias if has_bias else None)(x)
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), expected, rtol=tol, atol=tol)


@covering(
    {
        "shape": SHAPES[-6:],
        "dtype": [torch.float32, torch.bfloat16],
        "num_threads": [1, 2, 3],
    },
    indirect=["num_threads"],
)
def test_rows_have_the_same_bits_among_any_others(shape: tuple[int, int], dtype: torch.dtype, num_threads: int) -> None:
    rows, weight = revealing(max(NUM_ROWS), *shape, dtype)
    layer = CppLinear(dense(weight), dtype=torch.float32)
    set_num_threads(1)
    alone = torch.cat([layer(row[None]) for row in rows])
    set_num_threads(num_threads)
    for num_rows in NUM_ROWS:
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(num_rows))[:num_rows]
        assert torch.equal(layer(rows[chosen]), alone[chosen]), f"{num_rows} rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_may_have_gaps_between_them(dtype: torch.dtype) -> None:
    x, weight, _ = random_case((40, 50), dtype)
    wide = torch.full((70, 80), float("nan"), dtype=dtype)
    wide[:, 13:63] = x
    layer = CppLinear(dense(weight))
    assert torch.equal(layer(wide[:, 13:63]), layer(x))


def test_transposed_input_and_weight_are_taken_as_they_mean() -> None:
    x, weight, _ = random_case((64, 32), torch.bfloat16)
    assert torch.equal(CppLinear(dense(weight.T.contiguous().T))(x.T.contiguous().T), CppLinear(dense(weight))(x))


def test_logits_of_a_bfloat16_layer_come_as_float32_sums() -> None:
    x, weight, _ = random_case((300, 257), torch.bfloat16)
    logits = CppLinear(dense(weight), dtype=torch.float32)(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits.bfloat16(), CppLinear(dense(weight))(x)), "rounded once, at the end"


def test_no_rows_give_no_rows() -> None:
    assert CppLinear(dense(torch.ones(5, 3)))(torch.ones(0, 3)).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_never_meets_infinity(dtype: torch.dtype) -> None:
    """Inputs are padded with zeros on both sides: an infinite neighbour in memory must not turn them into NaN."""
    wide = torch.full((3, 64), float("inf"), dtype=dtype)
    wide[:, :33] = 1.0
    layer = CppLinear(dense(torch.ones(17, 33, dtype=dtype)))
    assert torch.equal(layer(wide[:, :33]), torch.full((3, 17), 33.0, dtype=dtype))


@covering(
    {
        "shape": [*SHAPES, (18, 4867), (4867, 18)],
        "dtype": [torch.float32, torch.bfloat16, torch.float16],
        "num_threads": [1, 2, 3],
    },
    indirect=["num_threads"],
)
def test_packing_keeps_every_bit(shape: tuple[int, int], dtype: torch.dtype, num_threads: int) -> None:
    """Row i of the unit matrix picks column i of the weight."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(CppLinear(dense(weight))(torch.eye(shape[1], dtype=dtype)).T, weight)


@covering(
    {
        "counts": [
            (48, 16, 32), (16, 16), (33, 33), (32, 15, 1), (7, 9, 13, 3), (96,), (5, 16, 27), (0, 32), (20, 12, 40, 24),
        ],
        "activation": ["none", "silu_and_mul"],
        "dtype": [torch.float32, torch.bfloat16, torch.float16],
    },
)
def test_parts_give_the_bits_of_the_whole(
    counts: tuple[int, ...], activation: Activation, dtype: torch.dtype
) -> None:
    """Parts that end at a strip and parts that do not; gates and ups that are parts, are halves of one, or mixed."""
    rows, weight, bias = random_case((sum(counts), 37), dtype)
    whole = CppLinear(dense(weight), bias, activation=activation)
    in_parts = CppLinear(dense(weight.split(counts)), bias, activation=activation)
    assert torch.equal(in_parts(rows), whole(rows))
    assert in_parts.num_bytes == whole.num_bytes


def test_weights_in_one_memory_leave_each_other_alone() -> None:
    memory = PackedMemory()
    cases = [random_case(shape, torch.bfloat16) for shape in SHAPES]
    layers = [CppLinear(dense(weight), memory=memory) for _, weight, _ in cases]
    for layer, (rows, weight, _) in zip(layers, cases, strict=True):
        assert torch.equal(layer(rows), CppLinear(dense(weight))(rows))


def whole_numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Small ones, whose products and sums are exact in float32."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@covering(
    {
        "shape": [(14, 13), (34, 33), (172, 64), (300, 257)],
        "activation": get_args(Activation),
        ("dtype", "tol"): DTYPES,
    },
)
def test_addend_is_added_to_the_sums_before_bias_rounding_and_activation(
    shape: tuple[int, int], activation: Activation, dtype: torch.dtype, tol: float
) -> None:
    """The addend takes most of each sum away: were the sums rounded before, the difference would show."""
    weight, bias = whole_numbers(*shape, dtype=dtype, seed=0), whole_numbers(shape[0], dtype=dtype, seed=1)
    layer = CppLinear(dense(weight), bias, activation=activation)
    for num_rows in NUM_ROWS:
        x = whole_numbers(num_rows, shape[1], dtype=dtype, seed=num_rows)
        left = whole_numbers(num_rows, shape[0], dtype=torch.float32, seed=2) / 4
        wide = torch.full((num_rows, shape[0] + 5), float("nan"))
        wide[:, : shape[0]] = left - x.float() @ weight.float().T
        found = layer(x, wide[:, : shape[0]])
        expected = reference(x, dense(weight), bias, activation=activation, addend=wide[:, : shape[0]])
        assert found.dtype == dtype
        if activation in ("none", "relu"):
            assert torch.equal(found, expected), f"{num_rows} rows"
        torch.testing.assert_close(found, expected, rtol=tol, atol=tol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_addend_of_zeros_changes_no_bit(activation: Activation, dtype: torch.dtype) -> None:
    rows, weight, bias = random_case((172, 64), dtype)
    layer = CppLinear(dense(weight), bias, activation=activation)
    assert torch.equal(layer(rows, torch.zeros(len(rows), 172)), layer(rows))


def test_addend_is_taken_by_float32_logits_of_a_bfloat16_layer() -> None:
    x, weight, _ = random_case((300, 257), torch.bfloat16)
    layer = CppLinear(dense(weight), dtype=torch.float32)
    addend = torch.randn(len(x), 300, generator=torch.Generator().manual_seed(3))
    assert torch.equal(layer(x, addend), layer(x) + addend)


def test_addend_of_another_shape_or_dtype_is_refused() -> None:
    x, weight, _ = random_case((34, 33), torch.float32)
    layer = CppLinear(dense(weight), activation="silu_and_mul")
    for addend in (torch.zeros(70, 17), torch.zeros(69, 34), torch.zeros(70, 34).double(), torch.zeros(34, 70).T):
        with pytest.raises(AssertionError, match="an addend"):
            layer(x, addend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tag_of_an_unknown_format_is_refused_by_the_kernel(dtype: torch.dtype) -> None:
    x, weight, _ = random_case((34, 33), dtype)
    layer = CppLinear(dense(weight))
    layer._format = 255, layer._format[1]
    for rows in (x, x[:1]):
        with pytest.raises(ValueError, match="no kernel for weight format 255"):
            layer(rows)


def test_weight_of_an_unknown_format_is_refused_by_name() -> None:
    weight = LinearWeight("q4_K", (torch.zeros(32, 144, dtype=torch.uint8),), 32, 256)
    with pytest.raises(ConfigError, match="do not support weight format q4_K yet; they serve dense"):
        CppLinear(weight)


def test_head_returns_the_rows_of_a_layer_in_one_buffer_that_it_keeps() -> None:
    x, weight, bias = random_case((300, 257), torch.bfloat16)
    head, layer = CppHead(dense(weight), bias), CppLinear(dense(weight), bias, dtype=torch.float32)
    largest = head(x[:40]).data_ptr()
    for num_rows in (1, 40, 17, 0, 80):
        result = head(x[:num_rows])
        assert torch.equal(result, layer(x[:num_rows]))
        assert result.is_contiguous()
        assert num_rows == 0 or result.data_ptr() == largest, "twice the rows of the first call fit"


def test_head_grows_its_buffer_for_more_rows() -> None:
    x, weight, bias = random_case((300, 257), torch.float32)
    head = CppHead(dense(weight), bias)
    head(x[:3])
    assert torch.equal(head(x), CppLinear(dense(weight), bias)(x))
