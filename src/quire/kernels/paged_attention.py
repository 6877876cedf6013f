"""Attention over paged keys and values (Kwon et al. 2023, section 4.1): a layer's choices, a step's inputs, writes."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.core.arrays import dtype_name
from quire.core.config import KERNEL_BLOCK_SIZES
from quire.kernels.kv_cache import ONES, KVScales
from quire.kernels.tensors import DType, Tensor, is_contiguous

MAX_AHEAD = 2**31      # tokens: beyond every context


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Attention inputs shared by the layers of a step: the sequence of each query and the blocks of its context."""

    block_tables: Tensor   # [num_seqs, max_blocks] int32
    query_starts: Tensor   # [num_seqs + 1] int32
    context_lens: Tensor   # [num_seqs] int32
    block_size: int
    seen_ends: Tensor | None = None  # [num_tokens] int32, one past the last position that each sees; None: its own
    plans: dict[Hashable, Any] = field(default_factory=dict, compare=False)  # what a back end keeps during the step

    @property
    def num_tokens(self) -> int:
        """Rows of the flat batch."""
        return int(self.query_starts[-1])


class Heads(NamedTuple):
    """Sizes of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of a layer: everything but its tensors. All back ends read it; csrc/kernels.hpp has the same fields.

    A new feature is a field here, with its default, and a line of `features`; `reference` gives it its meaning.
    """

    heads: Heads
    scale: float                 # multiplies scores, above 0
    window: int | None = None    # tokens that a token sees, itself and those before it; None: all
    softcap: float = 0.0         # scores become softcap * tanh(score / softcap); 0: unchanged
    sinks: Tensor | None = None  # [num_heads] float32: the score of one more key, with a value of zeros (OpenAI 2025)
    is_causal: bool = True       # False: a token also sees as many tokens after itself as before itself
    value_dim: int = 0           # values are the first so many dimensions of keys (DeepSeek-AI 2024); 0: stored
    kv_scales: KVScales = ONES   # where an 8-bit cache stores none

    def __post_init__(self) -> None:
        assert self.scale > 0, f"scale {self.scale}"
        assert self.heads.num_heads % self.heads.num_kv_heads == 0, f"{self.heads}: uneven groups"
        if self.sinks is not None:
            assert self.sinks.shape == (self.heads.num_heads,), f"sinks {tuple(self.sinks.shape)} for {self.heads}"
            assert dtype_name(self.sinks.dtype) == "float32", f"sinks of {self.sinks.dtype}"
            assert is_contiguous(self.sinks), "sinks with gaps"
        assert self.value_dim in range(0, self.heads.head_dim + 1, 8), f"values of {self.value_dim} of {self.heads}"

    @property
    def output_dim(self) -> int:
        """Dimensions of a head's result."""
        return self.value_dim or self.heads.head_dim

    @property
    def num_ahead(self) -> int:
        """Tokens after itself that a token sees, if its context has them."""
        return 0 if self.is_causal else MAX_AHEAD if self.window is None else self.window - 1

    @property
    def features(self) -> tuple[str, ...]:
        """Features beyond plain causal attention, by their names in the support table."""
        found = {
            "softcap on attention scores": self.softcap, "attention sinks": self.sinks is not None,
            "attention in both directions": not self.is_causal, "latent attention": self.value_dim > 0,
        }  # fmt: skip
        return tuple(name for name, is_used in found.items() if is_used)


Attend = Callable[[AttentionSpec, Tensor, Tensor, Tensor, AttentionMetadata], Tensor]  # as `reference`


@dataclass(frozen=True, slots=True)
class AttentionBackEnd:
    """Attention kernels of a GPU that can take the place of Triton's, and the heads and features that they serve.

    `make` returns the op for Triton's op, which may serve a part of it; ConfigError if something is not installed.
    """

    name: str                                # a value of --attention-backend
    make: Callable[[Callable[..., Tensor]], Attend]
    serves: Callable[[DType, int], bool]  # heads of a dtype and a size
    shapes: str                              # the dtypes and head sizes that `serves` accepts, for errors
    features: frozenset[str] = frozenset()   # the part of `AttentionSpec.features` that it computes
    is_capturable: bool = True               # a step can be captured as a CUDA graph


def build_metadata(
    block_tables: Tensor, query_starts: Tensor, context_lens: Tensor, block_size: int, seen_ends: Tensor | None = None
) -> AttentionMetadata:
    """Return the metadata of a step; arguments as in `AttentionMetadata`, the rows of tables without gaps.

    Table entries past a context, or before every window, may hold anything: they are never followed.
    """
    assert len(query_starts) == len(context_lens) + 1 == len(block_tables) + 1
    assert block_size in KERNEL_BLOCK_SIZES, f"block size {block_size} is not one of {KERNEL_BLOCK_SIZES}"
    return AttentionMetadata(block_tables, query_starts, context_lens, block_size, seen_ends)


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotation of a layer's queries and keys, and storage of its keys and values. All back ends read it."""

    heads: Heads
    cos_sin: Tensor | None = None  # as in `rotary_table`; None: no rotation
    is_interleaved: bool = False   # pairs of dimensions are (2i, 2i + 1), else (i, rotary_dim / 2 + i)
    kv_scales: KVScales = ONES     # where an 8-bit cache stores none
    rotary_start: int = 0          # the first dimension that is rotated; those before it are a latent
    has_keys: bool = True          # False: queries alone are rotated, and nothing is written

    def __post_init__(self) -> None:
        if self.cos_sin is not None:
            rotated = f"{self.rotary_dim} dimensions of {self.heads} from {self.rotary_start} on are rotated"
            assert self.rotary_start + self.rotary_dim <= self.heads.head_dim, rotated
            assert dtype_name(self.cos_sin.dtype) == "float32", f"a rotary table of {self.cos_sin.dtype}"
            assert is_contiguous(self.cos_sin), "a rotary table with gaps"

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated; 0: none."""
        return 0 if self.cos_sin is None else self.cos_sin.shape[1]

    @property
    def value_dim(self) -> int:
        """Values are the first so many dimensions of keys; 0: they are stored."""
        return self.rotary_start

    @property
    def features(self) -> tuple[str, ...]:
        """Features beyond plain rotation, by their names in the support table."""
        found = {
            "interleaved rotary": self.is_interleaved, "rotary of later dimensions": self.rotary_start > 0,
            "keys and values of another layer": not self.has_keys,
        }  # fmt: skip
        return tuple(name for name, is_used in found.items() if is_used)


WriteKV = Callable[  # as `write_kv`
    [RotarySpec, Tensor, Tensor | None, Tensor | None, Tensor, Tensor, Tensor, Tensor], Tensor
]
