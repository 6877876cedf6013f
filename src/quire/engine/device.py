"""Which device the engine runs on: `--device` resolved, once, in the engine's own process."""

import gc
import importlib.util

import torch

from quire.core.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """Return the device for auto, cpu or cuda; auto is the GPU where torch sees one and Triton is installed.

    Raises ConfigError where cuda is asked for and one of the two is missing.
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
    return None


def give_back_device_memory() -> None:
    """Let the GPU, if one was used, have what nobody refers to any more: other processes want it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        torch.cuda.empty_cache()
