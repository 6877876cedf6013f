"""Addresses of arrays, which the extension reads from NumPy's objects."""

import numpy as np
import pytest
import torch

from quire.kernels.cpp import _kernels


def test_address_is_that_of_the_first_element() -> None:
    whole = np.arange(24).reshape(4, 6)
    for array in (whole, whole[2:, 1::2], whole.view(np.recarray), np.empty(0)):
        assert _kernels.address(array) == array.__array_interface__["data"][0]


@pytest.mark.parametrize("value", [None, 7, b"bytes", memoryview(b"1"), [1.0], torch.zeros(2), np.float32(1)], ids=type)
def test_only_arrays_have_one(value: object) -> None:
    with pytest.raises(TypeError):
        _kernels.address(value)  # type: ignore[arg-type]
