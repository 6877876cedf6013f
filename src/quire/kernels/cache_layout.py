"""Layout of the KV cache's blocks in a back end: shapes and dtype of a layer's two tensors.

Whatever the layout, a block is one run of bytes in each tensor, and the first dimension counts blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.core.errors import ConfigError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Layout of one back end.

    `shapes(num_blocks, block_size, num_kv_heads, head_dim, dtype)` returns the shapes of keys and values stored in
    `dtype`. `own_dtype` maps a model's dtype to the one that its keys and values are stored in; `dtypes` are all that
    the kernels read and write.
    """

    shapes: Callable[[int, int, int, int, torch.dtype], tuple[Shape, Shape]]
    own_dtype: Callable[[torch.dtype], torch.dtype]
    dtypes: tuple[torch.dtype, ...]

    def stored_dtype(self, model_dtype: torch.dtype, asked: str = "auto") -> torch.dtype:
        """Return the dtype of the cache of a model of `model_dtype`; ConfigError if `asked` is not served beside it."""
        own = self.own_dtype(model_dtype)
        if asked not in ("auto", dtype_name(own)):
            raise ConfigError(
                f"a KV cache of {asked} is not supported yet: keys and values of a {dtype_name(model_dtype)} model are "
                f"stored in {dtype_name(own)} here"
            )
        return own

    def check(self, dtype: str, scale_dtype: str | None) -> torch.dtype:
        """Return the stored dtype of that name; ConfigError if this back end's kernels do not read it."""
        found = next((each for each in self.dtypes if dtype_name(each) == dtype), None)
        if found is None or scale_dtype is not None:
            scales = "" if scale_dtype is None else f" with scales of {scale_dtype}"
            raise ConfigError(
                f"a KV cache of {dtype}{scales} is not supported yet; this back end stores "
                f"{' or '.join(map(dtype_name, self.dtypes))}, without scales"
            )
        return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as configurations spell it: float32, bfloat16."""
    return str(dtype).removeprefix("torch.")


def _plain_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Shape, Shape]:
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return shape, shape


PLAIN = CacheLayout(
    shapes=_plain_shapes, own_dtype=lambda dtype: dtype, dtypes=(torch.float32, torch.bfloat16, torch.float16)
)
