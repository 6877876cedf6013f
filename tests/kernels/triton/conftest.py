"""The kernels of the CUDA back end run where there is a GPU, and by Triton's interpreter in a process of its own."""

import os

import pytest
import torch

from support.interpreter import make_types_once, prepare_once_a_launch

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETS:
    prepare_once_a_launch()
    make_types_once()


@pytest.fixture
def device() -> torch.device:
    """Return where the kernels run; skip where they cannot."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if INTERPRETS:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no GPU; tests/kernels/test_triton.py runs these in Triton's interpreter")
    return torch.device("cuda")
