"""Layout of the KV cache's blocks in PyTorch and Triton: token after token, and of each head after head."""

import torch

from quire.core.kv_dtypes import QUANTIZED, KVDtype
from quire.kernels.cache_layout import CacheLayout, Shape
from quire.kernels.torch_arrays import TORCH_LIBRARY


def _plain_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, scale_bytes: int = 0
) -> tuple[Shape, Shape]:
    """Return one shape for both. A head's scale stands behind its elements, which have one byte each."""
    assert scale_bytes == 0 or dtype.itemsize == 1, f"scales beside elements of {dtype}"
    shape = (num_blocks, block_size, num_kv_heads, head_dim + scale_bytes)
    return shape, shape


PLAIN = CacheLayout(
    shapes=_plain_shapes,
    own_dtype=lambda dtype: dtype,
    dtypes=(KVDtype("float32"), KVDtype("bfloat16"), KVDtype("float16"), *QUANTIZED.values()),
    dtype_of=TORCH_LIBRARY.dtype,
)
