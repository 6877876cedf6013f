"""Addresses of arrays, which the extension reads from NumPy's objects, and the end of a process that has its own."""

import subprocess
import sys

import numpy as np
import pytest
import torch

_kernels = pytest.importorskip("quire.extension._kernels", reason="the C++ kernels were not built")


def test_address_is_that_of_the_first_element() -> None:
    whole = np.arange(24).reshape(4, 6)
    for array in (whole, whole[2:, 1::2], whole.view(np.recarray), np.empty(0)):
        assert _kernels.address(array) == array.__array_interface__["data"][0]


@pytest.mark.parametrize("value", [None, 7, b"bytes", memoryview(b"1"), [1.0], torch.zeros(2), np.float32(1)], ids=type)
def test_only_arrays_have_one(value: object) -> None:
    with pytest.raises(TypeError):
        _kernels.address(value)  # type: ignore[arg-type]


FROZEN = """
import gc
from quire.extension import _kernels
cycle = [_kernels.Heads(1, 1, 8)]
cycle.append(cycle)
del cycle
gc.freeze()
"""


def test_process_with_frozen_objects_ends_silently() -> None:
    done = subprocess.run([sys.executable, "-c", FROZEN], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
