"""Construction of layer programs: the layers of a spec as op records, with their weights read.

The activations are `stream`, the residual stream; `x`, a sublayer's input and then its output (parallel sublayers:
`normed`, `x` and `y`); `qkv` and its views `query`, `key`, `value`; `attended`; `inner`, of the feed-forward. An op is
named `layers.N.` and as below.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import program as ops
from quire.kernels import special_ops
from quire.kernels.experts import Expert, ExpertSplit, Routing
from quire.kernels.kv_cache_write import RotarySpec
from quire.kernels.kv_quantization import ONES
from quire.kernels.linear import Linear
from quire.kernels.norm import Norm
from quire.kernels.paged_attention import AttentionSpec, Heads
from quire.kernels.program import INPUT, Op, Program
from quire.model.ranks import Ranks
from quire.model.shapes import DecoderShapes, ExpertShapes, LayerShapes, LinearShape, NormShape
from quire.model.sharding import Cut, Range, Shard
from quire.model.spec import DecoderSpec, Experts, LayerSpec, NormKind, NormPosition, Part, Rotary, SpecError
from quire.model.weights import WeightReader

OFFSETS: dict[NormKind, float] = {"rms_float": 0.0, "rms_offset": 1.0}  # added to weights, in float32
UNSUMMED: tuple[NormPosition, ...] = ("post", "output")  # sublayers that read the stream itself


@dataclass(frozen=True, slots=True)
class ProgramInputs:
    """Inputs that the layers of a decoder share, besides its spec."""

    cos_sin: Mapping[Rotary, Tensor]   # as of `rotary_table`, for each of `spec.rotaries`
    progress: Tensor                   # [1] int64, one more after each layer
    ranks: Ranks | None = None         # of tensor parallelism; None: one
    reads_kv_scales: bool = False      # of the KV cache's elements, from the checkpoint; else they are 1


def build_program(spec: DecoderSpec, weights: WeightReader, shared: ProgramInputs) -> Program:
    """Read the layers and the final norm; return their program, of single ops."""
    found: list[Op] = []
    is_summed = True  # whether the stream has the last sublayer's output; else it is in x, and the next norm adds it
    for index, layer in enumerate(spec.layers):
        reads_stream = layer.norm_position in UNSUMMED or not layer.has_attention_norm
        if reads_stream and not is_summed:
            found.append(ops.Add(f"layers.{index}.sum", "x", INPUT, INPUT, spec.hidden_size))
            is_summed = True
        found += _layer_ops(spec, index, weights.layer(index), shared, is_summed=is_summed)
        is_summed = layer.norm_position == "post"
    shape = DecoderShapes.of(spec).final_norm
    if shape is not None:
        norm = make_norm(spec, weights, shape)
        found.append(_norm_op("final_norm", norm, "pre", is_summed=is_summed))
    elif not is_summed:
        found.append(ops.Add("final_sum", "x", INPUT, "x", spec.hidden_size))
    return Program(tuple(found), INPUT if shape is None and is_summed else "x")


def make_norm(spec: DecoderSpec, weights: WeightReader, shape: NormShape, heads: Range | None = None) -> Norm:
    """Read a norm over the last dimension; of heads with weights of their own, those in a range; None: all."""
    weight, bias = weights.norm(shape)
    if shape.num_heads and heads is not None:
        weight = weight[slice(*heads)].clone()
    return weights.back_end.norm(weight, bias, spec.norm_eps, spec.norm == "layer", OFFSETS.get(spec.norm))


def _layer_ops(
    spec: DecoderSpec, index: int, weights: WeightReader, shared: ProgramInputs, *, is_summed: bool
) -> Iterator[Op]:
    """Yield the ops of a layer.

    Norm, attention, add; norm, feed-forward, add (Radford et al. 2019), where the norm that comes next adds in one
    pass; with norms around sublayers the output is normalized before. Or attention, add, norm; feed-forward, add, norm
    (Vaswani et al. 2017); or attention, norm, add; feed-forward, norm, add (OLMo et al. 2024). Parallel sublayers read
    the same stream, and their outputs are added first (Wang and Komatsuzaki 2021).
    """
    layer, stem = spec.layers[index], f"layers.{index}."
    shapes, position = LayerShapes.of(spec, layer), layer.norm_position
    source = INPUT if position in UNSUMMED else "normed" if shapes.feed_forward_norm is None else "x"
    first: list[Op] = []
    if shapes.attention_norm is not None:
        attention_norm = make_norm(spec, weights, shapes.attention_norm)
        first = [_norm_op(f"{stem}attention_norm", attention_norm, position, is_summed=is_summed, out=source)]
    attention = list(_attention_ops(spec, index, weights, shared, source if first else INPUT))
    second: list[Op] = []
    if shapes.feed_forward_norm is not None:
        feed_forward_norm = make_norm(spec, weights, shapes.feed_forward_norm)
        source = "normed" if layer.is_parallel else source
        name = f"{stem}feed_forward_norm"
        second = [_norm_op(name, feed_forward_norm, position, is_summed=layer.is_parallel, out=source)]
    out = "y" if layer.is_parallel else "x"
    feed_forward = list(_feed_forward_ops(layer, shapes, stem, weights, source, out, shared.ranks))
    if layer.is_parallel:
        feed_forward.append(ops.Add(f"{stem}sublayers", "x", "y", "x", spec.hidden_size))
    in_order = [*first, *attention, *second, *feed_forward]
    if position == "post":
        in_order = [*attention, *first, *feed_forward, *second]
    if position == "output":
        add = ops.Add(f"{stem}attention_sum", "x", INPUT, INPUT, spec.hidden_size)
        in_order = [*attention, *first, add, *feed_forward, *second]
    yield from _with_parts(_followed(in_order, spec, index, weights, shared.ranks), stem, layer.parts, weights)
    yield ops.CountLayer(f"{stem}end", shared.progress)


def _attention_ops(
    spec: DecoderSpec, index: int, weights: WeightReader, shared: ProgramInputs, source: str
) -> Iterator[Op]:
    """Yield the ops of attention: project, normalize per head, rotate and write to the cache, attend, project.

    A rank has its heads alone; a norm over all heads of a token needs them all, so there each rank projects them all.
    """
    layer, stem, back_end = spec.layers[index], f"layers.{index}.", weights.back_end
    shapes, heads = LayerShapes.of(spec, layer), Heads(layer.num_heads, layer.num_kv_heads, layer.head_dim)
    own, taken, ranges = heads, None, None
    if shared.ranks is not None:
        taken = shared.ranks.shard.heads(layer)
        own = Heads(taken.num_heads, taken.num_kv_heads, layer.head_dim)
        if not layer.is_query_key_norm_over_heads:
            heads, ranges = own, shared.ranks.shard.qkv_ranges(layer)
    norms = None
    if shapes.query_norm is not None and shapes.key_norm is not None:
        query_heads, kv_heads = (None, None) if taken is None else taken
        norms = (
            make_norm(spec, weights, shapes.query_norm, query_heads),
            make_norm(spec, weights, shapes.key_norm, kv_heads),
        )
    yield ops.Linear(f"{stem}qkv", weights.linear(shapes.qkv, ranges), source, "qkv")
    yield ops.SplitHeads(f"{stem}split_heads", heads)
    if norms is not None:
        yield special_ops.QKNorm(f"{stem}query_key_norm", *norms, heads, layer.is_query_key_norm_over_heads)
    if layer.qkv_limit:
        yield special_ops.Clip(f"{stem}qkv_clip", heads, layer.qkv_limit)
    if taken is not None and heads != own:
        yield special_ops.TakeHeads(f"{stem}take_heads", heads, (taken.query[0], taken.kv[0]), own)
    scales = weights.kv_scales(shapes.qkv) if shared.reads_kv_scales else ONES
    rotary = spec.rotary_of(layer)
    table = None if rotary is None else shared.cos_sin[rotary]
    is_interleaved = rotary is not None and rotary.is_interleaved
    yield ops.RotaryWrite(
        f"{stem}rotary_write", index, RotarySpec(own, table, is_interleaved, scales), back_end.write_kv
    )
    if layer.position_scale is not None:
        assert rotary is not None, "factors of positions without rotary positions"
        factors = _position_factors(*layer.position_scale, shared.cos_sin[rotary]).to(weights.dtype).float()
        yield special_ops.PositionScale(f"{stem}position_scale", own, factors)
    sinks = None if shapes.sinks is None else weights.vector(shapes.sinks)
    if sinks is not None and taken is not None:
        sinks = sinks[slice(*taken.query)].clone()
    attention = AttentionSpec(own, layer.scale, layer.window, layer.softcap, sinks, layer.is_causal, scales)
    yield ops.Attention(f"{stem}attention", index, attention, back_end.paged_attention)
    name, shape, ranks = f"{stem}attention_out", shapes.attention_out, shared.ranks
    if ranks is not None and ranks.shard.mode == "reduce":
        inputs, hook = ranks.shard.attended_cut(layer).of(ranks.shard.rank), ranks.sum(spec.hidden_size)
        linear, _ = weights.partial_linear(
            shape, lambda unit: inputs, dtype=hook.partial_dtype, has_bias=ranks.shard.rank == 0  # which adds it
        )
        yield special_ops.SummedLinear(name, linear, "attended", "x", hook, inputs)
        return
    yield ops.Linear(name, weights.linear(shape, _ranges(ranks, shape)), "attended", "x")


def _ranges(ranks: Ranks | None, shape: LinearShape) -> list[Range] | None:
    """Return the outputs of a layer, module by module, that this rank computes; None: all."""
    return None if ranks is None else ranks.shard.ranges(shape)


def _position_factors(beta: float, length: int, cos_sin: Tensor) -> Tensor:
    """Return the factors of all positions of a rotary table, [positions] float32. Llama 4 (Meta 2025)."""
    positions = torch.arange(len(cos_sin), dtype=torch.float32, device=cos_sin.device)
    return 1 + beta * torch.log(1 + torch.floor(positions / length))


def _feed_forward_ops(
    layer: LayerSpec, shapes: LayerShapes, stem: str, weights: WeightReader, source: str, out: str, ranks: Ranks | None
) -> Iterator[Op]:
    """Yield the ops of a feed-forward: two projections, or a mixture of experts."""
    mixture = layer.feed_forward
    if isinstance(mixture, Experts):
        assert shapes.experts is not None
        routing = Routing(mixture.num_active, mixture.is_normalized, has_shared=mixture.shared is not None)
        experts, split = _experts(mixture, shapes.experts, weights, ranks)
        layer_of_experts = weights.experts(shapes.experts.router, experts, routing, split)
        yield special_ops.Experts(f"{stem}feed_forward_out", layer_of_experts, source, out)
        return
    assert shapes.up is not None
    assert shapes.down is not None
    if ranks is not None and ranks.shard.mode == "reduce":
        hook = ranks.sum(shapes.down.num_rows[0])
        up, down, inner = _partial_layers(shapes.up, shapes.down, weights, ranks.shard, hook.partial_dtype)
        yield ops.Linear(f"{stem}feed_forward_in", up, source, "inner")
        yield special_ops.SummedLinear(f"{stem}feed_forward_out", down, "inner", out, hook, inner)
        return
    up = weights.linear(shapes.up, _ranges(ranks, shapes.up))
    down = weights.linear(shapes.down, _ranges(ranks, shapes.down))
    yield ops.Linear(f"{stem}feed_forward_in", up, source, "inner")
    yield ops.Linear(f"{stem}feed_forward_out", down, "inner", out)


def _partial_layers(
    up: LinearShape, down: LinearShape, weights: WeightReader, shard: Shard, dtype: torch.dtype | None,
    inner: Range | None = None,
) -> tuple[Linear, Linear, Range]:  # fmt: skip
    """Return a rank's layers of a feed-forward that is split by its inner columns, and the range of these.

    dtype: of the second layer's partial sums. inner: None: an even part, cut where the second layer's weight can be.
    """
    second, inner = weights.partial_linear(
        down, lambda unit: inner or shard.cut(down.width, unit).of(shard.rank), dtype=dtype, has_bias=shard.rank == 0
    )
    return weights.linear(up, [inner] * len(up.num_rows)), second, inner


def _experts(
    mixture: Experts, shapes: ExpertShapes, weights: WeightReader, ranks: Ranks | None
) -> tuple[list[Expert], ExpertSplit | None]:
    """Return the experts, and the split of a rank's part of them: outputs of both layers, or inner columns."""
    found, width = list[Expert](), shapes.router.width
    if ranks is not None and ranks.shard.mode == "reduce":
        columns: dict[int, Range] = {}  # by the inner width: experts of equal width are cut alike
        for up, down in shapes.experts:
            *layers, inner = _partial_layers(up, down, weights, ranks.shard, torch.float32, columns.get(down.width))
            columns[down.width] = inner
            found.append(Expert(*layers))
        return found, ExpertSplit(width, None, None, ranks.sum(width))
    for up, down in shapes.experts:
        layer_out = weights.linear(down, _ranges(ranks, down), dtype=torch.float32)
        found.append(Expert(weights.linear(up, _ranges(ranks, up)), layer_out))
    if ranks is None:
        return found, None
    first, stop = ranks.shard.cut(width).of(ranks.shard.rank)
    shared = None if mixture.shared is None else ranks.gather(ranks.shard.cut(mixture.shared.size))
    return found, ExpertSplit(stop - first, ranks.gather(ranks.shard.cut(mixture.expert.size)), shared)


