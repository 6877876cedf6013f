"""Launch of a compiled kernel on torch's current stream, by the CUDA driver's API through ctypes."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ConfigError

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SHARED_BYTES = 40 << 10  # limit of a kernel beside up to 8 KiB of its own; more must be asked for


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class Module:
    """Machine code on the current device; its kernels, by name."""

    def __init__(self, code: bytes) -> None:
        self._module, self._kernels = ctypes.c_void_p(), dict[str, ctypes.c_void_p]()
        _check(_driver().cuModuleLoadData(ctypes.byref(self._module), code))

    def launch(
        self, name: str, grid: tuple[int, int, int], num_threads: int, shared_bytes: int, arguments: Sequence[Any]
    ) -> None:
        """Launch a kernel. A tensor is passed as its address; numbers are ctypes, an int has 32 bits."""
        if name not in self._kernels:
            kernel = self._kernels[name] = ctypes.c_void_p()
            _check(_driver().cuModuleGetFunction(ctypes.byref(kernel), self._module, name.encode()))
        kernel = self._kernels[name]
        if shared_bytes > SHARED_BYTES:
            _check(_driver().cuFuncSetAttribute(kernel, MAX_DYNAMIC_SHARED, shared_bytes))
        values = [_value(argument) for argument in arguments]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(_driver().cuLaunchKernel(kernel, *grid, num_threads, 1, 1, shared_bytes, stream, places, None))


def _value(argument: Any) -> Any:  # noqa: ANN401
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int(argument) if isinstance(argument, int) else argument


def _check(status: int) -> None:
    if status:
        raise ConfigError(f"the CUDA driver refused a kernel: status {status}")
