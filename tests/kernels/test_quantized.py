"""Arithmetic of quantized weights, against numbers computed one by one with every step rounded to float32."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels import conversion, quantized
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.quantized import (
    a8_sums,
    exact_product,
    expand,
    in_group_order,
    quantize_activations,
    round_to_nearest,
)
from quire.kernels.reference.linear import make_linear, reference
from support.on_tensors import arrays

F = np.float32


def random_weight(
    shape: tuple[int, int], group_size: int, weight_format: str = "int8", kind: str = "constant",
    **fields: Any,  # noqa: ANN401 (fields of any type)
) -> LinearWeight:
    """A weight of random elements, their full range used; `kind` is that of the correction."""
    (out, width), generator = shape, torch.Generator().manual_seed(0)
    top = 255 if weight_format in ("int8", "fp8") else 15
    data = torch.randint(0, top + 1, shape, generator=generator).to(torch.uint8)
    grouped = out, -(-width // group_size)
    scales = torch.rand(grouped, generator=generator) / 100 + 1e-4
    if weight_format == "fp8":
        data = torch.where(data & 0x7F == 0x7F, 0, data)
    elif weight_format == "codebook4":
        fields["codebook"] = torch.randn(16, generator=generator)
    elif kind == "constant":
        fields["zero_points"] = (top + 1) // 2
    elif kind == "zeros":
        fields["zero_points"] = torch.randint(0, top + 1, grouped, generator=generator).to(torch.uint8)
    else:
        fields["minimums"] = torch.randn(grouped, generator=generator) / 10
    fields = {"dtype": torch.float32} | fields
    return LinearWeight(weight_format, (data,), out, width, scales, group_size=group_size, **fields)


def one_by_one(x: Tensor, weight: LinearWeight) -> Tensor:
    """The sums of int8 activations, in NumPy scalars: Python's integers, and float32 rounded at every step."""
    rows, size = x.float().numpy(), min(weight.activation_group_size, weight.in_features)
    data, scales = torch.cat(weight.data).numpy(), weight.scales.numpy()
    out = np.zeros((len(rows), weight.out_features), F)
    for i, row in enumerate(rows):
        for start in range(0, weight.in_features, size):
            part, g = row[start : start + size], start // weight.group_size
            absmax = max(abs(value) for value in part)
            xs, factor = (F(0), F(0)) if absmax < F(1e-30) else (absmax / F(127), F(127) / absmax)
            q = [int(np.rint(value * factor)) for value in part]
            for o in range(weight.out_features):
                dot = sum(a * int(b) for a, b in zip(q, data[o, start : start + size], strict=True))
                if weight.minimums is not None:
                    out[i, o] = out[i, o] + F(dot) * (xs * scales[o, g])
                    out[i, o] = out[i, o] - F(sum(q)) * (xs * weight.minimums.numpy()[o, g])
                    continue
                zeros = weight.zero_points
                zero = zeros if isinstance(zeros, int) else int(zeros[o, g])
                out[i, o] = out[i, o] + F(dot - zero * sum(q)) * (xs * scales[o, g])
    return torch.from_numpy(out)


@pytest.mark.parametrize("kind", ["constant", "zeros", "minimums"])
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
@pytest.mark.parametrize(
    ("width", "group_size", "activation_group_size"),
    [(64, 32, 32), (96, 64, 64), (71, 32, 16), (100, 1000, 64), (100, 100, 100), (33, 128, 128)],
)
def test_sums_of_int8_activations_are_those_computed_one_by_one(
    width: int, group_size: int, activation_group_size: int, weight_format: str, kind: str
) -> None:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1.0], [1e-3], [1e4]])
    weight = random_weight((5, width), group_size, weight_format, kind, activation_group_size=activation_group_size)
    expected = one_by_one(x, weight)
    assert torch.equal(a8_sums(x, weight), expected)
    assert torch.equal(a8_sums(x, weight, exact_product), expected)
    assert torch.equal(a8_sums(x.bfloat16(), weight), one_by_one(x.bfloat16(), weight))


