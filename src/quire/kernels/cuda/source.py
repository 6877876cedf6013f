"""Source of the CUDA kernels, and what is defined when it is compiled for a shape."""

from functools import cache
from pathlib import Path

import torch

PARTITION = 512  # tokens of context of a thread block in v2, as in vLLM
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
    return min(longest, partition) if partition else longest
