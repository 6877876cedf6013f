"""Packed linear layers against a plain product, and to the bit against themselves among other rows."""

from collections.abc import Callable, Iterator
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels.layers import Activation
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.reference import linear
from quire.kernels.reference.linear import MAX_ROWS, PackedLinear, equal_row_counts, reference

dense = LinearWeight.dense

SHAPES = [(1, 33), (7, 13), (172, 64), (64, 172), (512, 64), (768, 256), (1152, 896), (896, 4864)]
DTYPES = [(torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]


def revealing(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and a weight whose products cancel but for rounding, so that any change of order shows.

    Unlike the factors of the layer's own probe, a term's negative stands in the other half of the row.
    """
    half = in_features // 2
    rows = torch.randn(num_rows, in_features).to(dtype)
    weight = torch.randn(out_features, in_features).to(dtype)
    rows[:, half : 2 * half], weight[:, half : 2 * half] = -rows[:, :half].flip(1), weight[:, :half].flip(1)
    return rows, weight


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize(("dtype", "tol"), DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_layer_matches_a_plain_product(
    shape: tuple[int, int], has_bias: bool, dtype: torch.dtype, tol: float
) -> None:
    weight, x = torch.randn(shape) / shape[1] ** 0.5, torch.randn(70, shape[1]).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    result = PackedLinear(dense(weight.to(dtype)), bias)(x)
    expected = F.linear(x.float(), weight.to(dtype).float(), None if bias is None else bias.float())
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected.to(dtype), rtol=tol, atol=tol)


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_have_the_same_bits_among_any_others(shape: tuple[int, int], dtype: torch.dtype, num_threads: int) -> None:
    rows, weight = revealing(150, *shape, dtype)
    layer = PackedLinear(dense(weight), torch.zeros(shape[0], dtype=dtype))
    alone = torch.cat([layer(row[None]) for row in rows])
    for num_rows in (1, 2, 3, 5, 8, 11, 16, 17, 31, 40, 63, 64, 65, 100, 129, 150):
        chosen = torch.randperm(len(rows))[:num_rows]
        assert torch.equal(layer(rows[chosen]), alone[chosen]), f"{num_rows} rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_probe_sees_another_order_of_summation(dtype: torch.dtype) -> None:
    """Its factors must tell apart sums that ordinary values, rounded to bfloat16, mostly do not."""
    rows, weight = linear._revealing_factors(64, 256, dtype)
    forward = F.linear(rows.float(), weight.float()).to(dtype)
    backward = F.linear(rows.float().flip(1), weight.float().flip(1)).to(dtype)
    assert (forward != backward).float().mean() > 0.5


def test_row_counts_that_give_other_bits_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that sums differently below 16 rows, as on some machines, leaves 16, 32 and 64."""

    def product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        return lambda rows: F.linear(
            rows.double() if len(rows) < 16 else rows, weight.to(rows.dtype).double() if len(rows) < 16 else weight
        ).to(rows.dtype)

    monkeypatch.setattr(linear, "_product", product)
    assert equal_row_counts.__wrapped__(48, 96, torch.float32, False, torch.get_num_threads()) == (16, 32, 64)


def test_the_library_never_sees_another_row_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    original = linear._product

    def product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        multiply = original(weight, bias)
        return lambda rows: (seen.add(len(rows)), multiply(rows))[1]

    monkeypatch.setattr(linear, "_product", product)
    layer = PackedLinear(dense(torch.randn(24, 40)))
    for num_rows in range(1, 200):
        assert layer(torch.randn(num_rows, 40)).shape == (num_rows, 24)
    assert seen <= set(layer._row_counts)
    assert MAX_ROWS in seen


def test_no_rows_give_no_rows() -> None:
    assert PackedLinear(dense(torch.randn(24, 40)))(torch.randn(0, 40)).shape == (0, 24)


def test_head_of_a_low_precision_model_gives_float32_logits() -> None:
    weight, x = torch.randn(100, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    logits = PackedLinear(dense(weight), dtype=torch.float32)(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_works_without_onednn(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_has_onednn", lambda: False)
    rows, weight = revealing(40, 37, 51, dtype)
    layer = PackedLinear(dense(weight))
    alone = torch.cat([layer(row[None]) for row in rows])
    assert torch.equal(layer(rows), alone)
    assert layer(rows).dtype == dtype


def test_probing_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    equal_row_counts.__wrapped__(8, 8, torch.float32, True, torch.get_num_threads())
    assert torch.equal(torch.get_rng_state(), before)


def test_weight_of_another_format_is_refused_by_name() -> None:
    weight = LinearWeight("q4_K", (torch.zeros(32, 144, dtype=torch.uint8),), 32, 256)
    with pytest.raises(ConfigError, match="weight format q4_K is not supported yet on this back end; it serves dense"):
        PackedLinear(weight)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_layer_matches_the_reference(activation: Activation) -> None:
    weight, bias, x = torch.randn(48, 40) / 8, torch.randn(48), torch.randn(5, 40)
    found = PackedLinear(dense(weight.split([16, 32])), bias, activation=activation)(x)
    torch.testing.assert_close(found, reference(x, dense(weight), bias, activation=activation))


def test_reference_adds_the_addend_before_the_bias_and_the_activation() -> None:
    x, weight, bias = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([0.5])
    assert reference(x, dense(weight), bias, activation="relu", addend=torch.tensor([[-4.0]])).item() == 0
    assert reference(x.bfloat16(), dense(weight * 400), addend=torch.tensor([[-1199.0]])).item() == 1
