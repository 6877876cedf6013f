"""NaN and infinity are found wherever they stand, and nothing else is taken for them."""

import math

import numpy as np
import pytest
import torch

from quire.core.arrays import BFLOAT16, FLOAT16, FLOAT32, DType, dtype_name
from quire.extension.isas import usable_isas
from quire.kernels import conversion
from quire.kernels.conversion import all_finite, converted
from quire.kernels.torch_arrays import to_array, torch_dtype

DTYPES = [FLOAT32, BFLOAT16, FLOAT16]


@pytest.fixture(params=["cpp", "numpy"], autouse=True)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have values looked at by the extension, or by NumPy as where there is none."""
    if request.param == "numpy":
        monkeypatch.setattr(conversion, "usable_isas", tuple)
    elif not usable_isas():
        pytest.skip("the C++ kernels were not built")


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 500_000, -1])
def test_one_value_is_found(place: int, value: float, dtype: DType) -> None:
    values = converted(np.ones(1_000_003, np.float32), dtype)
    assert all_finite(values)
    values[place] = converted(np.full(1, value, np.float32), dtype)[0]
    assert not all_finite(values)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_the_ends_of_the_range_are_finite(dtype: DType) -> None:
    ends = torch.finfo(torch_dtype(dtype))
    assert all_finite(to_array(torch.tensor([ends.max, ends.min, ends.tiny, 0.0, -0.0], dtype=torch_dtype(dtype))))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_what_lies_between_the_values_does_not_count(dtype: DType) -> None:
    wide = converted(np.full((4, 6), math.nan, np.float32), dtype)
    wide[:, ::2] = converted(np.ones((4, 3), np.float32), dtype)
    assert all_finite(wide[:, ::2])
    assert not all_finite(wide.T)


def test_a_nan_with_any_payload_is_found() -> None:
    for number in (0x7F81, 0x7FC0, 0xFFFF, 0x7FFF):
        assert not all_finite(np.array([0, number], np.uint16).view(BFLOAT16))
