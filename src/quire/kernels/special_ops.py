"""Ops of some model families, and of ranks: experts, heads, latents, convolutions, recurrent layers, exchanges."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.kernels.delta_net import DeltaInputs, DeltaNetSpec, DeltaRule, Gate
from quire.kernels.layers import ExpertLayer, GatherHook, Linear, Norm, SumHook
from quire.kernels.linear_weight import Table
from quire.kernels.mamba import MambaRule, MambaSpec
from quire.kernels.paged_attention import Heads
from quire.kernels.program import INPUT, Activations, LayerInputs, Names
from quire.kernels.short_conv import Convolve, ShortConvSpec
from quire.kernels.tensors import Tensor, added, clipped, concatenated_columns, empty_like, multiplied, scaled


@dataclass(frozen=True, slots=True)
class ExpertsOp:
    """out = the weighted results of each row's experts; of ranks, each has some of the columns.

    The router scores x, or another activation.
    """

    name: str
    experts: ExpertLayer
    x: str
    out: str
    scored: str | None = None   # None: x

    reads = Names("x", "scored")
    writes = Names("out")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        scored = None if self.scored is None else activations[self.scored]
        activations[self.out] = self.experts(activations[self.x], scored)


@dataclass(frozen=True, slots=True)
class TakeHeadsOp:
    """query, key and value of a part of the heads, consecutive ones: views."""

    name: str
    heads: Heads                # all heads
    first: tuple[int, int]      # the first query head, and the first KV head
    taken: Heads
    query: str = "query"
    key: str = "key"
    value: str = "value"

    reads = Names("query", "key", "value")
    writes = Names("query", "key", "value")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Make the views; nothing is computed."""
        first_query, first_kv = self.first
        queries = activations[self.query][:, first_query : first_query + self.taken.num_heads]
        activations[self.query] = queries
        for name in (self.key, self.value):
            activations[name] = activations[name][:, first_kv : first_kv + self.taken.num_kv_heads]


@dataclass(frozen=True, slots=True)
class QKNormOp:
    """Norms of queries and keys, in place, over each head or over all heads of a token together.

    A norm over each head may have a weight of its own for each.
    """

    name: str
    query_norm: Norm
    key_norm: Norm
    heads: Heads
    is_over_heads: bool = False  # all heads of a token together
    query: str = "query"
    key: str = "key"

    reads = Names("query", "key")
    writes = Names("query", "key")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        for name, norm in ((self.query, self.query_norm), (self.key, self.key_norm)):
            heads = activations[name]
            shape = (len(heads), heads.shape[1] * heads.shape[2]) if self.is_over_heads else heads.shape
            activations[name] = norm(heads.reshape(shape))[0].reshape(heads.shape)


@dataclass(frozen=True, slots=True)
class HeadNormOp:
    """out = norm(x) over each of `num_rows` parts of a token's columns, such as heads; out may be x.

    out [num_tokens, num_rows, width], or without `is_of_heads` [num_tokens, num_rows * width], as x is.
    """

    name: str
    norm: Norm
    x: str
    out: str
    num_rows: int
    width: int
    is_of_heads: bool = True

    reads = Names("x")
    writes = Names("out")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Normalize, in one op of the back end."""
        x = activations[self.x]
        activations[self.out] = self.norm(x.reshape(len(x), self.num_rows, self.width))[0].reshape(x.shape)


@dataclass(frozen=True, slots=True)
class LookupOp:
    """out [num_tokens, width] = rows of a table for the token ids of a step, times a factor."""

    name: str
    table: Table
    embed: Callable[..., Tensor]
    factor: float
    out: str
    reads: tuple[str, ...] = ()

    writes = Names("out")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Look the rows up, in one op of the back end."""
        assert inputs.token_ids is not None, "a step without token ids"
        activations[self.out] = scaled(self.embed(self.table, inputs.token_ids), self.factor)


@dataclass(frozen=True, slots=True)
class MultiplyOp:
    """x = x * y[:, first:first + width], x of that width."""

    name: str
    x: str
    y: str
    first: int
    width: int
    num_columns: int  # y's

    reads = Names("x", "y")
    writes = Names("x")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        factors = activations[self.y][:, self.first : self.first + self.width]
        activations[self.x] = multiplied(activations[self.x], factors)


