"""The executor of a GPU on tensors in host memory."""

from quire.execution.cuda.executor import AsyncCudaExecutor
from quire.execution.cuda.worker import CudaWorker
from quire.execution.device import Device, WorkerParts


def executor_in_flight(device: Device, parts: WorkerParts, max_num_batched_tokens: int) -> AsyncCudaExecutor:
    """Stand in for `HostDevice.executor`: the host plans a step while one is in flight."""
    return AsyncCudaExecutor(CudaWorker(*parts))
