"""Footprint: bytes of weights and of keys and values, from a spec alone. No torch, no file.

`weight_bytes` equals the bytes that `WeightReader` tallies; those of linear weights depend on their scheme
(`packing.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from quire.core.config import ELEMENT_BYTES, kv_dtype
from quire.core.errors import ConfigError
from quire.model.config import num_elements
from quire.model.quantization import UNQUANTIZED, WHOLE_ROW, Quantization, WeightScheme
from quire.model.shapes import (
    DecoderShapes,
    LayerShapes,
    LinearShape,
    Shape,
    ShortConvShapes,
    TableShape,
    VectorShape,
    layer_shapes,
    shapes_around,
    vision_shapes,
)
from quire.model.sharding import DELTA_OPS, HEAD_OPS, MAMBA_OPS, Range, Shard
from quire.model.spec import Attention, DecoderSpec, LayerSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ELEMENT_BITS = {"int8": 8, "int4": 4, "fp8": 8, "codebook4": 4}
STRIP_ROWS = 16                                   # rows of a strip of packed quantized weights
TILE_INPUTS = {"int8": (16, 32, 64), "int4": (32, 64)}  # the smallest that holds a group, or else the largest
CACHE_LINE = 64  # bytes
TARGET_ID_BYTES = 8  # bytes of the target's id of each token that an EAGLE-3 head drafts


@dataclass(frozen=True, slots=True)
class Packing:
    """Storage of weights in a back end: rows and inputs of linear ones padded to multiples, dtypes.

    A tied head may be packed, and then the table is read from it where both have the same values; else an embedding
    table may be in the blocks of its file.
    """

    row_multiple: int
    input_multiple: int            # bfloat16 weights need inputs of a multiple of this
    kernel_dtypes: frozenset[str]  # everything else is float32, the KV cache too
    packs_tied_head: bool
    keeps_table_blocks: bool

    def kernel_dtype(self, dtype: str) -> str:
        """Return the dtype in which weights and KV cache of a model of `dtype` are kept."""
        return dtype if dtype in self.kernel_dtypes else "float32"

    def num_weights(self, num_rows: int, width: int, dtype: str) -> int:
        """Return the elements of a packed weight, padding among them."""
        inputs = self.input_multiple if dtype == "bfloat16" else 1
        return -(-num_rows // self.row_multiple) * self.row_multiple * -(-width // inputs) * inputs


CPU_PACKING = Packing(16, 32, frozenset({"float32", "bfloat16"}), packs_tied_head=True, keeps_table_blocks=True)
PLAIN_PACKING = Packing(1, 1, frozenset(DTYPE_BYTES), packs_tied_head=False, keeps_table_blocks=False)


def scheme_bits(scheme: WeightScheme, dtype: str, width: int) -> float:
    """Return the bits of a weight of `width` inputs for each output, its share of the scales among them."""
    if scheme.format == "dense":
        return 8 * DTYPE_BYTES[dtype]
    return _quantized_bytes(scheme, STRIP_ROWS, width) * 8 / (STRIP_ROWS * width)


def packed_bytes(scheme: WeightScheme, num_rows: int, width: int, dtype: str, packing: Packing) -> int:
    """Return the bytes of a packed weight [num_rows, width]; ConfigError for a format that is not known."""
    if scheme.format == "dense":
        kernel_dtype = packing.kernel_dtype(dtype)
        return packing.num_weights(num_rows, width, kernel_dtype) * DTYPE_BYTES[kernel_dtype]
    if scheme.format not in ELEMENT_BITS:
        known = ", ".join(("dense", *ELEMENT_BITS))
        raise ConfigError(f"weight format {scheme.format} is not supported yet; known are {known}")
    return _quantized_bytes(scheme, num_rows, width)


def _quantized_bytes(scheme: WeightScheme, num_rows: int, width: int) -> int:
    """Return the bytes of strips of 16 outputs: scales and tiles of inputs, group after group, or all scales first."""
    size = width if scheme.group_size == WHOLE_ROW else min(scheme.group_size, width)
    if not scheme.activation_group_size:
        return -(-num_rows // STRIP_ROWS) * _expanded_strip_bytes(scheme, size, width)
    size = min(size, scheme.activation_group_size)
    num_groups, last = -(-width // size), width % size or size
    tiles = TILE_INPUTS[scheme.format]
    tile_inputs = next((inputs for inputs in tiles if inputs >= size), tiles[-1])
    num_tiles = (num_groups - 1) * -(-size // tile_inputs) + -(-last // tile_inputs)
    elements = num_tiles * tile_inputs * ELEMENT_BITS[scheme.format] // 8
    return -(-num_rows // STRIP_ROWS) * STRIP_ROWS * (num_groups * _scale_bytes(scheme) + elements)


def _expanded_strip_bytes(scheme: WeightScheme, size: int, width: int) -> int:
    """Return the bytes of a strip with its elements by themselves, in whole cache lines."""
    elements = STRIP_ROWS * -(-width // 2) * 2 * ELEMENT_BITS[scheme.format] // 8
    return STRIP_ROWS * -(-width // size) * _scale_bytes(scheme) + -(-elements // CACHE_LINE) * CACHE_LINE


def _scale_bytes(scheme: WeightScheme) -> int:
    return 4 if scheme.correction == "constant" else 8


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

    Of a draft head they are those that its target lacks.
    `of_one_token`: those that a step of one token reads, without tables, and of experts without those that the token
    does not use.
    """
    around, prefix = DecoderShapes.of(spec), spec.weights.prefixes[0]
    is_head_kept = packing.packs_tied_head or not spec.is_head_tied or quantization.head != UNQUANTIZED.head
    is_head_kept &= spec.has_head
    is_table_head = packing.packs_tied_head and shard is None and dtype in packing.kernel_dtypes
    is_table_head &= spec.has_head and spec.is_head_tied and not spec.has_head_bias
    is_table_head &= quantization.table is not None or quantization.head == UNQUANTIZED.head

    def kept(shape: Shape | None, prefix: str) -> int | Fraction:
        scheme = UNQUANTIZED.layers
        if isinstance(shape, LinearShape) and is_rounded(shape):
            scheme = quantization.scheme([prefix + module for module in shape.modules])
        num_bytes = _kept_bytes(shape, dtype, packing, scheme)
        if shape == around.embedding and is_table_head:
            return 0
        blocks = quantization.table if shape == around.embedding else quantization.layer_table
        is_table = shape in (around.embedding, around.layer_table) and packing.keeps_table_blocks
        if shape is not None and is_table and blocks and dtype != "float16":
            num_bytes = num_elements(shape) // blocks.num_elements * blocks.num_bytes
        if not of_one_token:
            return num_bytes
        if isinstance(shape, LinearShape):
            return num_bytes * shape.share_of_tokens
        return 0 if isinstance(shape, TableShape) else num_bytes

    is_head_kept |= of_one_token and spec.has_head
    is_head_kept &= not spec.is_mtp
    total = sum(kept(shape, prefix) for shape in shapes_around(spec))
    if spec.eagle is not None and spec.eagle.num_drafted < spec.vocab_size and not of_one_token:
        total += TARGET_ID_BYTES * spec.eagle.num_drafted
    if not of_one_token:
        total += vision_bytes(spec, dtype, packing, quantization)
    for index, layer in enumerate(spec.layers):
        stem = prefix + spec.weights.layer.format(layer=index)
        shapes = list(layer_shapes(spec, layer))
        if shard is not None:
            shapes = _shapes_of_shard(spec, layer, shard, quantization, stem)
        total += sum(kept(shape, stem) for shape in shapes)
    head = around.head if shard is None else _own_part(around.head, shard.ranges(around.head))
    return int(total) + (_kept_bytes(head, dtype, packing, quantization.head) if is_head_kept else 0)


