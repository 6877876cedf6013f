"""Layout of the KV cache's blocks in a back end: shapes and dtype of a layer's two tensors.

Whatever the layout, a block is one run of bytes in each tensor, its scales among them, and the first dimension counts
blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from quire.core.errors import ConfigError
from quire.core.kv_dtypes import QUANTIZED, KVDtype

Shape = tuple[int, ...]


class CacheShapes(Protocol):
    """Shapes of a layer's keys and values."""

    def __call__(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
        scale_bytes: int = 0,
    ) -> tuple[Shape, Shape]:
        """Return the shapes for elements of `dtype`, with `scale_bytes` of a scale per token and head."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Layout of one back end.

    `own_dtype` maps a model's dtype to the one that its keys and values are stored in by default; `dtypes` are all that
    the kernels read and write.
    """

    shapes: CacheShapes
    own_dtype: Callable[[torch.dtype], torch.dtype]
    dtypes: tuple[KVDtype, ...]

    def stored_dtype(self, model_dtype: torch.dtype, asked: str = "auto") -> KVDtype:
        """Return the storage of the cache of a model of `model_dtype`; ConfigError if `asked` is not served beside it.

        `asked`: a value of --kv-cache-dtype.
        """
        own = dtype_name(self.own_dtype(model_dtype))
        if QUANTIZED.get(asked) in self.dtypes:
            return QUANTIZED[asked]
        if asked not in ("auto", own):
            raise ConfigError(
                f"kv_cache_dtype {asked!r} is not supported: keys and values of a {dtype_name(model_dtype)} model are "
                f"stored in {own} here"
                + "".join(f" or {name}" for name, stored in QUANTIZED.items() if stored in self.dtypes)
            )
        return KVDtype(own)

    def check(self, stored: KVDtype) -> torch.dtype:
        """Return the dtype of the elements; ConfigError if this back end's kernels do not read this storage."""
        if stored not in self.dtypes:
            raise ConfigError(
                f"a KV cache of {_described(stored)} is not supported; this back end stores "
                f"{', '.join(map(_described, self.dtypes))}"
            )
        dtype = getattr(torch, stored.element)
        assert isinstance(dtype, torch.dtype)
        return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as configurations spell it: float32, bfloat16."""
    return str(dtype).removeprefix("torch.")


def _described(stored: KVDtype) -> str:
    return stored.element if stored.scale is None else f"{stored.element} with scales of {stored.scale}"


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
)
