"""Paged attention of decodes by the kernels in CUDA C++: --attention-backend cuda. Triton's serve chunks of prompts.

NVRTC compiles the source, and ctypes launches its kernels on torch's current stream. v2 serves, and v1 where a table
has no more than one partition: then both give the same bits, so that the bits of a row depend on its context alone.
Nothing has run on a card yet.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels.paged_attention import AttentionBackEnd, AttentionMetadata, AttentionSpec

PARTITION = 512  # tokens of context of a thread block in v2, as in vLLM; far from the start of a context, more
FINE, DOUBLINGS = 16, 4  # as in the source: partitions of PARTITION tokens, and how often they double
ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
VECTOR_BYTES = 16
MAX_HEAD_DIM = 256
NUM_THREADS = 128


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


@cache
def _module(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, partition: int) -> Module:
    major, minor = torch.cuda.get_device_capability(device)
    defined = definitions(dtype, head_dim, block_size, partition)
    return Module(compile_source(source(), [f"-arch=sm_{major}{minor}", "--std=c++17", *defined]))


def attend(
    out: Tensor, spec: AttentionSpec, query: Tensor, key_cache: Tensor, value_cache: Tensor,
    metadata: AttentionMetadata, partition: int | None = None,
) -> None:  # fmt: skip
    """Attend as `paged_attention.reference` does for the sequences of one query; write their rows of `out` alone.

    out [num_tokens, num_heads, head_dim], contiguous; caches in the plain layout. The launches follow from the shapes
    of the arguments, so a step can be captured as a graph. `partition`: None chooses; 0 is v1. Raises ConfigError if
    NVRTC or the driver is missing or fails.
    """
    num_seqs, (num_heads, num_kv_heads, head_dim) = len(metadata.context_lens), spec.heads
    assert out.shape == query.shape, f"a result of {tuple(out.shape)} for queries of {tuple(query.shape)}"
    assert out.is_contiguous(), "a result with gaps"
    assert key_cache.is_contiguous(), "keys with gaps"
    assert value_cache.is_contiguous(), "values with gaps"
    assert key_cache.dtype == value_cache.dtype == query.dtype, f"queries {query.dtype}, caches {key_cache.dtype}"
    longest = metadata.block_tables.shape[1] * metadata.block_size
    if partition is None:
        partition = PARTITION if longest > PARTITION else 0
    module = _module(query.device, query.dtype, head_dim, metadata.block_size, partition)
    num_partitions = count_partitions(longest, partition)
    rows = (num_seqs, num_heads, num_partitions) if partition else (1,)
    partials = torch.empty((*rows, head_dim), dtype=torch.float32, device=query.device)
    highests, totals = torch.empty((2, *rows), dtype=torch.float32, device=query.device)
    left, sequences = (partials, highests, totals), (metadata.query_starts, metadata.context_lens)
    strides = ctypes.c_longlong(query.stride(0)), ctypes.c_longlong(query.stride(1))
    module.launch(
        "attend", (num_heads, num_seqs, num_partitions), NUM_THREADS, 4 * shared_floats(longest, partition),
        (out, *left, query, key_cache, value_cache, metadata.block_tables, *sequences, num_kv_heads,
         metadata.block_tables.stride(0), *strides, ctypes.c_float(spec.scale), spec.window or 0),
    )  # fmt: skip
    if partition:
        arguments = (out, *left, *sequences, num_partitions)
        module.launch("combine", (num_heads, num_seqs, 1), NUM_THREADS, 4 * num_partitions, arguments)


def _make(attend_by_triton: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the op: decodes by `attend`, chunks of prompts by Triton. ConfigError if NVRTC is missing."""
    library()
    return partial(attend_by_triton, attend_decodes=attend)


CUDA_ATTENTION = AttentionBackEnd(
    name="cuda",
    make=_make,
    serves=lambda dtype, head_dim: (
        dtype in ELEMENTS and head_dim <= MAX_HEAD_DIM and head_dim * dtype.itemsize % VECTOR_BYTES == 0
    ),
    shapes=f"heads of up to {MAX_HEAD_DIM} that are multiples of {VECTOR_BYTES} bytes",
)
