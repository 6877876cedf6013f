"""Choice of an engine's device: the host, or a GPU, which is loaded for it alone."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from quire.core.errors import ConfigError, NotInstalledError
from quire.core.optional_package import NEEDS_TORCH
from quire.engine.options import EngineOptions
from quire.execution.device import Device, HostDevice

if TYPE_CHECKING:
    from quire.execution.cuda.cuda_graphs import GraphSizes


def open_device(options: EngineOptions) -> Device:
    """Return the device for auto, cpu or cuda; auto is the GPU if there is one and all that it needs is installed.

    Raises ConfigError if cuda is requested and something is missing.
    """
    if not _may_use_gpu(options):
        return HostDevice()
    try:
        return _open_gpu(options)
    except ConfigError:
        if options.device == "cuda":
            raise
        return HostDevice()


def uses_gpu(options: EngineOptions) -> bool:
    """Return whether the options mean a GPU, and one can be used here."""
    return _may_use_gpu(options) and _what_cuda_lacks() is None


def _open_gpu(options: EngineOptions) -> Device:
    missing = _what_cuda_lacks()
    if missing is not None:
        kind, what = missing
        raise kind(f"device cuda: {what}; use cpu or auto")
    from quire.execution.cuda.cuda_device import (  # noqa: PLC0415 (for the start on a CPU)
        CudaDevice,
        default_batched_tokens,
    )

    sizes = graph_sizes_of(options, options.batched_tokens(default_batched_tokens()))
    return CudaDevice(
        options.gpu_memory_utilization, sizes, captures_graphs=options.captures_at_start,
        launches_early=options.early_launch,
    )  # fmt: skip


def graph_sizes_of(options: EngineOptions, max_tokens: int) -> "GraphSizes":
    """Return the sizes of CUDA graphs for steps of up to `max_tokens` tokens; none with `enforce_eager`."""
    from quire.execution.cuda.cuda_graphs import GraphSizes, graph_sizes  # noqa: PLC0415 (for the start on a CPU)

    if options.enforce_eager:
        return GraphSizes((), ())
    return graph_sizes(options.cudagraph_capture_sizes, options.max_cudagraph_capture_size, max_tokens)


def _may_use_gpu(options: EngineOptions) -> bool:
    """Return whether to load PyTorch and look for a GPU: for auto only where the system has a driver of GPUs."""
    if options.device == "auto":
        return any(Path(file).exists() for file in ("/dev/nvidiactl", "/dev/dxg"))
    return options.device != "cpu"


def _what_cuda_lacks() -> tuple[type[ConfigError], str] | None:
    """Return what is missing, and the error that says so."""
    if importlib.util.find_spec("torch") is None:
        return NotInstalledError, NEEDS_TORCH
    import torch  # noqa: PLC0415 (for the start on a CPU)

    if torch.version.cuda is None:
        return ConfigError, f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return ConfigError, "torch sees no GPU"
    if importlib.util.find_spec("triton") is None:
        return NotInstalledError, "this needs Triton: pip install 'quire[gpu]'"
    fault = _launcher_fault()
    return None if fault is None else (ConfigError, fault)


def _launcher_fault() -> str | None:
    """Return why Triton could not compile its launcher, which is in C, here (triton/runtime/build.py)."""
    command = os.environ.get("CC")
    if command is None and not any(map(shutil.which, ("gcc", "clang"))):
        return "there is no C compiler, of which Triton makes its launcher; install gcc"
    if command is not None and shutil.which(command) is None:
        return f"CC is {command!r}, which Triton runs as one program without arguments; set it to a C compiler's path"
    scheme = sysconfig.get_default_scheme()
    paths = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)
    if not (header := Path(paths["include"], "Python.h")).exists():
        return f"there is no {header}, which Triton's launcher includes; install Python's headers, as in python3-dev"
    return None
