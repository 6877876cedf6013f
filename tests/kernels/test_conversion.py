"""Conversion of values: every number of 16 and 8 bits, and floats between them, to the bits of torch."""

import numpy as np
import pytest
import torch

from quire.core.arrays import BFLOAT16, FLOAT8_E4M3, FLOAT16, FLOAT32, FLOAT64, Array, DType, bits, dtype_name
from quire.kernels.conversion import convert, converted
from quire.kernels.torch_arrays import to_array, to_tensor, torch_dtype

NARROW = [BFLOAT16, FLOAT16, FLOAT8_E4M3]


def all_numbers(dtype: DType) -> Array:
    size = 8 * dtype.itemsize
    return np.arange(1 << size, dtype=f"u{dtype.itemsize}").view(dtype)


def floats_beside(dtype: DType) -> Array:
    """Return all numbers of a dtype as float32, the middles between neighbours, and the floats around these."""
    numbers = np.sort(converted(all_numbers(dtype), FLOAT32))
    numbers = numbers[np.isfinite(numbers)]
    middles = ((numbers[1:].astype(np.float64) + numbers[:-1]) / 2).astype(np.float32)
    found = np.concatenate([numbers, middles])
    beside = [np.nextafter(found, np.float32(limit)) for limit in (-np.inf, np.inf)]
    extremes = np.array([np.inf, -np.inf, np.nan, 3.4e38, 465, 480, 65519.9, 65520, 65536, 1e-45, 1e-8], np.float32)
    return np.concatenate([found, *beside, extremes, -extremes])


def assert_same(found: Array, expected: torch.Tensor) -> None:
    """Assert equal bits, but for those that tell one NaN from another."""
    wanted = to_array(expected)
    assert found.dtype == wanted.dtype
    is_nan = expected.isnan().numpy()
    np.testing.assert_array_equal(to_tensor(found).isnan().numpy(), is_nan)
    np.testing.assert_array_equal(bits(found)[~is_nan], bits(wanted)[~is_nan])


@pytest.mark.parametrize("dtype", NARROW, ids=dtype_name)
def test_every_narrow_number_as_float32(dtype: DType) -> None:
    numbers = all_numbers(dtype)
    assert_same(converted(numbers, FLOAT32), to_tensor(numbers).float())


@pytest.mark.parametrize("dtype", NARROW, ids=dtype_name)
def test_floats_are_rounded_as_by_torch(dtype: DType) -> None:
    floats = floats_beside(dtype)
    assert_same(converted(floats, dtype), to_tensor(floats).to(torch_dtype(dtype)))


@pytest.mark.parametrize("dtype", NARROW[:2], ids=dtype_name)
@pytest.mark.parametrize("stored", [FLOAT64, BFLOAT16, FLOAT16], ids=dtype_name)
def test_stored_floats_go_by_way_of_float32(dtype: DType, stored: DType) -> None:
    floats = np.random.default_rng(0).normal(0, 100, 1 << 12).astype(np.float64)
    values = floats if stored == FLOAT64 else converted(floats, stored)
    if stored != dtype:
        assert_same(converted(values, dtype), to_tensor(values).float().to(torch_dtype(dtype)))


def test_large_transposed_and_scattered_arrays() -> None:
    values = np.random.default_rng(1).normal(size=(1024, 700)).astype(np.float32)
    expected = to_tensor(values).bfloat16()
    assert_same(converted(values, BFLOAT16), expected)
    assert_same(converted(values.T, BFLOAT16), expected.T)
    assert_same(converted(values[::3, 1::2], BFLOAT16), expected[::3, 1::2])
    assert_same(converted(values[5, 5, None].reshape(()), BFLOAT16), expected[5, 5])
    assert converted(values, FLOAT32) is values
    out = np.empty(values.shape, BFLOAT16)
    convert(values, out)
    assert_same(out, expected)


def test_arrays_and_tensors_share_memory() -> None:
    for dtype in (*NARROW, FLOAT32, np.dtype(np.int32)):
        array = np.zeros((3, 4), dtype)
        tensor = to_tensor(array.T)
        bits(array)[1, 2] = 1
        assert tensor.shape == (4, 3)
        np.testing.assert_array_equal(bits(to_array(tensor)), bits(array.T))
        assert (tensor.dtype, to_array(tensor).dtype) == (torch_dtype(dtype), dtype)
