"""Gated delta rule over a state per sequence (Yang et al. 2025): a layer's weights, and the ops' signatures.

A head of a layer has a state S [key_dim, value_dim]: a token multiplies it with a decay and replaces what it holds for
the token's key by a part of the token's value. In front of it is a causal convolution of each channel, behind it a
norm and a gate. What a sequence needs of its past has one size whatever its length, and it lies in slots beside the KV
cache: S in float32 after `committed` tokens, and the inputs of the tokens since then. A step goes through those again
before its own tokens, so that tokens which are taken back are never in S. With a decay of each row of S the rule is
that of Kimi Delta Attention (Kimi Team 2025).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from quire.core.arrays import dtype_name
from quire.core.config import ELEMENT_BYTES
from quire.kernels.tensors import Library, Tensor

TILE = 16               # value dimensions that stand together in S, and the unit of heads (csrc/state_piece.hpp)
MAX_TAPS = 16           # csrc/state_piece.hpp
SLOT_UNIT = 64          # bytes: slots are multiples of it


class DeltaHeads(NamedTuple):
    """Sizes of a gated delta net; several value heads read a key head."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    has_row_decays: bool = False  # rows of S decay each by itself, else all of a head alike

    @property
    def channels(self) -> int:
        """Columns of queries, keys and values, which are convolved."""
        return 2 * self.num_key_heads * self.key_dim + self.width

    @property
    def width(self) -> int:
        """Columns of values, of gates and of results."""
        return self.num_value_heads * self.value_dim

    @property
    def num_decays(self) -> int:
        """Decays of a token, over all heads."""
        return self.num_value_heads * (self.key_dim if self.has_row_decays else 1)

    @property
    def inputs(self) -> int:
        """Numbers that a token adds to the state's ring: its channels, a share of each value head, and its decays."""
        return self.channels + self.num_value_heads + self.num_decays


@dataclass(frozen=True, slots=True)
class StateShape:
    """A layer's part of a slot: S, then a ring of the inputs of the last tokens, that of token p at p % `length`.

    S is float32 [value heads, value_dim / TILE, key_dim, TILE].
    """

    heads: DeltaHeads
    length: int   # tokens in the ring: those that a convolution needs, and those after S
    dtype: str    # elements of the ring

    @property
    def ring_offset(self) -> int:
        """Bytes before the ring."""
        return 4 * self.heads.key_dim * self.heads.width

    @property
    def num_bytes(self) -> int:
        """Bytes of the part, a multiple of SLOT_UNIT."""
        ring = self.length * self.heads.inputs * ELEMENT_BYTES[self.dtype]
        return -(-(self.ring_offset + ring) // SLOT_UNIT) * SLOT_UNIT


def ring_length(taps: int, max_truncated: int) -> int:
    """Return the entries of a ring: S may lag behind by the tokens that can be taken back, and by one."""
    return taps - 1 + max_truncated + 1


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """A gated delta net's weights but for its projections."""

    heads: DeltaHeads
    conv_weight: Tensor   # [taps, channels] float32, that of the token itself last
    rate: Tensor          # [num_value_heads] float32, above 0: the decay is exp(-rate * softplus(a + rate_bias))
    rate_bias: Tensor     # [num_decays] float32
    norm_weight: Tensor   # [value_dim] float32
    norm_eps: float
    length: int           # entries of the ring
    is_tiled: bool = False  # value head i reads key head i % num_key_heads, else heads that share one are neighbours
    max_share: float = 1.0  # a token's value replaces sigmoid(b) * max_share of what S holds for its key
    is_gate_sigmoid: bool = False  # results are times sigmoids of gates, not times silu of them

    def __post_init__(self) -> None:
        heads = self.heads
        assert heads.num_value_heads % heads.num_key_heads == 0, f"{heads}: uneven groups"
        assert heads.key_dim % TILE == heads.value_dim % TILE == 0, f"{heads}: dimensions are multiples of {TILE}"
        assert self.taps <= MAX_TAPS, f"a convolution over {self.taps} tokens"
        shapes = (
            (self.conv_weight, (self.taps, heads.channels)), (self.rate, (heads.num_value_heads,)),
            (self.rate_bias, (heads.num_decays,)), (self.norm_weight, (heads.value_dim,)),
        )  # fmt: skip
        for weight, shape in shapes:
            assert tuple(weight.shape) == shape, f"{tuple(weight.shape)} for {shape}"
            assert dtype_name(weight.dtype) == "float32", f"weights of {weight.dtype}"

    @property
    def taps(self) -> int:
        """Tokens that the convolution sees, the token itself included."""
        return int(self.conv_weight.shape[0])


@dataclass(frozen=True, slots=True)
class StateRows:
    """Slots of a step's sequences; int32. Its first token is token `start` of the sequence, and it has `count`.

    No slot is written by two sequences, or written by one and read by another. Positions of snapshots are above
    `committed` and at most `commit_to`, and that is at most start + count.
    """

    read: Tensor       # [num_seqs] slot of the state; -1: the sequence begins here
    committed: Tensor  # [num_seqs] tokens that S has seen there; the ring has those of [committed, start)
    write: Tensor      # [num_seqs] slot of the new state, may be `read`; -1: nothing is kept
    commit_to: Tensor  # [num_seqs] tokens that S shall have seen there; the ring then has those up to start + count
    snapshots: Tensor  # [num_seqs, MAX_SNAPSHOTS, 2]: (position, slot): the state after so many tokens; slot -1: none

    def taken(self, library: Library) -> "StateRows":
        """Return rows of arrays as ones of the library's tensors."""
        each = (self.read, self.committed, self.write, self.commit_to, self.snapshots)
        return StateRows(*map(library.tensor, each))


class DeltaInputs(NamedTuple):
    """A token's inputs of a gated delta net."""

    x: Tensor       # [num_tokens, channels] of queries, keys and values
    gates: Tensor   # [num_tokens, width], z
    shares: Tensor  # [num_tokens, num_value_heads], b
    decays: Tensor  # [num_tokens, num_decays], a


# spec, inputs, context_lens [num_seqs] int32, states uint8 [num_slots, num_bytes], query_starts [num_seqs + 1] int32,
# rows: the arguments of `quire.kernels.reference.delta_net`
DeltaRule = Callable[[DeltaNetSpec, DeltaInputs, Tensor, Tensor, Tensor, StateRows], Tensor]

# x, gate, both [num_tokens, width]: x * sigmoid(gate)
Gate = Callable[[Tensor, Tensor], Tensor]
