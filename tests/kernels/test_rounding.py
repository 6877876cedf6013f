"""Rounding of weights while they are loaded: the elements and scales of the reference, to the bit."""

import numpy as np
import pytest
import torch

from quire.core.arrays import BFLOAT16, FLOAT16, FLOAT32, DType, dtype_name
from quire.kernels import conversion, quantized
from quire.kernels.conversion import converted, round_to_nearest
from quire.kernels.torch_arrays import to_tensor, weight_of_tensors

SIZES = [(40, 896, 128), (40, 896, 32), (7, 1100, 1100), (300, 200, 96), (3, 17_000, 17_000)]


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=dtype_name)
@pytest.mark.parametrize("weight_format", ["int8", "int4"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_weight_is_that_of_the_reference(
    sizes: tuple[int, int, int], weight_format: str, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows, width, group_size = sizes
    values = np.random.default_rng(width).normal(size=(num_rows, width)).astype(np.float32)
    values[0], values[1], values[2, :16] = 0, 1e-31, 0
    weight = converted(values, dtype)
    monkeypatch.setattr(conversion, "ELEMENTS_AT_ONCE", 100 * width)  # a part at a time
    found = weight_of_tensors(round_to_nearest(weight, weight_format, group_size, activation_group_size=16))
    expected = quantized.round_to_nearest(to_tensor(weight), weight_format, group_size, activation_group_size=16)
    assert torch.equal(found.data[0], expected.data[0])
    assert found.scales is not None
    assert torch.equal(found.scales, expected.scales)
    for name in ("format", "out_features", "in_features", "zero_points", "group_size", "activation_group_size"):
        assert getattr(found, name) == getattr(expected, name)


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_transposed_weight_is_rounded_by_its_rows(weight_format: str) -> None:
    values = np.random.default_rng(0).normal(size=(64, 48)).astype(np.float32)
    found, expected = (round_to_nearest(each, weight_format, 32) for each in (values.T, values.T.copy()))
    np.testing.assert_array_equal(found.data[0], expected.data[0])
    np.testing.assert_array_equal(found.scales, expected.scales)
