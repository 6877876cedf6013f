"""Construction of layer programs: the layers of a spec as op records, with their weights read.

The activations are `stream`, the residual stream; `x`, a sublayer's input and then its output; `qkv` and its views
`query`, `key`, `value`; `attended`; `inner`, of the feed-forward. An op is named `layers.N.` and as below.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from quire.kernels import program as ops
from quire.kernels.kv_quantization import ONES
from quire.kernels.norm import Norm
from quire.kernels.program import INPUT, GatherHook, Op, Program
from quire.model.shapes import DecoderShapes, LayerShapes, NormShape
from quire.model.spec import DecoderSpec, LayerSpec, NormPosition, Part, SpecError
from quire.model.weights import WeightReader


@dataclass(frozen=True, slots=True)
class ProgramInputs:
    """Inputs that the layers of a decoder share, besides its spec."""

    cos_sin: Tensor | None             # as of `rotary_table`; None: learned positions
    progress: Tensor                   # [1] int64, one more after each layer
    gather: GatherHook | None = None   # of tensor parallelism; None: one rank
    reads_kv_scales: bool = False      # of the KV cache's elements, from the checkpoint; else they are 1


def build_program(spec: DecoderSpec, weights: WeightReader, shared: ProgramInputs) -> Program:
    """Read the layers and the final norm; return their program, of single ops."""
    found: list[Op] = []
    is_summed = True  # whether the stream has the last sublayer's output; else it is in x, and the next norm adds it
    for index, layer in enumerate(spec.layers):
        if layer.norm_position == "post" and not is_summed:
            found.append(ops.Add(f"layers.{index}.sum", "x", INPUT, INPUT))
            is_summed = True
        found += _layer_ops(spec, index, weights.layer(index), shared, is_summed=is_summed)
        is_summed = layer.norm_position == "post"
    shape = DecoderShapes.of(spec).final_norm
    if shape is not None:
        norm = make_norm(spec, weights, shape)
        found.append(_norm_op("final_norm", norm, "pre", is_summed=is_summed))
    elif not is_summed:
        found.append(ops.Add("final_sum", "x", INPUT, "x"))
    return Program(tuple(found), INPUT if shape is None and is_summed else "x")


def make_norm(spec: DecoderSpec, weights: WeightReader, shape: NormShape) -> Norm:
    """Read a norm over the last dimension."""
    return weights.back_end.norm(*weights.norm(shape), spec.norm_eps, spec.norm == "layer")


def _layer_ops(
    spec: DecoderSpec, index: int, weights: WeightReader, shared: ProgramInputs, *, is_summed: bool
) -> Iterator[Op]:
    """Yield the ops of a layer.

    Norm, attention, add; norm, feed-forward, add (Radford et al. 2019), where the norm that comes next adds in one
    pass. Or attention, add, norm; feed-forward, add, norm (Vaswani et al. 2017).
    """
    layer, stem = spec.layers[index], f"layers.{index}."
    shapes, position = LayerShapes.of(spec, layer), layer.norm_position
    source = "x" if position == "pre" else INPUT
    attention_norm = make_norm(spec, weights, shapes.attention_norm)
    attention = list(_attention_ops(spec, index, weights, shared, source))
    feed_forward_norm = make_norm(spec, weights, shapes.feed_forward_norm)
    norms = [
        _norm_op(f"{stem}attention_norm", attention_norm, position, is_summed=is_summed),
        _norm_op(f"{stem}feed_forward_norm", feed_forward_norm, position, is_summed=False),
    ]
    feed_forward = [
        ops.Linear(f"{stem}feed_forward_in", weights.linear(shapes.up), source, "inner"),
        ops.Linear(f"{stem}feed_forward_out", weights.linear(shapes.down), "inner", "x"),
    ]
    in_order = [norms[0], *attention, norms[1], *feed_forward]
    if position == "post":
        in_order = [*attention, norms[0], *feed_forward, norms[1]]
    yield from _with_parts(_gathered(in_order, spec, layer, shared.gather), stem, layer.parts, weights)
    yield ops.CountLayer(f"{stem}end", shared.progress)


def _attention_ops(
    spec: DecoderSpec, index: int, weights: WeightReader, shared: ProgramInputs, source: str
) -> Iterator[Op]:
    """Yield the ops of attention: project, normalize per head, rotate and write to the cache, attend, project."""
    layer, stem, back_end = spec.layers[index], f"layers.{index}.", weights.back_end
    shapes, heads = LayerShapes.of(spec, layer), ops.Heads(layer.num_heads, layer.num_kv_heads, layer.head_dim)
    norms = None
    if shapes.query_norm is not None and shapes.key_norm is not None:
        norms = make_norm(spec, weights, shapes.query_norm), make_norm(spec, weights, shapes.key_norm)
    yield ops.Linear(f"{stem}qkv", weights.linear(shapes.qkv), source, "qkv")
    yield ops.SplitHeads(f"{stem}split_heads", heads)
    if norms is not None:
        yield ops.QKNorm(f"{stem}query_key_norm", *norms, heads)
    scales = weights.kv_scales(shapes.qkv) if shared.reads_kv_scales else ONES
    yield ops.RotaryWrite(
        f"{stem}rotary_write", index, shared.cos_sin, heads, back_end.write_kv, kv_scales=scales
    )
    yield ops.Attention(
        f"{stem}attention", index, heads, layer.scale, layer.window, back_end.paged_attention, kv_scales=scales
    )
    yield ops.Linear(f"{stem}attention_out", weights.linear(shapes.attention_out), "attended", "x")


def _norm_op(name: str, norm: Norm, position: NormPosition, *, is_summed: bool) -> Op:
    if position == "post":
        return ops.Norm(name, norm, "x", INPUT, residual=INPUT)
    if is_summed:
        return ops.Norm(name, norm, INPUT, "x")
    return ops.Norm(name, norm, "x", "x", residual=INPUT, summed=INPUT)


def _gathered(
    layer_ops: Iterable[Op], spec: DecoderSpec, layer: LayerSpec, gather: GatherHook | None
) -> Iterator[Op]:
    """Yield a layer's ops, and behind those that ranks compute some columns of, the exchange."""
    widths = {
        "attention": layer.num_heads * layer.head_dim,
        "attention_out": spec.hidden_size,
        "feed_forward_in": layer.feed_forward.size,
        "feed_forward_out": spec.hidden_size,
    }
    for op in layer_ops:
        yield op
        width = widths.get(op.name.rpartition(".")[2])
        if gather is not None and width is not None:
            yield ops.Gather(f"{op.name}_gather", op.writes[0], width, gather)


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
