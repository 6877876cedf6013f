"""The executor of a GPU on tensors in host memory."""

from quire.execution.cuda.cuda_worker import AsyncCudaExecutor, CudaWorker
from quire.execution.device import Device
from quire.execution.worker import StepCompute


def executor_in_flight(device: Device, compute: StepCompute, max_num_batched_tokens: int) -> AsyncCudaExecutor:
    """Stand in for `HostDevice.executor`: the host plans a step while one is in flight."""
    return AsyncCudaExecutor(CudaWorker(compute))
