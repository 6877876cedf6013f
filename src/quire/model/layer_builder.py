"""Construction of layer programs: the layers of a spec as op records, with their weights read.

The activations are `stream`, the residual stream; `x`, a sublayer's input and then its output (parallel sublayers:
`normed`, `x` and `y`, and `scored` by the router of experts that stand beside a feed-forward); `qkv` and its views
`query`, `key`, `value`; `attended`; `inner`, between the two projections of the feed-forward; `tap.N`, streams that are
results, too. An op's name is `layers.N.` and a name given here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.kernels import program as ops
from quire.kernels import special_ops
from quire.kernels.back_end import require
from quire.kernels.delta_net import DeltaHeads, DeltaNetSpec, ring_length
from quire.kernels.kv_cache import ONES, KVScales
from quire.kernels.layers import Expert, ExpertLayer, ExpertSplit, Linear, Norm, Routing
from quire.kernels.mamba import MambaHeads, MambaSpec, NormSpan
from quire.kernels.paged_attention import AttentionSpec, Heads, RotarySpec
from quire.kernels.program import INPUT, Op, Program
from quire.kernels.short_conv import ShortConvSpec
from quire.kernels.tensors import DType, Tensor, contiguous, exp
from quire.model.shapes import (
    AttentionShapes,
    DecoderShapes,
    DeltaNetShapes,
    ExpertShapes,
    LatentShapes,
    LayerShapes,
    LinearShape,
    MambaShapes,
    NormShape,
    ShortConvShapes,
)
from quire.model.sharding import DELTA_OPS, Cut, Range, Ranks, Shard, divides_norm, has_whole, shifted
from quire.model.spec import (
    Attention,
    DecoderSpec,
    DeltaNet,
    Experts,
    LatentAttention,
    LayerInput,
    Mamba,
    NormKind,
    Place,
    Rotary,
    ShortConv,
    SpecError,
)
from quire.model.weights import WeightReader

JOINED = "joined"  # [num_tokens, 2 * hidden_size], what the first layer of an EAGLE-3 head reads; the caller has it
LATENT_NORM_EPS = 1e-6  # whatever other norms have: in the code of all families with latents
OFFSETS: dict[NormKind, float] = {"rms_float": 0.0, "rms_offset": 1.0}  # added to weights, in float32


@dataclass(frozen=True, slots=True)
class ProgramInputs:
    """Inputs that the layers of a decoder share, besides its spec."""

    cos_sin: Mapping[Rotary, Tensor]   # as in `rotary_table`, for each of `spec.rotaries`
    progress: NDArray[np.int64]        # [1], one more after each layer
    ranks: Ranks | None = None         # tensor parallelism; None: one rank
    reads_kv_scales: bool = False      # scales of an 8-bit KV cache are the checkpoint's; else 1
    max_truncated: int = 1             # most tokens that a step computes and the next one takes back


def build_program(
    spec: DecoderSpec, weights: WeightReader, shared: ProgramInputs, layers: range | None = None
) -> Program:
    """Read the layers, or those of a range, and the final norm behind the last; return their program, of single ops."""
    found, num_caches, num_states, is_summed = list[Op](), 0, 0, True
    layers, caches = range(spec.num_layers) if layers is None else layers, dict[int, int]()
    if spec.layer_input is not None:
        found += _layer_input_ops(spec, weights, spec.layer_input)
    for index in layers:
        attention = spec.layers[index].attention
        source = None if attention is None else attention.cache_layer
        kept = num_caches if source is None else caches[source], num_states
        layer = LayerBuilder(spec, index, weights, shared, kept, is_summed=is_summed)
        layer.build()
        mixers = spec.layers[index].mixers
        own_states = sum(isinstance(mixer, DeltaNet | Mamba) for mixer in mixers)
        num_states += own_states
        caches[index] = num_caches
        num_caches += len(mixers) - own_states - (source is not None)
        found += layer.ops
        is_summed = layer.is_summed
    shape = DecoderShapes.of(spec).final_norm if layers.stop == spec.num_layers else None
    if shape is not None:
        found.append(_norm_of_stream("final_norm", make_norm(spec, weights, shape), "x", is_summed=is_summed))
    elif not is_summed:
        found.append(ops.AddOp("final_sum", "x", INPUT, "x", spec.hidden_size))
    return Program(tuple(found), INPUT if shape is None and is_summed else "x")


def _layer_input_ops(spec: DecoderSpec, weights: WeightReader, own: LayerInput) -> list[Op]:
    """Return the ops that make the inputs of all layers, `layer_inputs` [num_tokens, num_layers * size]."""
    shapes, name, looked_up = DecoderShapes.of(spec), "layer_inputs", "layer_rows"
    assert shapes.layer_table is not None
    assert shapes.layer_projection is not None
    assert shapes.layer_projection_norm is not None
    table, width = weights.token_table(shapes.layer_table).taken, shapes.layer_table.width
    factor = float(weights.rounded(np.array([own.size**0.5], np.float32))[0])
    norm = make_norm(spec, weights, shapes.layer_projection_norm)
    return [
        special_ops.LookupOp(f"{name}.lookup", table, weights.back_end.embed, factor, looked_up),
        ops.LinearOp(f"{name}.projection", weights.dense_linear(shapes.layer_projection), INPUT, name),
        special_ops.ScaleOp(f"{name}.scale", name, width, spec.hidden_size**-0.5),
        special_ops.HeadNormOp(f"{name}.norm", norm, name, name, spec.num_layers, own.size, is_of_heads=False),
        ops.AddOp(f"{name}.sum", name, looked_up, name, width),
        special_ops.ScaleOp(f"{name}.mean", name, width, 2**-0.5),
    ]


def with_added_rows(program: Program, width: int, num_layers: int) -> Program:
    """Return a program of layers with norms before sublayers that adds rows of a step behind each of the first ones."""
    found = list[Op]()
    for op in program.ops:
        found.append(op)
        index = next((index for index in range(num_layers) if op.name == f"layers.{index}.end"), None)
        if index is not None:
            found.append(special_ops.AddRowsOp(f"layers.{index}.rows", "x", width * (index + 1), width))
    return Program(tuple(found), program.result)


def with_taps(program: Program, width: int, layers: Sequence[int], num_layers: int) -> Program:
    """Return a program with a result that has, behind its columns, the streams in front of some layers.

    `num_layers` in `layers` is the stream behind the last layer, before its norm.
    """
    taps = dict[int, special_ops.TapOp]()  # keyed by the place of the op behind each
    for number, layer in enumerate(layers):
        stem = "final_" if layer == num_layers else f"layers.{layer}."
        names = (place for place, op in enumerate(program.ops) if op.name.startswith(stem))
        place = next(names, len(program.ops))
        missing = _added_to_stream(program.ops[place]) if place < len(program.ops) else None
        taps[place] = special_ops.TapOp(f"tap.{layer}", missing, f"tap.{number}", width)
    found = list[Op]()
    for place, op in enumerate((*program.ops, None)):
        found += [taps[place]] if place in taps else []
        found += [] if op is None else [op]
    joined = special_ops.JoinOp("taps", (program.result, *(tap.out for tap in taps.values())), "tapped")
    return Program((*found, joined), joined.out)


def _added_to_stream(op: Op) -> str | None:
    """Return the activation that an op adds to the stream; None: it adds none."""
    if isinstance(op, ops.NormOp):
        return op.x if op.residual == INPUT else None
    return op.x if isinstance(op, ops.AddOp) and op.y == INPUT else None


def make_norm(
    spec: DecoderSpec, weights: WeightReader, shape: NormShape, heads: Range | None = None, *, eps: float | None = None
) -> Norm:
    """Read a norm over the last dimension; of heads with weights of their own, those in a range; None: all."""
    weight, bias = weights.norm(shape, heads)
    eps = spec.norm_eps if eps is None else eps
    return weights.back_end.norm(weight, bias, eps, spec.norm == "layer", OFFSETS.get(spec.norm))


def _norm_of_stream(name: str, norm: Norm, out: str, *, is_summed: bool) -> Op:
    if is_summed:
        return ops.NormOp(name, norm, INPUT, out)
    return ops.NormOp(name, norm, "x", out, residual=INPUT, summed=INPUT)


class LayerBuilder:
    """Builder of one layer. Each method appends ops, so that calls are in the order in which a layer runs.

    `kept`: places of what the layer keeps, if it has a mixer, among caches and among states. `is_summed`: the stream
    has the output of the last sublayer; else that is in `x`, and the next norm adds it.
    """

    def __init__(
        self, spec: DecoderSpec, index: int, weights: WeightReader, shared: ProgramInputs, kept: tuple[int, int], *,
        is_summed: bool,
    ) -> None:  # fmt: skip
        self.ops: list[Op] = []
        self.is_summed = is_summed
        self._spec, self._layer, (self._cache_index, self._state_index) = spec, spec.layers[index], kept
        self._index, self._stem = index, f"layers.{index}."
        self._shapes = LayerShapes.of(spec, self._layer)
        self._whole, self._weights, self._shared, self._ranks = weights, weights.layer(index), shared, shared.ranks
        self._parts = list(self._layer.parts)

    def build(self) -> None:
        """Append the whole layer. Raises SpecError if the family adds a part behind an op that the layer lacks."""
        kind = "parallel" if self._layer.is_parallel else self._layer.norm_position
        {"parallel": self._parallel, "post": self._post_norm, "output": self._output_norm}.get(kind, self._pre_norm)()
        if self._spec.layer_input is not None:
            self._layer_input(self._spec.layer_input)
        if self._shapes.scale is not None:
            self.sum_stream("layer_sum")
            (scale,) = self._weights.vector(self._shapes.scale)
            self.ops.append(
                special_ops.ScaleOp(f"{self._stem}scale", INPUT, self._spec.hidden_size, float(scale))
            )
        if self._parts:
            name, place = self._parts[0].name, self._parts[0].after
            raise SpecError(f"layer part {name}: a layer has no op {place!r} to follow")
        self.ops.append(ops.CountLayerOp(f"{self._stem}end", self._shared.progress))

    def _pre_norm(self) -> None:
        """Append norm, attention, add; norm, feed-forward, add (Radford et al. 2019), maybe with norms of outputs."""
        if self._layer.mixer is not None:
            self._mixers()
        if self._layer.experts_beside is not None:
            self._feed_forward_with_experts(self._layer.experts_beside)
        elif self._layer.feed_forward is not None:
            before, behind = self._layer.feed_forward_multipliers
            source = self.norm_of_stream("feed_forward_norm", self._shapes.feed_forward_norm, "x")
            self._scale("feed_forward_in", source, before)
            self.feed_forward(source, "x")
            self._scale("feed_forward", "x", behind)

    def _mixers(self) -> None:
        """Append the norm and the mixer, or both mixers and their sum (Falcon-H1: TII 2025)."""
        beside, (factor, factor_beside) = self._layer.beside, self._layer.mixer_multipliers
        source = JOINED
        if self._layer.attention is None or not self._layer.attention.reads_embedding:
            out = "x" if beside is None else "normed"
            source = self.norm_of_stream("attention_norm", self._shapes.attention_norm, out)
        if beside is not None:
            assert self._shapes.beside is not None
            self._mamba(beside, self._shapes.beside, source, "y")
            if self._ranks is not None:
                self.exchange("beside", "y", self._ranks.shard.cut(self._spec.hidden_size))
            self._scale("beside", "y", factor_beside)
        self.mixer(source)
        self._scale("mixer", "x", factor)
        if beside is not None:
            self.add("mixers", "x", "y", "x")

    def _scale(self, name: str, x: str, factor: float) -> None:
        """Append x = factor * x, of hidden states, unless that changes nothing."""
        if factor != 1:
            self.ops.append(special_ops.ScaleOp(f"{self._stem}{name}_multiplier", x, self._spec.hidden_size, factor))

    def _feed_forward_with_experts(self, mixture: Experts) -> None:
        """Append a dense feed-forward and experts, each of its own norm of the stream, and the norm of their sum."""
        norms, shapes, width = self._shapes.expert_norms, self._shapes.experts, self._spec.hidden_size
        assert norms is not None
        assert shapes is not None
        require(self._weights.back_end.name, ["experts beside a feed-forward"])
        source = self.norm_of_stream("feed_forward_norm", self._shapes.feed_forward_norm, "x")
        self._norm("experts_norm", norms.norm, INPUT, "normed")
        self._norm("router_norm", norms.router_norm, INPUT, "scored")
        self.ops.append(special_ops.ScaleOp(f"{self._stem}router_scale", "scored", width, width**-0.5))
        self._dense(source, "x")
        if self._ranks is not None:
            self.exchange("feed_forward_out", "x", self._ranks.shard.cut(width))
        self._norm("dense_output_norm", norms.dense_output_norm, "x", "x")
        experts = self._experts(mixture, shapes)
        self.ops.append(special_ops.ExpertsOp(f"{self._stem}experts", experts, "normed", "y", "scored"))
        if self._ranks is not None:
            self.exchange("experts", "y", self._ranks.shard.cut(width))
        self._norm("experts_output_norm", norms.output_norm, "y", "y")
        self.add("sublayers", "x", "y", "x")
        assert self._shapes.feed_forward_output_norm is not None
        self._norm("feed_forward_out_norm", self._shapes.feed_forward_output_norm, "x", "x")
        self.is_summed = False

    def _layer_input(self, own: LayerInput) -> None:
        """Append what the layer adds of its input: a gate of the stream times it, projected and normalized."""
        shapes, shard = self._shapes, None if self._ranks is None else self._ranks.shard
        assert shapes.layer_gate is not None
        assert shapes.layer_out is not None
        is_split = shard is not None and shard.mode == "gather"
        both = shapes.layer_gate, shapes.layer_out
        gate_ranges, out_ranges = (self._ranges(each) if is_split else None for each in both)
        self.sum_stream("feed_forward_sum")
        self.linear("layer_gate", shapes.layer_gate, INPUT, "layer_gate", gate_ranges)
        if shard is not None:
            self.exchange("layer_gate", "layer_gate", shard.cut(own.size))
        first, num_columns = self._index * own.size, self._spec.num_layers * own.size
        self.ops.append(special_ops.MultiplyOp(
            f"{self._stem}layer_input", "layer_gate", "layer_inputs", first, own.size, num_columns
        ))  # fmt: skip
        self.linear("layer_out", shapes.layer_out, "layer_gate", "x", out_ranges)
        self._end_sublayer("layer_out", "x", shapes.layer_output_norm)

    def _norm(self, name: str, shape: NormShape, x: str, out: str) -> None:
        self.ops.append(ops.NormOp(self._stem + name, make_norm(self._spec, self._weights, shape), x, out))

    def _post_norm(self) -> None:
        """Append attention, add, norm; feed-forward, add, norm (Vaswani et al. 2017)."""
        self.sum_stream("sum")
        self.mixer(INPUT)
        self.norm("attention_norm", self._shapes.attention_norm, "x", INPUT, residual=INPUT)
        self.feed_forward(INPUT, "x")
        self.norm("feed_forward_norm", self._shapes.feed_forward_norm, "x", INPUT, residual=INPUT)
        self.is_summed = True

    def _output_norm(self) -> None:
        """Append attention, norm, add; feed-forward, norm, add (OLMo et al. 2024)."""
        self.sum_stream("sum")
        self.mixer(INPUT)
        self.norm("attention_norm", self._shapes.attention_norm, "x", "x")
        self.sum_stream("attention_sum")
        self.feed_forward(INPUT, "x")
        self.norm("feed_forward_norm", self._shapes.feed_forward_norm, "x", "x")

    def _parallel(self) -> None:
        """Append sublayers that read the same stream; their sum is added to it (Wang and Komatsuzaki 2021)."""
        own_norm = self._shapes.feed_forward_norm
        self.mixer(
            self.norm_of_stream("attention_norm", self._shapes.attention_norm, "normed" if own_norm is None else "x")
        )
        if own_norm is not None:
            self.norm("feed_forward_norm", own_norm, INPUT, "normed")
        self.feed_forward("normed", "y")
        self.add("sublayers", "x", "y", "x")

    def norm_of_stream(self, name: Place, shape: NormShape | None, out: str) -> str:
        """Append a norm of the stream, which adds `x` first if that is missing; return the result's name.

        Without a shape the sum is the result.
        """
        if shape is None:
            self.sum_stream("sum")
            return INPUT
        norm = make_norm(self._spec, self._weights, shape)
        self._append(name, _norm_of_stream(self._stem + name, norm, out, is_summed=self.is_summed))
        self.is_summed = True
        return out

    def norm(self, name: Place, shape: NormShape | None, x: str, out: str, residual: str | None = None) -> None:
        """Append out = norm(x), or norm(x + residual)."""
        assert shape is not None, f"{self._stem}{name} has no weights"
        self._append(name, ops.NormOp(self._stem + name, make_norm(self._spec, self._weights, shape), x, out, residual))

    def add(self, name: str, x: str, y: str, out: str) -> None:
        """Append out = x + y, of hidden states."""
        self.ops.append(ops.AddOp(self._stem + name, x, y, out, self._spec.hidden_size))

    def sum_stream(self, name: str) -> None:
        """Append the addition of `x` to the stream, if that is missing."""
        if not self.is_summed:
            self.add(name, "x", INPUT, INPUT)
            self.is_summed = True

    def linear(self, name: Place, shape: LinearShape, x: str, out: str, ranges: list[Range] | None = None) -> None:
        """Append out = linear(x); `ranges`: the outputs that a rank computes, module by module."""
        self._append(name, ops.LinearOp(self._stem + name, self._weights.linear(shape, ranges), x, out))

    def dense_linear(self, name: Place, shape: LinearShape, x: str, out: str, ranges: list[Range] | None) -> None:
        """Append out = linear(x), a layer of floats whatever the checkpoint's format."""
        self._append(name, ops.LinearOp(self._stem + name, self._weights.dense_linear(shape, ranges), x, out))

    def exchange(self, name: str, x: str, cut: Cut) -> None:
        """Append the exchange of x, of which each rank has the columns of its part of `cut`, where ranks gather."""
        if self._ranks is not None and self._ranks.shard.mode == "gather":
            self.ops.append(special_ops.GatherOp(f"{self._stem}{name}_gather", x, self._ranks.gather(cut)))

    def mixer(self, source: str) -> None:
        """Append the mixer of `source`. The output is `x`, not added to the stream."""
        mixer, shapes = self._layer.mixer, self._shapes.mixer
        if isinstance(mixer, ShortConv):
            assert isinstance(shapes, ShortConvShapes)
            self._short_conv(mixer, shapes, source)
            self._end_sublayer("conv_out", "x", self._shapes.attention_output_norm)
            return
        if isinstance(mixer, DeltaNet):
            assert isinstance(shapes, DeltaNetShapes)
            self._delta_net(mixer, shapes, source)
            self._end_sublayer("delta_out", "x", self._shapes.attention_output_norm)
            return
        if isinstance(mixer, Mamba):
            assert isinstance(shapes, MambaShapes)
            self._mamba(mixer, shapes, source)
            self._end_sublayer("mamba_out", "x", self._shapes.attention_output_norm)
            return
        assert isinstance(mixer, Attention), "a mixer of no known kind"
        if isinstance(mixer, LatentAttention):
            assert isinstance(shapes, LatentShapes)
            self._latent_attention(mixer, shapes, source)
        else:
            assert isinstance(shapes, AttentionShapes)
            self._attention(mixer, shapes, source)
        self._end_sublayer("attention_out", "x", self._shapes.attention_output_norm)

    def _short_conv(self, conv: ShortConv, shapes: ShortConvShapes, source: str) -> None:
        """Append a short convolution of `source`: project, convolve over the tails of blocks, project.

        A rank has some of the channels.
        """
        weights, ranks, channels, cut = self._weights, self._ranks, (0, conv.width), None
        if ranks is not None:
            cut = ranks.shard.mixed_cut(conv)
            channels = cut.of(ranks.shard.rank)
        self.linear("conv_in", shapes.conv_in, source, "conv_inputs", self._ranges(shapes.conv_in))
        taps = weights.vector(shapes.weight, ranges=[(channels[0] * conv.taps, channels[1] * conv.taps)])
        bias = None if shapes.bias is None else weights.vector(shapes.bias, ranges=[channels])
        length = conv.taps - 1 + self._shared.max_truncated
        spec = ShortConvSpec(contiguous(taps.reshape(-1, conv.taps).T), bias, length)
        convolve = weights.back_end.short_conv
        op = special_ops.ShortConvOp(f"{self._stem}conv", self._cache_index, spec, convolve, "conv_inputs", "convolved")
        self._append("conv", op)
        if cut is not None:
            self.exchange("conv", "convolved", cut)
        self._mixer_out("conv_out", shapes.conv_out, "convolved", cut)

    def _delta_net(self, net: DeltaNet, shapes: DeltaNetShapes, source: str) -> None:
        """Append a gated delta net of `source`: project, compute over the states of sequences, project.

        A rank has its heads alone, and their states.
        """
        weights, vector, cut, own = self._weights, self._weights.vector, None, net
        ranges: dict[str, list[Range] | None] = dict.fromkeys(DELTA_OPS)
        numbers = biases = taps = gates = decays = None
        if self._ranks is not None:
            shard = self._ranks.shard
            cut, own, numbers = shard.mixed_cut(net), shard.local_net(net), [shard.heads(net).query]
            ranges = {op: shard.delta_ranges(net, op) for op in DELTA_OPS}
            channels = shifted(shard.delta_ranges(net, "delta_in"), shapes.delta_in.num_rows)
            taps = [(start * net.taps, stop * net.taps) for start, stop in channels[:3]]  # behind them are gates
            biases = ranges["decay_up"] if net.low_rank else numbers
        self.linear("delta_in", shapes.delta_in, source, "delta_inputs", ranges["delta_in"])
        self.dense_linear("delta_rates", shapes.delta_rates, source, "delta_rates", ranges["delta_rates"])
        if net.low_rank:
            assert shapes.gate_down is not None
            assert shapes.gate_up is not None
            assert shapes.decay_down is not None
            assert shapes.decay_up is not None
            gates, decays = "delta_gates", "delta_decays"
            self.linear("gate_down", shapes.gate_down, source, "delta_low", ranges["gate_down"])
            self.linear("gate_up", shapes.gate_up, "delta_low", gates, ranges["gate_up"])
            self.dense_linear("decay_down", shapes.decay_down, source, "delta_low", ranges["decay_down"])
            self.dense_linear("decay_up", shapes.decay_up, "delta_low", decays, ranges["decay_up"])
        rate = vector(shapes.rate, ranges=numbers)
        convs = (each for each in (shapes.conv_weight, shapes.key_conv, shapes.value_conv) if each is not None)
        spec = DeltaNetSpec(
            DeltaHeads(own.num_key_heads, own.num_value_heads, own.key_dim, own.value_dim, net.low_rank > 0),
            contiguous(vector(*convs, ranges=taps).reshape(-1, net.taps).T),
            -rate if net.has_plain_rate else exp(rate),
            vector(shapes.rate_bias, ranges=biases),
            vector(shapes.norm_weight),
            self._spec.norm_eps if net.norm_eps is None else net.norm_eps,
            ring_length(net.taps, self._shared.max_truncated),
            net.is_tiled,
            net.max_share,
            net.low_rank > 0,
        )
        compute, names = weights.back_end.delta_net, ("delta_inputs", "delta_rates", "mixed", gates, decays)
        self._append("delta", special_ops.DeltaNetOp(f"{self._stem}delta", self._state_index, spec, compute, *names))
        if cut is not None:
            self.exchange("delta", "mixed", cut)
        self._mixer_out("delta_out", shapes.delta_out, "mixed", cut)

    def _mamba(self, mamba: Mamba, shapes: MambaShapes, source: str, out: str = "x") -> None:
        """Append a Mamba-2 of `source`: project, compute over the states of sequences, project.

        The multipliers of what is convolved are in the convolution's weight, which is of float32. A rank has its heads
        alone, and their states. If ranks divide a group that is normed together, those that add exchange its squares,
        and of those that gather each has a part of the projections, and all heads.
        """
        weights, vector, cut, own = self._weights, self._weights.vector, None, mamba
        rows = taps = channels = numbers = columns = span = None
        if self._ranks is not None:
            shard = self._ranks.shard
            rows = shard.mamba_ranges(mamba)
            if not has_whole(mamba, shard.num_ranks, shard.mode):
                cut, own = shard.mixed_cut(mamba), shard.local_mamba(mamba)
                if divides_norm(mamba, shard.num_ranks):
                    first, num_groups = shard.heads(mamba).kv[0], mamba.num_groups
                    span = NormSpan(self._ranks.sum(num_groups), num_groups, first, mamba.width // num_groups)
                numbers, columns = [shard.heads(mamba).query], [cut.of(shard.rank)]
                channels = shifted(rows[1:4], mamba.sections[1:4])
                taps = [(start * mamba.taps, stop * mamba.taps) for start, stop in channels]
        self.linear("mamba_in", shapes.mamba_in, source, "mamba_inputs", rows)
        if self._ranks is not None and cut is None:
            self.exchange("mamba_in", "mamba_inputs", self._ranks.shard.cut(sum(mamba.sections)))
        gate, *multipliers, rate = mamba.multipliers
        conv_weight = vector(shapes.conv_weight, ranges=taps).reshape(-1, mamba.taps).T
        decay = vector(shapes.rate, ranges=numbers)
        if set(multipliers) != {1.0}:
            factors = np.repeat(np.array(multipliers, np.float32), own.sections[1:4])
            conv_weight = conv_weight * weights.taken(factors)
        spec = MambaSpec(
            MambaHeads(own.num_groups, own.num_heads, own.state_dim, own.head_dim),
            contiguous(conv_weight),
            None if shapes.conv_bias is None else vector(shapes.conv_bias, ranges=channels),
            -decay if mamba.has_plain_rate else exp(decay),
            vector(shapes.rate_bias, ranges=numbers),
            vector(shapes.skip, ranges=numbers),
            None if shapes.norm_weight is None else vector(shapes.norm_weight, ranges=columns),
            self._spec.norm_eps,
            ring_length(mamba.taps, self._shared.max_truncated),
            mamba.is_norm_first,
            gate,
            rate,
            span,
        )
        compute, names = weights.back_end.mamba, ("mamba_inputs", "mixed")
        self._append("mamba", special_ops.MambaOp(f"{self._stem}mamba", self._state_index, spec, compute, *names))
        if cut is not None:
            self.exchange("mamba", "mixed", cut)
        self._mixer_out("mamba_out", shapes.mamba_out, "mixed", cut, out)

    def _attention(self, attention: Attention, shapes: AttentionShapes, source: str) -> None:
        """Append attention of `source`: project, normalize per head, rotate and write to the cache, attend, project.

        A rank has its heads alone; a norm over all heads of a token needs them all, so there each rank projects them
        all.
        """
        weights, ranks = self._weights, self._ranks
        heads, taken, ranges = Heads(attention.num_heads, attention.num_kv_heads, attention.head_dim), None, None
        own = heads
        if ranks is not None:
            taken = ranks.shard.heads(attention)
            own = Heads(taken.num_heads, taken.num_kv_heads, attention.head_dim)
            if not attention.is_query_key_norm_over_heads:
                heads, ranges = own, list(ranks.shard.qkv_ranges(attention))
        self.linear("qkv", shapes.qkv, source, "qkv", ranges)
        gate = "gate" if attention.has_output_gate else None
        key, value = ("key", "value") if attention.cache_layer is None else (None, None)
        projected = None if attention.are_values_keys else value
        split = ops.SplitHeadsOp(f"{self._stem}split_heads", heads, key=key, value=projected, gate=gate)
        self._append("split_heads", split)
        if attention.has_value_norm and value is not None:
            shape = NormShape("", heads.head_dim, has_bias=False, has_weight=False)
            self._head_norm("value_norm", shape, projected or "key", value, heads.num_kv_heads)
        if shapes.query_norm is not None and key is None:
            self._head_norm("query_norm", shapes.query_norm, "query", "query", heads.num_heads)
        if shapes.query_norm is not None and shapes.key_norm is not None:
            query_heads, kv_heads = (None, None) if taken is None else taken
            norms = (
                make_norm(self._spec, weights, shapes.query_norm, query_heads),
                make_norm(self._spec, weights, shapes.key_norm, kv_heads),
            )
            is_over_heads = attention.is_query_key_norm_over_heads
            self.ops.append(special_ops.QKNormOp(f"{self._stem}query_key_norm", *norms, heads, is_over_heads))
        if attention.qkv_limit:
            self.ops.append(special_ops.ClipOp(f"{self._stem}qkv_clip", heads, attention.qkv_limit))
        if taken is not None and heads != own:
            first = taken.query[0], taken.kv[0]
            self.ops.append(special_ops.TakeHeadsOp(f"{self._stem}take_heads", heads, first, own))
        own_sinks = None if taken is None else [taken.query]
        sinks = None if shapes.sinks is None else weights.vector(shapes.sinks, ranges=own_sinks)
        scales = ONES
        if self._shared.reads_kv_scales:  # the layer's that has written the cache
            writer = self._index if attention.cache_layer is None else attention.cache_layer
            scales = self._whole.layer(writer).kv_scales(shapes.qkv)
        self._attend(attention, own, "attended", sinks, scales)
        if gate is not None:
            width, compute = own.num_heads * own.head_dim, weights.back_end.gate
            self.ops.append(special_ops.GateOp(f"{self._stem}output_gate", "attended", gate, width, compute))
        self._attention_out(attention, shapes.attention_out)

    def _head_norm(self, name: str, shape: NormShape, x: str, out: str, num_heads: int) -> None:
        """Append out = norm(x) over each head."""
        norm = make_norm(self._spec, self._weights, shape)
        self.ops.append(special_ops.HeadNormOp(self._stem + name, norm, x, out, num_heads, shape.width))

    def _latent_attention(self, latent: LatentAttention, shapes: LatentShapes, source: str) -> None:
        """Append attention over latents of `source`: project, normalize, project queries to heads and to the latent,
        rotate and write, attend, project from the latent. A rank has its heads alone, and every latent.
        """
        weights, ranks, stem = self._weights, self._ranks, self._stem
        shard = None if ranks is None else ranks.shard
        first, stop = (0, latent.num_heads) if shard is None else shard.heads(latent).query
        heads = Heads(stop - first, 1, latent.head_dim)

        def norm(shape: NormShape | None) -> Norm | None:
            return None if shape is None else make_norm(self._spec, weights, shape, eps=LATENT_NORM_EPS)

        def own(op: str) -> list[Range] | None:
            return None if shard is None else shard.latent_ranges(latent, op)

        self.linear("qkv", shapes.qkv, source, "qkv", own("qkv"))
        key_norm, columns = norm(shapes.key_norm), latent.query_rank or heads.num_heads * latent.query_dim
        assert key_norm is not None
        split = special_ops.SplitLatentOp(
            f"{stem}split_heads", norm(shapes.query_norm), key_norm, columns, latent.head_dim, latent.latent_dim
        )
        self._append("split_heads", split)
        projected = split.query
        if shapes.query_up is not None:
            projected = "projected"
            self.linear("query_up", shapes.query_up, split.query, projected, own("query_up"))
        keys, values = (tuple(each) for each in weights.latent_heads(shapes.kv_up, latent.num_heads, (first, stop)))
        sizes = latent.nope_dim, latent.latent_dim
        absorbed = special_ops.HeadLinearOp(f"{stem}query_to_latent", keys, sizes, projected, "query", latent.rope_dim)
        self.ops.append(absorbed)
        scale = weights.kv_scales(shapes.qkv).key if self._shared.reads_kv_scales else 1.0
        self._attend(latent, heads, "latents", None, KVScales(scale, scale))  # a value is a part of its key
        sizes = latent.latent_dim, latent.expanded_dim
        self.ops.append(special_ops.HeadLinearOp(
            f"{stem}latent_to_value", values, sizes, "latents", "attended", is_flat=True
        ))  # fmt: skip
        self._attention_out(latent, shapes.attention_out)

    def _attend(self, attention: Attention, heads: Heads, out: str, sinks: Tensor | None, scales: KVScales) -> None:
        """Append rotation, write and attention of projected heads."""
        weights, shared = self._weights, self._shared
        rotary, table, is_interleaved = self._spec.rotary_of(attention), None, False
        if rotary is not None:
            table, is_interleaved = shared.cos_sin[rotary], rotary.is_interleaved
        has_keys = attention.cache_layer is None
        rotation = RotarySpec(
            heads, table, is_interleaved, scales, attention.key_value_dim, has_keys=has_keys
        )
        name, write = f"{self._stem}rotary_write", weights.back_end.write_kv
        key, value = "key" if has_keys else None, None if attention.key_value_dim or not has_keys else "value"
        self._append("rotary_write", ops.RotaryWriteOp(name, self._cache_index, rotation, write, "query", key, value))
        if attention.position_scale is not None:
            assert table is not None, "factors of positions without rotary positions"
            factors = weights.taken(weights.rounded(_position_factors(*attention.position_scale, len(table))))
            self.ops.append(special_ops.PositionScaleOp(f"{self._stem}position_scale", heads, factors))
        spec = AttentionSpec(
            heads, attention.scale, attention.window, attention.softcap, sinks, attention.is_causal,
            attention.key_value_dim, scales,
        )  # fmt: skip
        attend, name = weights.back_end.paged_attention, f"{self._stem}attention"
        self._append("attention", ops.AttentionOp(name, self._cache_index, spec, attend, out=out))

    def _attention_out(self, attention: Attention, shape: LinearShape) -> None:
        """Append the exchange of what attention returns, and its last projection."""
        cut = None if self._ranks is None else self._ranks.shard.mixed_cut(attention)
        if cut is not None:
            self.exchange("attention", "attended", cut)
        self._mixer_out("attention_out", shape, "attended", cut)

    def _mixer_out(self, name: Place, shape: LinearShape, x: str, cut: Cut | None, out: str = "x") -> None:
        """Append the last projection of a mixer; `cut`: the ranks' columns of x, None: there is one rank."""
        ranks = self._ranks
        if ranks is None or ranks.shard.mode == "gather":
            self.linear(name, shape, x, out, self._ranges(shape))
            return
        assert cut is not None, "columns of ranks"
        inputs, hook = cut.of(ranks.shard.rank), ranks.sum(self._spec.hidden_size)
        linear, _ = self._weights.partial_linear(
            shape, lambda unit: inputs, dtype=hook.partial_dtype, has_bias=ranks.shard.rank == 0  # adds it once
        )
        self._append(name, special_ops.SummedLinearOp(self._stem + name, linear, x, out, hook, inputs))

    def feed_forward(self, source: str, out: str) -> None:
        """Append a feed-forward of `source`: two projections, or a mixture of experts. The stream lacks its output."""
        shapes, mixture = self._shapes, self._layer.feed_forward
        assert mixture is not None, "a layer without a feed-forward"
        name: Place = "feed_forward_out"
        if isinstance(mixture, Experts) and mixture.latent_size:
            self._latent_experts(mixture, source, out)
        elif isinstance(mixture, Experts):
            assert shapes.experts is not None
            experts = self._experts(mixture, shapes.experts)
            self._append(name, special_ops.ExpertsOp(self._stem + name, experts, source, out))
        else:
            self._dense(source, out)
        self._end_sublayer(name, out, shapes.feed_forward_output_norm)

    def _latent_experts(self, mixture: Experts, source: str, out: str) -> None:
        """Append experts of a projection of `source`, projected back, beside a shared one (Nemotron 3 Super, NVIDIA).

        The router scores `source` itself. Ranks that gather have columns of both summands.
        """
        latent_in, latent_out, experts = self._shapes.latent_in, self._shapes.latent_out, self._shapes.experts
        assert latent_in is not None
        assert latent_out is not None
        assert experts is not None
        shard, width = None if self._ranks is None else self._ranks.shard, self._spec.hidden_size
        is_split = shard is not None and shard.mode == "gather"
        in_ranges, out_ranges = (self._ranges(each) if is_split else None for each in (latent_in, latent_out))
        self.linear("latent_in", latent_in, source, "latent", in_ranges)
        if shard is not None:
            self.exchange("latent_in", "latent", shard.cut(mixture.latent_size))
        layer = self._experts(mixture, experts)
        self.ops.append(special_ops.ExpertsOp(f"{self._stem}experts", layer, "latent", "routed", source))
        if shard is not None:
            self.exchange("experts", "routed", shard.cut(mixture.latent_size))
        self.linear("latent_out", latent_out, "routed", "y", out_ranges)
        self._dense(source, out)
        if out_ranges is not None:
            ((first, stop),) = out_ranges
            width = stop - first
        self.ops.append(ops.AddOp(f"{self._stem}experts_sum", out, "y", out, width))

    def _dense(self, source: str, out: str) -> None:
        """Append the two projections of a dense feed-forward of `source`."""
        up, down, ranks = self._shapes.up, self._shapes.down, self._ranks
        assert up is not None
        assert down is not None
        name: Place = "feed_forward_out"
        if ranks is None or ranks.shard.mode == "gather":
            self.linear("feed_forward_in", up, source, "inner", self._ranges(up))
            if ranks is not None:
                self.exchange("feed_forward_in", "inner", ranks.shard.cut(down.width))
            self.linear(name, down, "inner", out, self._ranges(down))
        else:
            hook = ranks.sum(self._spec.hidden_size)
            linear_in, linear_out, inner = _partial_layers(up, down, self._weights, ranks.shard, hook.partial_dtype)
            self._append("feed_forward_in", ops.LinearOp(f"{self._stem}feed_forward_in", linear_in, source, "inner"))
            summed = special_ops.SummedLinearOp(self._stem + name, linear_out, "inner", out, hook, inner)
            self._append(name, summed)

    def _experts(self, mixture: Experts, shapes: ExpertShapes) -> ExpertLayer:
        """Read a mixture of experts; a rank has some outputs of both layers of each, or some inner columns."""
        weights, ranks, width = self._weights, self._ranks, shapes.experts[0][0].width
        float32 = weights.back_end.library.dtype("float32")
        shared = mixture.shared if len(shapes.experts) > mixture.num_experts else None
        routing = Routing(
            mixture.num_active, mixture.is_normalized, has_shared=shared is not None,
            is_sigmoid=mixture.is_sigmoid, has_bias=mixture.has_choice_bias, factor=mixture.factor,
            is_shared_scored=mixture.is_shared_scored, num_groups=mixture.num_groups,
            num_kept_groups=mixture.num_kept_groups, num_group_keys=mixture.num_group_keys,
        )  # fmt: skip
        found, split = list[Expert](), None
        if ranks is not None and ranks.shard.mode == "reduce":
            columns: dict[int, Range] = {}  # inner width -> columns: experts of equal width are cut alike
            for up, down in shapes.experts:
                *layers, inner = _partial_layers(up, down, weights, ranks.shard, float32, columns.get(down.width))
                columns[down.width] = inner
                found.append(Expert(*layers))
            return weights.experts(shapes, found, routing, ExpertSplit(width, None, None, ranks.sum(width)))
        for up, down in shapes.experts:
            layer_out = weights.linear(down, self._ranges(down), dtype=float32)
            found.append(Expert(weights.linear(up, self._ranges(up)), layer_out))
        if ranks is not None:
            first, stop = ranks.shard.cut(width).of(ranks.shard.rank)
            of_shared = None if shared is None else ranks.gather(ranks.shard.cut(shared.size))
            split = ExpertSplit(stop - first, ranks.gather(ranks.shard.cut(mixture.expert.size)), of_shared)
        return weights.experts(shapes, found, routing, split)

    def _end_sublayer(self, name: str, out: str, norm: NormShape | None) -> None:
        """Append the exchange, the multiplier and the norm of a sublayer's output."""
        if self._ranks is not None:
            self.exchange(name, out, self._ranks.shard.cut(self._spec.hidden_size))
        self._scale(name, out, self._layer.residual_multiplier)
        if norm is not None:
            norm_name = f"{self._stem}{name}_norm"
            self.ops.append(ops.NormOp(norm_name, make_norm(self._spec, self._weights, norm), out, out))
        self.is_summed = False

    def _ranges(self, shape: LinearShape) -> list[Range] | None:
        """Return the outputs of a layer, module by module, that this rank computes; None: all."""
        return None if self._ranks is None else self._ranks.shard.ranges(shape)

    def _append(self, place: Place, op: Op) -> None:
        """Append an op, and the ops that the family adds behind it."""
        self.ops.append(op)
        for part in [part for part in self._parts if part.after == place]:
            self._parts.remove(part)
            self.ops.append(part.make(self._weights, self._stem + part.name))


def _position_factors(beta: float, length: int, num_positions: int) -> NDArray[np.float32]:
    """Return the factors of the first positions, [num_positions], of float64 rounded. Llama 4 (Meta 2025)."""
    return (1 + beta * np.log1p(np.arange(num_positions) // length)).astype(np.float32)


def _partial_layers(
    up: LinearShape, down: LinearShape, weights: WeightReader, shard: Shard, dtype: DType | None,
    inner: Range | None = None,
) -> tuple[Linear, Linear, Range]:  # fmt: skip
    """Return a rank's layers of a feed-forward that is split by its inner columns, and the range of these.

    dtype: of the second layer's partial sums. inner: None: an even part, cut where the second layer's weight can be.
    """
    second, inner = weights.partial_linear(
        down, lambda unit: inner or shard.cut(down.width, unit).of(shard.rank), dtype=dtype, has_bias=shard.rank == 0
    )
    return weights.linear(up, [inner] * len(up.num_rows)), second, inner
