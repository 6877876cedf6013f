"""Back end: one implementation of every op. A further one is one more `BackEnd`, in a package of its own."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.kernels.block_copy import CopyBlocks
from quire.kernels.cache_layout import CacheLayout
from quire.kernels.experts import ExpertLayer
from quire.kernels.kv_cache_write import WriteKV
from quire.kernels.linear import Linear
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.low_rank import AdapterSlots, Up
from quire.kernels.norm import Norm
from quire.kernels.paged_attention import Attend, AttentionBackEnd
from quire.kernels.program import Program
from quire.kernels.sampling import SamplingOps
from quire.kernels.tensors import Library, Tensor


@dataclass(frozen=True, slots=True)
class BackEnd:
    """One implementation of every op; each field has the signature that `reference.back_ends.TORCH` has there.

    `linear` makes a layer from a `LinearWeight`, as `make_linear` does; `head` makes one to float32 logits, which
    are defined until its next call; `low_rank_up` makes B of an adapter's module from its weight, as `TorchUp` is
    one; `adapter_slots` makes `low_rank.AdapterSlots` where adapters are computed on a device of their own memory;
    `experts` makes a mixture of layers, as `TorchExperts` is one; `norm` makes one from its parameters, as
    `TorchNorm` does. `library` makes the tensors that all of them take. `fuse` replaces those stretches of a layer
    program that the back end runs in one call. `attention` is what --attention-backend chose for a GPU in place of
    Triton's kernels, if anything.
    """

    name: str
    library: Library
    linear: Callable[..., Linear]
    head: Callable[[LinearWeight, Tensor | None], Linear]
    low_rank_up: Callable[..., Up]
    experts: Callable[..., ExpertLayer]
    fuse: Callable[[Program], Program]
    cache_layout: CacheLayout
    paged_attention: Attend
    write_kv: WriteKV
    copy_blocks: CopyBlocks
    norm: Callable[[Tensor, Tensor | None, float, bool, float | None], Norm]
    embed: Callable[..., Tensor]
    sampling: SamplingOps
    adapter_slots: Callable[..., AdapterSlots] | None = None
    attention: AttentionBackEnd | None = None

    @property
    def is_capturable(self) -> bool:
        """Return whether a step can be captured as a CUDA graph."""
        return self.attention is None or self.attention.is_capturable
