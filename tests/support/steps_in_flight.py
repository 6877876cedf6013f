"""The executor of a GPU on tensors in host memory."""

import pytest

from quire.execution.cuda.cuda_worker import AsyncCudaExecutor, CudaWorker
from quire.execution.device import Device
from quire.execution.worker import StepCompute
from quire.kernels.reference.back_ends import TORCH


def executor_in_flight(device: Device, compute: StepCompute, max_num_batched_tokens: int) -> AsyncCudaExecutor:
    """Stand in for `HostDevice.executor`: the host plans a step while one is in flight."""
    return AsyncCudaExecutor(CudaWorker(compute))


def compute_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines compute with PyTorch's back end: a worker of a GPU has its tensors, and no arrays."""
    monkeypatch.setattr("quire.engine.loading.choose_back_end", lambda *args, **how: TORCH)
