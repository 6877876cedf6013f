"""CUDA kernels by ctypes: their source, its compilation by NVRTC, and launches on torch's current stream."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ConfigError

PARTITION = 512  # tokens of context of a thread block in v2, as in vLLM; far from the start of a context, more
FINE, DOUBLINGS = 16, 4  # as in the source: partitions of PARTITION tokens, and how often they double
ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
VECTOR_BYTES = 16
MAX_HEAD_DIM = 256


@cache
def source() -> str:
    """Return the text of the kernels."""
    return Path(__file__).with_name("paged_attention.cu").read_text(encoding="utf-8")


def definitions(dtype: torch.dtype, head_dim: int, block_size: int, partition: int) -> list[str]:
    """Return the compiler's options that define a shape; a partition of 0 is v1, the whole context."""
    assert dtype in ELEMENTS, f"caches of {dtype}"
    assert head_dim <= MAX_HEAD_DIM, f"heads of {head_dim}"
    assert head_dim * dtype.itemsize % VECTOR_BYTES == 0, f"heads of {head_dim} are no vectors of 16 bytes"
    values = {"ELEMENT": ELEMENTS[dtype], "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "PARTITION": partition}
    return [f"-D{name}={value}" for name, value in values.items()]


def shared_floats(longest: int, partition: int) -> int:
    """Return how many scores a thread block holds, with the longest context of the step."""
    return min(longest, partition << (_level(longest, partition) + 1)) if partition else longest


def count_partitions(longest: int, partition: int) -> int:
    """Return how many partitions a context has: up to 131,072 tokens at most 48, then one for each 8,192."""
    if partition == 0:
        return 1
    level = _level(longest, partition)
    if level < 0:
        return -(-longest // partition)
    return FINE + 8 * level - ((FINE * partition << level) - longest) // (2 * partition << level)


def _level(longest: int, partition: int) -> int:
    """Return how often the last partition has doubled beyond twice the first ones; -1: it is one of them."""
    return min(DOUBLINGS - 1, ((longest - 1) // (FINE * partition)).bit_length() - 1)


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


FOLDERS = ("nvidia/cuda_nvrtc/lib", "nvidia/cu12/lib", "nvidia/cu13/lib")  # pip's packages; torch's wheels need one


@cache
def library() -> ctypes.CDLL:
    """Return NVRTC. Raises ConfigError where it is missing."""
    names = ["libnvrtc.so"]
    for folder in (Path(path) / name for path in sys.path for name in FOLDERS):
        for builtins in folder.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        names[:0] = [str(file) for file in folder.glob("libnvrtc.so.1*") if "alt" not in file.name]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ConfigError("attention in CUDA C++ needs NVRTC; install nvidia-cuda-nvrtc-cu12")


def compile_source(text: str, options: Sequence[str], *, to_ptx: bool = False) -> bytes:
    """Return the machine code for the card that `options` name (-arch=sm_90), or PTX (-arch=compute_90).

    Raises ConfigError with the compiler's log.
    """
    nvrtc, program = library(), ctypes.c_void_p()
    _check_nvrtc(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"paged_attention.cu", 0, None, None))
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), arguments):
            raise ConfigError(f"NVRTC: {_read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)!r}")
        if to_ptx:
            return _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0")
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(get_size: Callable[..., int], get: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check_nvrtc(get_size(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check_nvrtc(get(program, buffer))
    return buffer.raw


def _check_nvrtc(status: int) -> None:
    if status:
        raise ConfigError(f"NVRTC failed with status {status}")
