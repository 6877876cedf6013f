"""Linear layers in C++ against a plain product, and to the bit against themselves among other rows and threads."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.cpp.linear import HUGE_PAGE_BYTES, CppLinear, huge_pages

# Odd sizes, exact tiles, and shapes of real layers; inputs that fill neither a pair nor a tile.
SHAPES = [(1, 1), (7, 13), (16, 32), (17, 33), (172, 64), (64, 172), (300, 257), (512, 64), (1152, 896)]
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


@pytest.mark.parametrize(("dtype", "tol"), DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_matches_a_plain_product(
    shape: tuple[int, int], has_bias: bool, dtype: torch.dtype, tol: float
) -> None:
    x, weight, bias = random_case(shape, dtype)
    expected = F.linear(x.float(), weight.float(), bias.float() if has_bias else None)
    result = CppLinear(weight, bias if has_bias else None)(x)
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), expected, rtol=tol, atol=tol)


@pytest.mark.parametrize("num_threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES[-5:], ids=str)
def test_rows_have_the_same_bits_among_any_others(shape: tuple[int, int], dtype: torch.dtype, num_threads: int) -> None:
    rows, weight = revealing(max(NUM_ROWS), *shape, dtype)
    layer = CppLinear(weight, dtype=torch.float32)
    torch.set_num_threads(1)
    alone = torch.cat([layer(row[None]) for row in rows])
    torch.set_num_threads(num_threads)
    for num_rows in NUM_ROWS:
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(num_rows))[:num_rows]
        assert torch.equal(layer(rows[chosen]), alone[chosen]), f"{num_rows} rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_may_have_gaps_between_them(dtype: torch.dtype) -> None:
    x, weight, _ = random_case((40, 50), dtype)
    wide = torch.full((70, 80), float("nan"), dtype=dtype)
    wide[:, 13:63] = x
    layer = CppLinear(weight)
    assert torch.equal(layer(wide[:, 13:63]), layer(x))


def test_transposed_input_and_weight_are_taken_as_they_mean() -> None:
    x, weight, _ = random_case((64, 32), torch.bfloat16)
    assert torch.equal(CppLinear(weight.T.contiguous().T)(x.T.contiguous().T), CppLinear(weight)(x))


def test_logits_of_a_bfloat16_layer_come_as_float32_sums() -> None:
    x, weight, _ = random_case((300, 257), torch.bfloat16)
    logits = CppLinear(weight, dtype=torch.float32)(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits.bfloat16(), CppLinear(weight)(x)), "rounded once, at the end"


def test_no_rows_give_no_rows() -> None:
    assert CppLinear(torch.ones(5, 3))(torch.ones(0, 3)).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_never_meets_infinity(dtype: torch.dtype) -> None:
    """Inputs are padded with zeros on both sides: an infinite neighbour in memory must not turn them into NaN."""
    wide = torch.full((3, 64), float("inf"), dtype=dtype)
    wide[:, :33] = 1.0
    assert torch.equal(CppLinear(torch.ones(17, 33, dtype=dtype))(wide[:, :33]), torch.full((3, 17), 33.0, dtype=dtype))


def test_large_weights_stand_on_huge_pages() -> None:
    packed = huge_pages(3 * HUGE_PAGE_BYTES // 2, torch.bfloat16)
    assert packed.data_ptr() % HUGE_PAGE_BYTES == 0
    assert packed.numel() == 3 * HUGE_PAGE_BYTES // 2
    packed.fill_(1.0)
    assert huge_pages(10, torch.float32).numel() == 10
