"""Source of the CUDA kernels, and what is defined when it is compiled for a shape."""

from functools import cache
from pathlib import Path

import torch

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