@pytest.mark.parametrize("width", [512, 66_000])
def test_largest_sums_are_exact(width: int) -> None:
    """Every product is the largest, or its negative: 66,000 of them come close to 2^31."""
    x = torch.ones(2, width)
    x[1, width // 2 :] = -1
    data = torch.full((3, width), 255, dtype=torch.uint8)
    data[1, : width // 2] = 0
    weight = LinearWeight("int8", (data,), 3, width, torch.full((3, 1), 0.5), 0, width,
                          activation_group_size=width, dtype=torch.float32)  # fmt: skip
    factor = F(1) / F(127) * F(0.5)
    expected = [[F(127 * 255 * n) * factor for n in row] for row in ((width, width // 2, width), (0, -width // 2, 0))]
    assert torch.equal(a8_sums(x, weight), torch.tensor(np.array(expected)))
    assert torch.equal(a8_sums(x, weight, exact_product), a8_sums(x, weight))


def test_activations_are_rounded_to_even_in_groups_of_their_own_scale() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 254.0, 1.0, 3.0, -5.0, 0.25, 0.0]])
    elements, scales = quantize_activations(x, 4)
    assert elements.dtype == torch.int8
    assert elements.tolist() == [[127, 0, 2, -2, 127, 0, 2, -2, 127, 0]]
    assert torch.equal(scales, torch.tensor([[127.0, 254.0, 0.25]]) / torch.tensor(127.0))


def test_group_of_zeros_has_scale_zero_and_one_that_is_not_finite_has_none() -> None:
    x = torch.tensor([[0.0, -0.0, 1e-31, 9e-31, 1e-29, 0.0, 1.0, float("inf"), float("nan"), 2.0]])
    elements, scales = quantize_activations(x, 2)
    assert elements.tolist() == [[0, 0, 0, 0, 127, 0, 0, 0, 0, 0]]
    assert scales[0, :2].tolist() == [0, 0]
    assert scales[0, 2] > 0
    assert scales[0, 3:].isnan().all()
    weight = random_weight((4, 10), 10, activation_group_size=2)
    assert a8_sums(x, weight).isnan().all()
    assert a8_sums(x[:, :6], random_weight((4, 6), 6, activation_group_size=2)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("weight_format", "kind"),
    [("int8", "constant"), ("int4", "zeros"), ("int8", "minimums"), ("fp8", "none"), ("codebook4", "none")],
)
def test_weight_expands_to_the_values_of_its_format(weight_format: str, kind: str, dtype: torch.dtype) -> None:
    weight = random_weight((6, 70), 32, weight_format, kind, dtype=dtype)
    found, scales = expand(weight), weight.scales.numpy()
    fp8 = weight.data[0].view(torch.float8_e4m3fn).float().numpy()
    for o in range(6):
        for i in range(70):
            g, q = i // 32, int(weight.data[0][o, i])
            if weight_format == "fp8":
                value = scales[o, g] * fp8[o, i]
            elif weight_format == "codebook4":
                value = scales[o, g] * weight.codebook.numpy()[q]
            elif kind == "minimums":
                value = scales[o, g] * F(q) - weight.minimums.numpy()[o, g]
            else:
                zeros = weight.zero_points
                value = scales[o, g] * F(q - (zeros if isinstance(zeros, int) else int(zeros[o, g])))
            expected = torch.tensor(value)
            assert found[o, i] == (expected.bfloat16() if dtype == torch.bfloat16 else expected), (o, i)
    assert found.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


@pytest.mark.parametrize(
    ("weight_format", "kind"), [("int8", "constant"), ("int4", "zeros"), ("int8", "minimums"), ("codebook4", "none")]
)
def test_rows_expanded_a_few_at_a_time_are_those_of_all(
    weight_format: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random_weight((7, 70), 32, weight_format, kind, dtype=torch.bfloat16)
    whole = expand(weight)
    for num_elements in (1, 70, 150):
        monkeypatch.setattr(quantized, "ELEMENTS_AT_ONCE", num_elements)
        assert torch.equal(expand(weight), whole)


def test_groups_in_any_order_of_inputs_are_those_of_permuted_inputs() -> None:
    weight = random_weight((5, 80), 32, "int4", "zeros", activation_group_size=16)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(2))
    shuffled, index = torch.empty_like(weight.data[0]), torch.empty(80, dtype=torch.int32)
    shuffled[:, order], index[order] = weight.data[0], (torch.arange(80) // 32).int()
    scattered = replace(weight, data=(shuffled,), group_index=index)
    x, in_order = torch.randn(4, 80, generator=torch.Generator().manual_seed(3)), torch.empty(4, 80)
    in_order[:, order] = x
    assert torch.equal(expand(scattered)[:, order], expand(weight))
    sorted_weight, found = in_group_order(scattered)
    assert torch.equal(sorted_weight.data[0], scattered.data[0][:, found])
    regrouped = replace(sorted_weight, group_index=None)
    assert torch.equal(a8_sums(in_order, scattered), a8_sums(in_order[:, found], regrouped))
    assert torch.equal(make_linear(scattered)(in_order), a8_sums(in_order, scattered))


@pytest.mark.parametrize("weight_format", ["int8", "int4", "fp8", "codebook4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_without_int8_activations_has_the_bits_of_its_dense_twin(weight_format: str, dtype: torch.dtype) -> None:
    weight = random_weight((48, 80), 32, weight_format, dtype=dtype)
    bias, x = torch.randn(48).to(dtype), torch.randn(70, 80).to(dtype)
    twin = make_linear(LinearWeight.dense(expand(weight)), bias, activation="relu")
    found = make_linear(weight, bias, activation="relu")(x)
    assert found.dtype == dtype
    assert torch.equal(found, twin(x))
    head = make_linear(weight, dtype=torch.float32)(x)
    assert torch.equal(head, make_linear(LinearWeight.dense(expand(weight)), dtype=torch.float32)(x))
    torch.testing.assert_close(found, reference(x, weight, bias, activation="relu"), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layer_with_int8_activations_has_the_references_bits_at_any_number_of_rows(dtype: torch.dtype) -> None:
    weight = random_weight((48, 80), 40, "int4", "zeros", activation_group_size=40, dtype=dtype)
    weight = replace(weight, data=weight.data[0].split([16, 25, 7]))
    bias, x = torch.randn(48).to(dtype), torch.randn(70, 80).to(dtype)
    layer = make_linear(weight, bias, activation="silu_and_mul")
    expected = reference(x, weight, bias, activation="silu_and_mul")
    assert expected.dtype == dtype
    for num_rows in (0, 1, 2, 31, 70):
        assert torch.equal(layer(x[:num_rows]), expected[:num_rows])
    assert layer.num_bytes == 48 * 80 + 48 * 2 * 5


@pytest.mark.parametrize("group_size", [16, 40, 1000])
@pytest.mark.parametrize(("weight_format", "zero"), [("int8", 128), ("int4", 8)])
def test_weight_is_rounded_to_the_nearest_multiple_of_its_groups_scale(
    weight_format: str, zero: int, group_size: int
) -> None:
    weight = torch.randn(37, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3], weight[4, :40] = 0, 1e-33
    found = round_to_nearest(weight, weight_format, group_size)
    assert (found.out_features, found.in_features, found.dtype) == (37, 100, torch.bfloat16)
    values = expand(replace(found, dtype=torch.float32))
    assert not values[3].any()
    squared = torch.zeros(2)  # errors: found, and with scales of absmax / 7
    for start in range(0, 100, min(group_size, 100)):
        part, scale = weight[:, start : start + group_size].float(), found.scales[:, start // group_size, None]
        elements = found.data[0][:, start : start + group_size]
        is_inside = (elements > 0) & (elements < 2 * zero - 1)
        assert is_inside.float().mean() > 0.5, "else nothing is compared"
        error = (values[:, start : start + group_size] - part).abs()
        assert torch.all(error[is_inside] <= (scale.abs() * 0.5001 + 1e-30).expand_as(error)[is_inside])
        largest = part.abs().amax(dim=1)
        even = 2 * largest / (2 * zero - 2)  # the step of a scale that reaches as far on both sides
        evenly = (part / even[:, None].clamp(min=1e-30)).round() * even[:, None]
        squared += torch.stack([error.square().sum(), (evenly - part).square().sum()])
        if weight_format == "int8":
            torch.testing.assert_close(scale[:3, 0], largest[:3] / 127)
            assert torch.all(error <= scale * 0.5001 + 1e-30)
    assert weight_format == "int8" or squared[0] < 0.8 * squared[1]


def test_int4_clips_the_extreme_of_a_group_where_that_has_the_smaller_error() -> None:
    level = torch.tensor([[-8.0, *[float(n) for n in range(-7, 8)]]])
    exact = round_to_nearest(level, "int4", 16)
    assert exact.scales.item() == 1
    assert torch.equal(expand(exact), level)
    mirrored = round_to_nearest(-level, "int4", 16)
    assert mirrored.scales.item() == -1
    assert torch.equal(expand(mirrored), -level)
    finer = torch.tensor([[-8.0, *[0.9 * n for n in range(-7, 8)]]])
    assert round_to_nearest(finer, "int4", 16).scales.item() == pytest.approx(0.9)


def test_weight_that_is_rounded_in_pieces_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 100)
    whole = round_to_nearest(weight, "int4", 32)
    monkeypatch.setattr("quire.kernels.quantized.ELEMENTS_AT_ONCE", 500)
    found = round_to_nearest(weight, "int4", 32)
    assert torch.equal(found.data[0], whole.data[0])
    assert torch.equal(found.scales, whole.scales)
    transposed = round_to_nearest(weight.T.contiguous().T, "int4", 32)
    assert torch.equal(transposed.data[0], whole.data[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": torch.ones(8, 2)}, "float32"),
        ({"scales": torch.ones(8, 3).double()}, "float32"),
        ({"zero_points": torch.zeros(8, 2, dtype=torch.uint8)}, "zero points"),
        ({"zero_points": None}, "zero points or minimums"),
        ({"minimums": torch.ones(8, 3)}, "zero points or minimums"),
        ({"zero_points": 256}, "zero point 256"),
        ({"codebook": torch.ones(16)}, "codebook"),
        ({"group_size": 0}, "group size"),
        ({"group_index": torch.zeros(8, dtype=torch.int32)}, "group index"),
        ({"activation_group_size": 20}, "groups of 20 in groups of 32"),
        ({"dtype": None}, "dtype"),
        ({"data": (torch.zeros(8, 40, dtype=torch.uint8),)}, "a part"),
        ({"data": (torch.zeros(7, 80, dtype=torch.uint8),)}, "other than 8 outputs"),
        ({"data": (torch.zeros(8, 80, dtype=torch.int8),)}, "elements of torch.int8"),
        ({"format": "fp8", "zero_points": None, "activation_group_size": 32}, "int8 activations with fp8"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_one_another_are_refused(changes: dict[str, Any], message: str) -> None:
    weight = random_weight((8, 80), 32)
    with pytest.raises(AssertionError, match=message):
        replace(weight, **changes)


def test_int8_activations_need_sums_below_32_bits() -> None:
    with pytest.raises(AssertionError, match="activation groups of 66001"):
        random_weight((1, 66_001), 66_001, activation_group_size=66_001)


def test_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="weight format q4_K is not supported yet"):
        make_linear(LinearWeight("q4_K", (torch.zeros(32, 144, dtype=torch.uint8),), 32, 256))


@pytest.mark.parametrize(
    ("weight_format", "kind"),
    [("int8", "constant"), ("int4", "zeros"), ("int4", "minimums"), ("fp8", "constant"), ("codebook4", "constant")],
)
@pytest.mark.parametrize("group_size", [16, 40])
def test_arrays_are_expanded_to_the_values_of_tensors(weight_format: str, kind: str, group_size: int) -> None:
    weight = random_weight((24, 40), group_size, weight_format, kind, dtype=torch.float32)
    found = conversion.expand(arrays(weight))
    assert torch.equal(torch.from_numpy(found), expand(weight))
