"""Workers of GPUs on a CPU: engines compute there with PyTorch's back end, whose tensors are those of a GPU's."""

import pytest

from support.steps_in_flight import compute_with_torch


@pytest.fixture(autouse=True)
def computes_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_with_torch(monkeypatch)
