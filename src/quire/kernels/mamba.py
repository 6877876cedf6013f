"""Mamba-2, a recurrence over a state per sequence (Dao and Gu 2024): a layer's weights, and the op's signature.

Each head has a state S [key_dim, value_dim], which a token multiplies with a decay and adds to. Heads of a group share
its keys and queries, which the paper calls B and C. What a sequence needs of its past lies in slots, as with gated
delta nets: S, and a ring of the inputs of the last tokens (`quire.kernels.delta_net`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from quire.core.arrays import dtype_name
from quire.kernels.delta_net import MAX_TAPS, TILE, DeltaHeads, StateRows
from quire.kernels.layers import SumHook
from quire.kernels.tensors import Tensor


class MambaHeads(DeltaHeads):
    """Sizes of a Mamba-2: a group has a key head, a head is a value head."""

    __slots__ = ()

    @property
    def inputs(self) -> int:
        """Numbers that a token adds to the state's ring: its channels, and a time step of each head."""
        return self.channels + self.num_value_heads


class NormSpan(NamedTuple):
    """A norm over groups of heads of which this rank of tensor parallelism has a part: the ranks add up its squares."""

    sum: SumHook      # float32 [num_tokens, num_groups]: a group's sums of squares, zeros of groups of other ranks
    num_groups: int   # over all ranks
    first_group: int  # the first of this rank
    width: int        # columns of a group over all ranks


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """A Mamba-2's weights but for its projections. Channels are those of values, keys and queries, in this order."""

    heads: MambaHeads
    conv_weight: Tensor        # [taps, channels] float32, that of the token itself last
    conv_bias: Tensor | None   # [channels] float32
    rate: Tensor               # [num_value_heads] float32, above 0: the decay is exp(-rate * time step)
    rate_bias: Tensor          # [num_value_heads] float32, added to time steps before their softplus
    skip: Tensor               # [num_value_heads] float32, the factor of a token's value in its result
    norm_weight: Tensor | None  # [width] float32; None: results are gated and not normed
    norm_eps: float
    length: int                # entries of the ring
    is_norm_first: bool = False  # the gate multiplies what is normed; else what will be
    gate_factor: float = 1.0   # on gates
    rate_factor: float = 1.0   # on time steps, before their bias
    span: NormSpan | None = None  # None: this rank has whole groups, or nothing is normed

    def __post_init__(self) -> None:
        heads = self.heads
        assert heads.num_value_heads % heads.num_key_heads == 0, f"{heads}: uneven groups"
        assert heads.key_dim % TILE == heads.value_dim % TILE == 0, f"{heads}: dimensions are multiples of {TILE}"
        assert self.taps <= MAX_TAPS, f"a convolution over {self.taps} tokens"
        shapes = (
            (self.conv_weight, (self.taps, heads.channels)), (self.conv_bias, (heads.channels,)),
            *((each, (heads.num_value_heads,)) for each in (self.rate, self.rate_bias, self.skip)),
            (self.norm_weight, (heads.width,)),
        )  # fmt: skip
        for weight, shape in shapes:
            if weight is not None:
                assert tuple(weight.shape) == shape, f"{tuple(weight.shape)} for {shape}"
                assert dtype_name(weight.dtype) == "float32", f"weights of {weight.dtype}"

    @property
    def taps(self) -> int:
        """Tokens that the convolution sees, the token itself included."""
        return int(self.conv_weight.shape[0])


# spec, x [num_tokens, width + inputs] of gates, values, keys, queries and time steps, context_lens [num_seqs] int32,
# states uint8 [num_slots, num_bytes], query_starts [num_seqs + 1] int32, and rows: as `quire.kernels.reference.mamba`
MambaRule = Callable[[MambaSpec, Tensor, Tensor, Tensor, Tensor, StateRows], Tensor]
