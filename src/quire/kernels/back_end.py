"""Back end: one implementation of every op, and the table of the features that each back end computes.

An op class that is not listed runs by its own `run` on the CPU, and is refused on CUDA until its name is listed here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.core.arrays import dtype_name
from quire.core.config import QUANTIZED
from quire.core.errors import ConfigError
from quire.kernels.delta_net import DeltaRule, Gate
from quire.kernels.kv_cache import CacheLayout, CopyBlocks
from quire.kernels.layers import ExpertLayer, Linear, Norm
from quire.kernels.low_rank import Up
from quire.kernels.mamba import MambaRule
from quire.kernels.paged_attention import Attend, AttentionBackEnd, WriteKV
from quire.kernels.program import AttentionOp, Op, Program, RotaryWriteOp
from quire.kernels.sampling import SamplingOps
from quire.kernels.short_conv import Convolve
from quire.kernels.tensors import DType, Library, Tensor

if TYPE_CHECKING:
    from quire.kernels.triton.triton_low_rank import TritonSlots


@dataclass(frozen=True, slots=True)
class BackEnd:
    """One implementation of every op; each field has the signature that `reference.back_ends.TORCH` has there.

    `linear` makes a layer from a `LinearWeight`, as `make_linear` does; `head` makes one to float32 logits, which
    are defined until its next call. Where a back end `has_tables`, it makes heads of `WeightPortions`, too, and they
    have an embedding `table`, which looks rows up in their weight. `low_rank_up` makes B of an adapter's module from
    its weight, as `TorchUp` is one; `adapter_slots` makes `TritonSlots` where adapters are computed on a device of
    their own memory; `experts` makes a mixture of layers, as `TorchExperts` is one; `norm` makes one from its
    parameters, as `TorchNorm` does. `library` makes the tensors that all of them take. `fuse` replaces those stretches
    of a layer program that the back end runs in one call. `attention` is what --attention-backend chose for a GPU in
    place of Triton's kernels, if anything. `is_exact`: a row's results have the same bits in every batch.
    """

    name: str
    library: Library
    linear: Callable[..., Linear]
    head: Callable[..., Linear]
    low_rank_up: Callable[..., Up]
    experts: Callable[..., ExpertLayer]
    fuse: Callable[[Program], Program]
    cache_layout: CacheLayout
    paged_attention: Attend
    write_kv: WriteKV
    copy_blocks: CopyBlocks
    short_conv: Convolve
    delta_net: DeltaRule
    mamba: MambaRule
    gate: Gate
    norm: Callable[[Tensor, Tensor | None, float, bool, float | None], Norm]
    embed: Callable[..., Tensor]
    sampling: SamplingOps
    adapter_slots: Callable[..., "TritonSlots"] | None = None
    attention: AttentionBackEnd | None = None
    is_exact: bool = False
    has_tables: bool = False

    @property
    def is_capturable(self) -> bool:
        """Return whether a step can be captured as a CUDA graph."""
        return self.attention is None or self.attention.is_capturable


CPU = frozenset({"cpp", "torch", "reference"})
EVERYWHERE = CPU | {"cuda"}
SUPPORT: dict[str, frozenset[str]] = {
    "Norm": EVERYWHERE,
    "Linear": EVERYWHERE,
    "Experts": EVERYWHERE,
    "SplitHeads": EVERYWHERE,
    "TakeHeads": CPU,
    "QKNorm": EVERYWHERE,
    "RotaryWrite": EVERYWHERE,
    "Attention": EVERYWHERE,
    "ShortConv": CPU,
    "DeltaNet": CPU,
    "Mamba": CPU,
    "Gate": CPU,
    "Add": EVERYWHERE,
    "Scale": EVERYWHERE,
    "Clip": EVERYWHERE,
    "PositionScale": EVERYWHERE,
    "interleaved rotary": EVERYWHERE,
    "softcap on attention scores": EVERYWHERE,
    "attention sinks": EVERYWHERE,
    "attention in both directions": CPU,
    "latent attention": CPU,
    "rotary of later dimensions": CPU,
    "keys and values of another layer": CPU,
    "HeadNorm": CPU,
    "Lookup": CPU,
    "Multiply": CPU,
    "Tap": CPU,
    "Join": CPU,
    "experts beside a feed-forward": CPU,
    "SplitLatent": CPU,
    "HeadLinear": CPU,
    "CountLayer": EVERYWHERE,
    "Gather": EVERYWHERE,
    "SummedLinear": EVERYWHERE,
    "adapters": EVERYWHERE,
} | {f"kv_cache_dtype {name}": EVERYWHERE for name in QUANTIZED}


def require(back_end: str, features: Iterable[str]) -> None:
    """Raise ConfigError if a back end lacks one of these ops or features."""
    missing = sorted({feature for feature in features if back_end not in SUPPORT.get(feature, CPU)})
    if missing:
        raise ConfigError(f"device {back_end} does not support {', '.join(missing)} yet; use --device cpu")


def require_ops(back_end: str, ops: Iterable[Op]) -> None:
    """Raise ConfigError if a back end lacks one of these ops, or one of their specs' features."""
    for op in ops:
        features = op.spec.features if isinstance(op, AttentionOp | RotaryWriteOp) else ()
        require(back_end, [type(op).__name__.removesuffix("Op"), *features])


def require_attention(attention: AttentionBackEnd | None, ops: Iterable[Op], dtype: DType) -> None:
    """Raise ConfigError if an attention back end lacks a feature of these ops, their head sizes or `dtype`."""
    if attention is None:
        return
    name, own = f"attention_backend {attention.name}", [op for op in ops if isinstance(op, AttentionOp)]
    missing = sorted({feature for op in own for feature in op.spec.features} - attention.features)
    if missing:
        raise ConfigError(f"{name} does not support {', '.join(missing)}; use triton")
    for op in own:
        if not attention.serves(dtype, op.spec.heads.head_dim):
            asked = f"{dtype_name(dtype)} heads of {op.spec.heads.head_dim}"
            raise ConfigError(f"{name} does not support {asked}, only {attention.shapes}; use triton")


def require_kv_dtype(attention: AttentionBackEnd | None, name: str) -> None:
    """Raise ConfigError if an attention back end does not read this --kv-cache-dtype."""
    if attention is not None and name in QUANTIZED:
        raise ConfigError(f"attention_backend {attention.name} does not support kv_cache_dtype {name}; use triton")


MAX_HEAD_DIM = 576  # csrc/cache_layout.hpp


def serves_head_dim(head_dim: int) -> bool:
    """Return whether the attention kernel takes heads of this size."""
    return head_dim in range(8, MAX_HEAD_DIM + 1, 8)
