"""Gated short convolution over paged tails (LFM2: Liquid AI 2025): a layer's weights, and the op's signature.

x [num_tokens, 3 * width] has gates g, gates h and values v in turn. u = g * v is convolved, each channel by itself,
over its last `taps` tokens, and out = h * convolution. What a token needs of those before it are their u: a state that
never grows. It is kept in the blocks of the KV cache, as a ring of the last `length` tokens of each block: whatever
moves, shares, copies or finds a block has the state at its end, too (docs/decisions/0038).
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.arrays import dtype_name
from quire.kernels.paged_attention import AttentionMetadata
from quire.kernels.tensors import Tensor

MAX_TAPS = 16  # csrc/short_conv.cpp


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """Convolution of a layer. `length`: of the ring in a block of more tokens than that."""

    weight: Tensor              # [taps, width] float32, that of the token itself last
    bias: Tensor | None         # [width] float32
    length: int

    def __post_init__(self) -> None:
        assert self.taps <= MAX_TAPS, f"a convolution over {self.taps} tokens"
        assert dtype_name(self.weight.dtype) == "float32", f"weights of {self.weight.dtype}"

    @property
    def taps(self) -> int:
        """Tokens that a token sees, itself included."""
        return int(self.weight.shape[0])

    @property
    def width(self) -> int:
        """Channels."""
        return int(self.weight.shape[1])


# spec, x, positions [num_tokens] int64, tails [num_blocks, min(length, block_size), width], slots [num_tokens] int64,
# metadata: as `quire.kernels.reference.short_conv`
Convolve = Callable[[ShortConvSpec, Tensor, Tensor, Tensor, Tensor, AttentionMetadata], Tensor]