def vision_bytes(
    spec: DecoderSpec, dtype: str, packing: Packing = CPU_PACKING, quantization: Quantization = UNQUANTIZED
) -> int:
    """Return the bytes of the weights of a model's encoder of images, which each rank has; 0: it has none."""
    shapes = [] if spec.vision is None else vision_shapes(spec.vision)
    return sum(
        _kept_bytes(shape, dtype, packing, quantization.vision if is_rounded(shape) else UNQUANTIZED.layers)
        for shape in shapes
    )


def is_rounded(shape: Shape | None) -> bool:
    """Return whether a weight has fewer bits in a quantized model."""
    return isinstance(shape, LinearShape) and not shape.is_always_dense


def kv_bytes_per_token(spec: DecoderSpec, itemsize: int) -> int:
    """Return the bytes that the elements of one token's keys and values take, over all layers."""
    return sum(num_heads * each.head_dim * itemsize for each, num_heads in _cached_heads(spec))


def _cached_heads(spec: DecoderSpec) -> Iterator[tuple[Attention, int]]:
    """Yield each attention with a cache, and the heads of its keys and values: latents are keys alone."""
    for each in spec.cached_attentions:
        yield each, each.num_kv_heads * (1 if each.key_value_dim else 2)


def stored_kv_bytes_per_token(spec: DecoderSpec, kv_cache_dtype: str) -> int:
    """Return the same with scales, by the name of the storage, a value of --kv-cache-dtype other than auto."""
    stored = kv_dtype(kv_cache_dtype)
    return kv_bytes_per_token(spec, ELEMENT_BYTES[stored.element]) + sum(
        num_heads * stored.extra_bytes(each.head_dim, each.key_value_dim) for each, num_heads in _cached_heads(spec)
    )


