"""NaN and infinity are found wherever they stand, and nothing else is taken for them."""

import math

import pytest
import torch

from quire.kernels.back_end import BackEnd
from quire.kernels.choice import choose_back_end
from quire.kernels.cpp.cpp_back_end import usable_isas

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["torch", "cpp"])
def back_end(request: pytest.FixtureRequest) -> BackEnd:
    if request.param == "cpp" and not usable_isas():
        pytest.skip("the C++ kernels were not built")
    return choose_back_end(torch.device("cpu"), request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 500_000, -1])
def test_one_value_is_found(back_end: BackEnd, place: int, value: float, dtype: torch.dtype) -> None:
    values = torch.ones(1_000_003, dtype=dtype)
    assert back_end.all_finite(values)
    values[place] = value
    assert not back_end.all_finite(values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_of_the_range_are_finite(back_end: BackEnd, dtype: torch.dtype) -> None:
    ends = torch.finfo(dtype)
    assert back_end.all_finite(torch.tensor([ends.max, ends.min, ends.tiny, 0.0, -0.0], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_between_the_values_does_not_count(back_end: BackEnd, dtype: torch.dtype) -> None:
    wide = torch.full((4, 6), math.nan, dtype=dtype)
    wide[:, ::2] = 1.0
    assert back_end.all_finite(wide[:, ::2])
    assert not back_end.all_finite(wide.T)


def test_a_nan_with_any_payload_is_found(back_end: BackEnd) -> None:
    for bits in (0x7F81, 0x7FC0, -1, 0x7FFF):
        assert not back_end.all_finite(torch.tensor([0, bits], dtype=torch.int16).view(torch.bfloat16))
