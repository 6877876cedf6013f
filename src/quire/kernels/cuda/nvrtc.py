"""NVRTC, CUDA's compiler at run time, by ctypes: source to PTX or to the machine code of a card."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from quire.core.errors import ConfigError

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
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"paged_attention.cu", 0, None, None))
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
    _check(get_size(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(get(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    if status:
        raise ConfigError(f"NVRTC failed with status {status}")
