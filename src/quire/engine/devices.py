"""Devices of an engine: the choice between CPU and GPU, and the release of their memory."""

import gc
import importlib.util
import os
import shutil

import torch

from quire.core.errors import ConfigError
from quire.execution.device_memory import empty_host_cache


def resolve_device(name: str) -> torch.device:
    """Return the device for auto, cpu or cuda; auto is the GPU if torch sees one and Triton is installed.

    Raises ConfigError if cuda is requested and one of the two is missing.
    """
    if name == "cpu":
        return torch.device("cpu")
    missing = _what_cuda_lacks()
    if missing is None:
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda":
        raise ConfigError(f"device cuda: {missing}; use cpu or auto")
    return torch.device("cpu")


def _what_cuda_lacks() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install quire[gpu])"
    if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang"))):
        return "there is no C compiler, of which Triton makes its launcher; install gcc"
    return None


def release_device_memory() -> None:
    """Return unreferenced memory of the GPU, if one was used, and pinned host memory to the system.

    cuBLAS keeps its workspace, a few dozen MiB, for the life of the process: CUDA graphs may refer to it.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        torch.cuda.empty_cache()
        empty_host_cache()