def _shapes_of_shard(
    spec: DecoderSpec, layer: LayerSpec, shard: Shard, quantization: Quantization, stem: str
) -> list[Shape | None]:
    """Return the shapes of what a rank has of a layer: a part of the linear layers but routers, and everything else."""
    of_layer = LayerShapes.of(spec, layer)
    mixers = (each for each in (of_layer.mixer, of_layer.beside) if each is not None)
    by_heads = {
        shape: op for mixer in mixers for op, shape in mixer._asdict().items()
        if op in (*HEAD_OPS, *DELTA_OPS, *MAMBA_OPS) and shape is not None
    }  # fmt: skip
    if shard.mode == "reduce":
        own = _summed_shapes(layer, of_layer, by_heads, shard, quantization, stem)
        return [own.get(shape, shape) for shape in layer_shapes(spec, layer)]
    return [
        _own_part(shape, shard.adapted_ranges(layer, by_heads.get(shape, ""), shape))
        if isinstance(shape, LinearShape) and (shape in by_heads or not shape.is_always_dense)
        else shape
        for shape in layer_shapes(spec, layer)
    ]


def _summed_shapes(
    layer: LayerSpec, shapes: LayerShapes, by_heads: Mapping[Shape | None, str], shard: Shard,
    quantization: Quantization, stem: str,
) -> dict[Shape | None, Shape]:
    """Return a rank's shapes of the linear layers but routers, of which those behind another are divided by inputs."""

    def of_inputs(shape: LinearShape, inputs: Range) -> LinearShape:
        return shape._replace(width=inputs[1] - inputs[0], has_bias=shape.has_bias and shard.rank == 0)

    own: dict[Shape | None, Shape] = {}
    for shape, op in by_heads.items():
        assert isinstance(shape, LinearShape)
        own[shape] = _own_part(shape, shard.adapted_ranges(layer, op, shape))
    if isinstance(shapes.mixer, ShortConvShapes):
        conv_in = shapes.mixer.conv_in
        own[conv_in] = _own_part(conv_in, shard.ranges(conv_in))
    for mixer, of_mixer in ((layer.mixer, shapes.mixer), (layer.beside, shapes.beside)):
        if mixer is not None and of_mixer is not None:
            out = of_mixer[-1]
            assert isinstance(out, LinearShape)
            own[out] = of_inputs(out, shard.mixed_cut(mixer).of(shard.rank))
    for up, down in shapes.feed_forwards:
        group_size = quantization.scheme([stem + down.modules[0]]).group_size
        one_scale = group_size in (0, WHOLE_ROW) or group_size >= down.width
        inner = shard.cut(down.width, 1 if one_scale else group_size).of(shard.rank)
        own |= {up: _own_part(up, [inner] * len(up.num_rows)), down: of_inputs(down, inner)}
    return own


def _own_part(shape: LinearShape, ranges: list[Range]) -> LinearShape:
    num_rows = tuple(stop - start for start, stop in ranges)
    num_groups = shape.num_groups * num_rows[0] // shape.num_rows[0] if shape.is_by_head else shape.num_groups
    return shape._replace(num_rows=num_rows, num_groups=num_groups)


def _kept_bytes(shape: Shape | None, dtype: str, packing: Packing, scheme: WeightScheme) -> int:
    itemsize = DTYPE_BYTES["float32" if isinstance(shape, VectorShape) else dtype]
    if not isinstance(shape, LinearShape):
        return num_elements(shape) * itemsize
    if shape.is_by_head:
        first, second = (count // shape.num_groups for count in shape.num_rows)
        sizes = (shape.width, first), (second, shape.width)
        return shape.num_groups * sum(packed_bytes(scheme, *each, dtype, packing) for each in sizes)
    num_rows, width = sum(shape.num_rows), shape.width
    num_biases = num_rows if shape.has_bias else 0
    num_layers = 2 if (shape.activation or "").endswith("_and_mul") else 1  # gates and ups are packed each by itself
    layer_bytes = packed_bytes(scheme, num_rows // num_layers, width, dtype, packing)
    return num_layers * layer_bytes + num_biases * itemsize