def _norm_op(name: str, norm: Norm, position: NormPosition, *, is_summed: bool, out: str = "x") -> Op:
    if position == "post":
        return ops.Norm(name, norm, "x", INPUT, residual=INPUT)
    if position == "output":
        return ops.Norm(name, norm, "x", "x")
    if is_summed:
        return ops.Norm(name, norm, INPUT, out)
    return ops.Norm(name, norm, "x", out, residual=INPUT, summed=INPUT)


def _followed(
    layer_ops: Iterable[Op], spec: DecoderSpec, index: int, weights: WeightReader, ranks: Ranks | None
) -> Iterator[Op]:
    """Yield a layer's ops with the ops that follow each of them.

    An op with columns split over ranks is followed by their exchange, a sublayer by the multiplier and the norm of its
    output.
    """
    layer = spec.layers[index]
    shapes, stem = LayerShapes.of(spec, layer), f"layers.{index}."
    cuts: dict[str, Cut] = {}
    if ranks is not None and ranks.shard.mode == "gather":
        cuts = {
            "attention": ranks.shard.attended_cut(layer),
            "attention_out": ranks.shard.cut(spec.hidden_size),
            "feed_forward_in": ranks.shard.cut(layer.feed_forward.active_size),
            "feed_forward_out": ranks.shard.cut(spec.hidden_size),
        }
    norms = {"attention_out": shapes.attention_output_norm, "feed_forward_out": shapes.feed_forward_output_norm}
    for op in layer_ops:
        yield op
        kind = op.name.removeprefix(stem)
        if ranks is not None and kind in cuts:
            yield special_ops.Gather(f"{op.name}_gather", op.writes[0], ranks.gather(cuts[kind]))
        if kind not in norms:
            continue
        if layer.residual_multiplier != 1:
            yield special_ops.Scale(f"{op.name}_multiplier", op.writes[0], spec.hidden_size, layer.residual_multiplier)
        norm = norms[kind]
        if norm is not None:
            yield ops.Norm(f"{op.name}_norm", make_norm(spec, weights, norm), op.writes[0], op.writes[0])


def _with_parts(
    layer_ops: Iterable[Op], stem: str, parts: tuple[Part, ...], weights: WeightReader
) -> Iterator[Op]:
    """Yield a layer's ops with the parts that its family adds. Raises SpecError for a part that follows no op."""
    left = list(parts)
    for op in layer_ops:
        yield op
        for part in [part for part in left if stem + part.after == op.name]:
            left.remove(part)
            yield part.make(weights, stem + part.name)
    if left:
        raise SpecError(f"layer part {left[0].name}: a layer has no op {left[0].after!r} to follow")
