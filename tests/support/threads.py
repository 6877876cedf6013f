"""The number of threads that compute, of the C++ kernels and of PyTorch."""

import torch

from quire.extension.isas import set_threads_of_kernels


def set_num_threads(count: int) -> None:
    """Set both; without the extension there is one."""
    torch.set_num_threads(count)
    set_threads_of_kernels(count)