@dataclass(frozen=True, slots=True)
class ShortConvOp:
    """out [num_tokens, width] = the gated convolution of x [num_tokens, 3 * width], consumed, over paged tails."""

    name: str
    layer: int                  # index of the caches
    spec: ShortConvSpec
    convolve: Convolve
    x: str
    out: str

    reads = Names("x")
    writes = Names("out")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Convolve, in one op of the back end."""
        activations[self.out] = self.convolve(
            self.spec, activations.pop(self.x), inputs.positions, inputs.keys[self.layer], inputs.slot_mapping,
            inputs.metadata,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeltaNetOp:
    """out [num_tokens, width] = a gated delta net of its inputs, all consumed, over the states of sequences.

    The columns of gates are behind those of x, and those of decays behind shares in `rates`, unless they have names.
    """

    name: str
    layer: int                  # index of the states
    spec: DeltaNetSpec
    compute: DeltaRule
    x: str
    rates: str
    out: str
    gates: str | None = None
    decays: str | None = None

    reads = Names("x", "rates", "gates", "decays")
    writes = Names("out")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Compute, in one op of the back end."""
        assert inputs.state_rows is not None, "a step without slots of states"
        (x, gates), (shares, decays) = (
            (both[:, :width], both[:, width:] if name is None else activations.pop(name))
            for both, width, name in (
                (activations.pop(self.x), self.spec.heads.channels, self.gates),
                (activations.pop(self.rates), self.spec.heads.num_value_heads, self.decays),
            )
        )
        activations[self.out] = self.compute(
            self.spec, DeltaInputs(x, gates, shares, decays), inputs.metadata.context_lens, inputs.states[self.layer],
            inputs.metadata.query_starts, inputs.state_rows,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MambaOp:
    """out [num_tokens, width] = a Mamba-2 of x, consumed, over the states of sequences."""

    name: str
    layer: int                  # index of the states
    spec: MambaSpec
    compute: MambaRule
    x: str
    out: str

    reads = Names("x")
    writes = Names("out")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Compute, in one op of the back end."""
        assert inputs.state_rows is not None, "a step without slots of states"
        activations[self.out] = self.compute(
            self.spec, activations.pop(self.x), inputs.metadata.context_lens, inputs.states[self.layer],
            inputs.metadata.query_starts, inputs.state_rows,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GateOp:
    """x = x * sigmoid(gate), of one width."""

    name: str
    x: str
    gate: str
    width: int
    compute: Gate

    reads = Names("x", "gate")
    writes = Names("x")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Multiply, in one op of the back end."""
        activations[self.x] = self.compute(activations[self.x], activations[self.gate])


@dataclass(frozen=True, slots=True)
class PositionScaleOp:
    """Queries multiplied by a factor of their position, in place."""

    name: str
    heads: Heads
    factors: Tensor             # [positions] float32, rounded to the model's dtype where they multiply
    query: str = "query"

    reads = Names("query")
    writes = Names("query")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        query = activations[self.query]
        activations[self.query] = multiplied(query, self.factors[inputs.positions][:, None, None])


@dataclass(frozen=True, slots=True)
class ScaleOp:
    """x multiplied by a factor."""

    name: str
    x: str
    width: int
    factor: float

    reads = Names("x")
    writes = Names("x")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        activations[self.x] = scaled(activations[self.x], self.factor)


@dataclass(frozen=True, slots=True)
class AddRowsOp:
    """Columns from `first` on of what a step adds to some rows, added to those of x in place; nothing in most steps."""

    name: str
    x: str
    first: int
    width: int

    reads = Names("x")
    writes = Names("x")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Add, to x before it is added to the stream: rows of no image keep their bits."""
        if inputs.added is not None:
            rows, values = inputs.added
            x = activations[self.x]
            x[rows] = added(x[rows], values[:, self.first : self.first + self.width])


@dataclass(frozen=True, slots=True)
class TapOp:
    """out = the stream, or x + the stream where x is not added to it yet, in memory of its own; both are kept."""

    name: str
    x: str | None
    out: str
    width: int
    stream: str = INPUT

    reads = Names("x", "stream")
    writes = Names("out")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        stream = activations[self.stream]
        activations[self.out] = scaled(stream, 1.0) if self.x is None else added(activations[self.x], stream)


@dataclass(frozen=True, slots=True)
class JoinOp:
    """out = activations [num_tokens, any] side by side."""

    name: str
    reads: tuple[str, ...]
    out: str

    writes = Names("out")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        activations[self.out] = concatenated_columns([activations[name] for name in self.reads])


@dataclass(frozen=True, slots=True)
class ClipOp:
    """Queries, keys and values clipped to [-limit, limit], in place."""

    name: str
    heads: Heads
    limit: float
    query: str = "query"
    key: str = "key"
    value: str = "value"

    reads = Names("query", "key", "value")
    writes = Names("query", "key", "value")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        for name in self.reads:
            activations[name] = clipped(activations[name], self.limit)


@dataclass(frozen=True, slots=True)
class SplitLatentOp:
    """Split of a projection into what queries are made of and the key of a token (DeepSeek-AI 2024, section 2.1).

    query [num_tokens, query_width]: the first columns, normalized if there is a norm. key [num_tokens, 1, key_width]:
    the rest; its first dimensions, as many as `key_norm` has, are a latent, which is normalized.
    """

    name: str
    query_norm: Norm | None
    key_norm: Norm
    query_width: int
    key_width: int
    latent_dim: int             # dimensions of `key_norm`
    qkv: str = "qkv"
    query: str = "query_latent"
    key: str = "key"

    reads = Names("qkv")
    writes = Names("query", "key")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Normalize in the memory of the projection, which is consumed."""
        qkv = activations.pop(self.qkv)
        query, key = qkv[:, : self.query_width], qkv[:, self.query_width :]
        if self.query_norm is not None:
            query[:] = self.query_norm(query)[0]
        key[:, : self.latent_dim] = self.key_norm(key[:, : self.latent_dim])[0]
        activations[self.query] = query
        activations[self.key] = key.reshape(len(key), 1, self.key_width)


@dataclass(frozen=True, slots=True)
class HeadLinearOp:
    """Linear layers of heads: out [num_tokens, num_heads, outputs + num_passed] of x [.., inputs + num_passed].

    The last columns of a head pass through.
    """

    name: str
    linears: tuple[Linear, ...]  # one of each head, of one size
    sizes: tuple[int, int]       # inputs and outputs of each
    x: str
    out: str
    num_passed: int = 0
    is_flat: bool = False        # out is [num_tokens, columns of all heads]; x may be either

    reads = Names("x")
    writes = Names("out")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Multiply head by head."""
        x, (num_inputs, num_outputs) = activations[self.x], self.sizes
        heads = x.reshape(len(x), len(self.linears), num_inputs + self.num_passed)
        out = empty_like(x, (len(x), len(self.linears), num_outputs + self.num_passed))
        for i, linear in enumerate(self.linears):
            out[:, i, :num_outputs] = linear(heads[:, i, :num_inputs])
        out[:, :, num_outputs:] = heads[:, :, num_inputs:]
        activations[self.out] = out.reshape(len(x), out.shape[1] * out.shape[2]) if self.is_flat else out


@dataclass(frozen=True, slots=True)
class GatherOp:
    """Exchange of an activation between ranks: each has some of its columns before, and all of them behind."""

    name: str
    x: str
    hook: GatherHook

    reads = Names("x")
    writes = Names("x")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        activations[self.x] = self.hook(activations[self.x])


@dataclass(frozen=True, slots=True)
class SummedLinearOp:
    """out = the sum over ranks of linear(x), with what adapters add, of which each has the inputs in `inputs`.

    The results of `linear` are of the hook's `partial_dtype`, and its outputs are not activated.
    """

    name: str
    linear: Linear
    x: str
    out: str
    hook: SumHook
    inputs: tuple[int, int]  # [start, stop)

    reads = Names("x")
    writes = Names("out")

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Multiply all rows, and call the hook."""
        x = activations[self.x]
        addend = None if inputs.adapters is None else inputs.adapters.addend(self.name, x)
        own = self.linear(x) if addend is None else self.linear(x, addend)
        activations[self.out] = self.hook(own, x.dtype)
