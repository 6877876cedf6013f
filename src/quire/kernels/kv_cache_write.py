"""Rotation of a layer's queries and keys, and storage of its keys and values: what all back ends read."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.arrays import dtype_name
from quire.kernels.cache_layout import ONES, KVScales
from quire.kernels.paged_attention import Heads
from quire.kernels.tensors import Tensor, is_contiguous


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotation of a layer's queries and keys, and storage of its keys and values. All back ends read it."""

    heads: Heads
    cos_sin: Tensor | None = None  # as in `rotary_table`; None: no rotation
    is_interleaved: bool = False   # pairs of dimensions are (2i, 2i + 1), else (i, rotary_dim / 2 + i)
    kv_scales: KVScales = ONES     # where an 8-bit cache stores none

    def __post_init__(self) -> None:
        if self.cos_sin is not None:
            assert self.rotary_dim <= self.heads.head_dim, f"{self.rotary_dim} dimensions of {self.heads} are rotated"
            assert dtype_name(self.cos_sin.dtype) == "float32", f"a rotary table of {self.cos_sin.dtype}"
            assert is_contiguous(self.cos_sin), "a rotary table with gaps"

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated, the first ones; 0: none."""
        return 0 if self.cos_sin is None else self.cos_sin.shape[1]

    @property
    def features(self) -> tuple[str, ...]:
        """Features beyond plain rotation, by their names in the support table."""
        return ("interleaved rotary",) if self.is_interleaved else ()


WriteKV = Callable[[RotarySpec, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # as `write_kv`
