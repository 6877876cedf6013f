"""Footprint: bytes of weights and of keys and values, from a spec alone. No torch, no file.

`weight_bytes` equals the bytes that `WeightReader` tallies; those of linear weights depend on their scheme
(`packing.py`).
"""

from fractions import Fraction

from quire.core.kv_dtypes import ELEMENT_BYTES, kv_dtype
from quire.model.quantization import UNQUANTIZED, WHOLE_ROW, Quantization, WeightScheme
from quire.model.shapes import DecoderShapes, LayerShapes, LinearShape, Shape, TableShape, VectorShape, layer_shapes
from quire.model.sharding import Range, Shard
from quire.model.spec import DecoderSpec, LayerSpec
from quire.model.weight_counts import num_elements
from quire_lab.sim.packing import CPU_PACKING, DTYPE_BYTES, Packing, packed_bytes


def weight_bytes(
    spec: DecoderSpec,
    dtype: str,
    packing: Packing = CPU_PACKING,
    quantization: Quantization = UNQUANTIZED,
    *,
    shard: Shard | None = None,
    of_one_token: bool = False,
) -> int:
    """Return the bytes of all weights as a device keeps them; `shard`: as this rank of tensor parallelism does.

    `of_one_token`: those that a step of one token reads, without tables, and of experts without those that the token
    does not use.
    """
    around, prefix = DecoderShapes.of(spec), spec.weights.prefixes[0]
    is_head_kept = packing.copies_tied_head or not spec.is_head_tied or quantization.head != UNQUANTIZED.head
    is_head_kept &= spec.has_head

    def kept(shape: Shape | None, prefix: str) -> int | Fraction:
        scheme = UNQUANTIZED.layers
        if isinstance(shape, LinearShape) and not shape.is_always_dense:
            scheme = quantization.scheme([prefix + module for module in shape.modules])
        num_bytes = _kept_bytes(shape, dtype, packing, scheme)
        if shape == around.embedding and packing.keeps_table_blocks and quantization.table and dtype != "float16":
            num_bytes = num_elements(shape) // quantization.table.num_elements * quantization.table.num_bytes
        if not of_one_token:
            return num_bytes
        if isinstance(shape, LinearShape):
            return num_bytes * shape.share_of_tokens
        return 0 if isinstance(shape, TableShape) else num_bytes

    is_head_kept |= of_one_token and spec.has_head
    total = sum(kept(shape, prefix) for shape in around[:-1])
    for index, layer in enumerate(spec.layers):
        stem = prefix + spec.weights.layer.format(layer=index)
        shapes = list(layer_shapes(spec, layer))
        if shard is not None:
            shapes = _shapes_of_shard(spec, layer, shard, quantization, stem)
        total += sum(kept(shape, stem) for shape in shapes)
    head = around.head if shard is None else _own_part(around.head, shard.ranges(around.head))
    return int(total) + (_kept_bytes(head, dtype, packing, quantization.head) if is_head_kept else 0)


def kv_bytes_per_token(spec: DecoderSpec, itemsize: int, scale_bytes: int = 0) -> int:
    """Return the bytes that one token's keys and values take, over all layers.

    `scale_bytes`: of the scale that is stored for each token and head; 0: none is.
    """
    num_layers = spec.num_layers if spec.is_causal else 0
    return 2 * num_layers * spec.num_kv_heads * (spec.head_dim * itemsize + scale_bytes)


def stored_kv_bytes_per_token(spec: DecoderSpec, kv_cache_dtype: str) -> int:
    """Return the same by the name of the storage, a value of --kv-cache-dtype other than auto."""
    stored = kv_dtype(kv_cache_dtype)
    return kv_bytes_per_token(spec, ELEMENT_BYTES[stored.element], stored.scale_bytes)


def _shapes_of_shard(
    spec: DecoderSpec, layer: LayerSpec, shard: Shard, quantization: Quantization, stem: str
) -> list[Shape | None]:
    """Return the shapes of what a rank has of a layer: a part of the linear layers but routers, and everything else."""
    of_layer = LayerShapes.of(spec, layer)
    qkv = of_layer.qkv
    if shard.mode == "reduce":
        own = _summed_shapes(layer, of_layer, shard, quantization, stem)
        return [own.get(shape, shape) for shape in layer_shapes(spec, layer)]
    return [
        _own_part(shape, shard.adapted_ranges(layer, "qkv" if shape == qkv else "", shape))
        if isinstance(shape, LinearShape) and not shape.is_always_dense
        else shape
        for shape in layer_shapes(spec, layer)
    ]


def _summed_shapes(
    layer: LayerSpec, shapes: LayerShapes, shard: Shard, quantization: Quantization, stem: str
) -> dict[Shape | None, Shape]:
    """Return a rank's shapes of the linear layers but routers, of which those behind another are divided by inputs."""
    qkv, out = shapes.qkv, shapes.attention_out

    def of_inputs(shape: LinearShape, inputs: Range) -> LinearShape:
        return shape._replace(width=inputs[1] - inputs[0], has_bias=shape.has_bias and shard.rank == 0)

    own: dict[Shape | None, Shape] = {
        qkv: _own_part(qkv, shard.adapted_ranges(layer, "qkv", qkv)),
        out: of_inputs(out, shard.attended_cut(layer).of(shard.rank)),
    }
    for up, down in shapes.feed_forwards:
        group_size = quantization.scheme([stem + down.modules[0]]).group_size
        one_scale = group_size in (0, WHOLE_ROW) or group_size >= down.width
        inner = shard.cut(down.width, 1 if one_scale else group_size).of(shard.rank)
        own |= {up: _own_part(up, [inner] * len(up.num_rows)), down: of_inputs(down, inner)}
    return own


def _own_part(shape: LinearShape, ranges: list[Range]) -> LinearShape:
    return shape._replace(num_rows=tuple(stop - start for start, stop in ranges))


def _kept_bytes(shape: Shape | None, dtype: str, packing: Packing, scheme: WeightScheme) -> int:
    itemsize = DTYPE_BYTES["float32" if isinstance(shape, VectorShape) else dtype]
    if not isinstance(shape, LinearShape):
        return num_elements(shape) * itemsize
    num_rows, width = sum(shape.num_rows), shape.width
    num_biases = num_rows if shape.has_bias else 0
    num_layers = 2 if (shape.activation or "").endswith("_and_mul") else 1  # gates and ups are packed each by itself
    layer_bytes = packed_bytes(scheme, num_rows // num_layers, width, dtype, packing)
    return num_layers * layer_bytes + num_biases * itemsize
