"""Arrays of dtypes that NumPy lacks: values are kept wherever they go, and are not computed with."""

import numpy as np
import pytest
import torch

from quire.core.arrays import (
    BFLOAT16,
    FLOAT8_E4M3,
    HUGE_PAGE_BYTES,
    MODEL_DTYPES,
    STORED_DTYPES,
    Array,
    DType,
    address,
    bits,
    concatenated,
    dtype_name,
    empty,
)


@pytest.fixture(params=[BFLOAT16, FLOAT8_E4M3], ids=dtype_name)
def array(request: pytest.FixtureRequest) -> Array:
    dtype: DType = request.param
    return np.arange(24, dtype=f"u{dtype.itemsize}").reshape(4, 6).view(dtype)


def test_values_and_dtype_are_kept(array: Array) -> None:
    numbers, dtype = bits(array), array.dtype
    assert (address(numbers), numbers.dtype.kind) == (address(array), "u")
    copy = empty(array.shape, dtype)
    copy[...] = array
    rows = np.array([3, 0])
    pairs = [
        (copy, numbers), (array[1:3, ::2], numbers[1:3, ::2]), (array.T.copy(), numbers.T),
        (array[rows], numbers[rows]),
        (np.concatenate([array, array]), np.concatenate([numbers, numbers])), (array[2, 3, None], numbers[2, 3, None]),
        (np.stack([array, array], axis=1), np.stack([numbers, numbers], axis=1)), (array.reshape(-1), numbers.ravel()),
        (np.frombuffer(array.tobytes(), dtype), numbers.ravel()),
    ]  # fmt: skip
    for found, expected in pairs:
        assert found.dtype == dtype
        np.testing.assert_array_equal(bits(found), expected)


def test_arithmetic_is_refused(array: Array) -> None:
    for compute in (lambda: array + array, lambda: array * 2.0, lambda: array @ array.T, lambda: np.exp(array)):
        with pytest.raises(TypeError):
            compute()
    with pytest.raises(TypeError):
        np.concatenate([array, bits(array)])


def test_names() -> None:
    assert {name: dtype_name(dtype) for name, dtype in MODEL_DTYPES.items()} == {name: name for name in MODEL_DTYPES}
    assert dtype_name(STORED_DTYPES["F8_E4M3"]) == "float8_e4m3"
    assert [dtype_name(each) for each in (torch.bfloat16, torch.float8_e4m3fn)] == ["bfloat16", "float8_e4m3fn"]
    sizes = [STORED_DTYPES[name].itemsize for name in ("F64", "BF16", "F8_E4M3", "I64", "U8", "BOOL")]
    assert sizes == [8, 2, 1, 8, 1, 1]


def test_memory_of_a_huge_page_begins_at_one_and_is_zeros() -> None:
    array = empty((HUGE_PAGE_BYTES, 3), BFLOAT16)
    assert address(array) % HUGE_PAGE_BYTES == 0
    assert not bits(array).any()
    array[-1, -1] = array[0, 0]
    assert (array.shape, array.dtype, array.flags.writeable) == ((HUGE_PAGE_BYTES, 3), BFLOAT16, True)
    assert address(None) == 0


def test_rows_of_several_arrays_are_in_memory_of_their_own(array: Array) -> None:
    whole = concatenated([array, array[1:, ::-1], array[:0]])
    assert whole.dtype == array.dtype
    np.testing.assert_array_equal(bits(whole), np.concatenate([bits(array), bits(array)[1:, ::-1]]))
    assert address(concatenated([array])) != address(array)
    with pytest.raises(AssertionError, match="rows of"):
        concatenated([array, bits(array)])
