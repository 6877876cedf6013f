"""Limits of the C++ kernels that hold without the extension."""

MAX_HEAD_DIM = 512  # csrc/cache_layout.hpp


def serves_head_dim(head_dim: int) -> bool:
    """Return whether the attention kernel takes heads of this size."""
    return head_dim in range(8, MAX_HEAD_DIM + 1, 8)
