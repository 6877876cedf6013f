"""The number of threads that compute, of the C++ kernels and of PyTorch."""

import torch

from quire.kernels.cpp.isas import usable_isas


def set_num_threads(count: int) -> None:
    """Set both; without the extension there is one."""
    torch.set_num_threads(count)
    if usable_isas():
        from quire.kernels.cpp import _kernels

        _kernels.set_num_threads(count)
