"""What a decoder is made of: every weight with its shape, from a spec alone.

The one source of shapes: `Decoder` reads its weights by them, and `footprint.py` counts them, without torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from quire.core.errors import ModelError
from quire.model.spec import Activation, DecoderSpec


@dataclass(frozen=True, slots=True)
class TableShape:
    """Embeddings [num_rows, width]."""

    module: str
    num_rows: int
    width: int


@dataclass(frozen=True, slots=True)
class NormShape:
    """A norm over `width` dimensions: a weight, and in a LayerNorm a bias."""

    module: str
    width: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A layer [sum(num_rows), width], the modules' rows on top of each other, then `activation`.

    One module for several row counts means that the checkpoint has them fused already. `is_split_by_row`: tensor
    parallel ranks have some of the rows each; else they have all rows, of a part of the width.
    """

    modules: tuple[str, ...]
    num_rows: tuple[int, ...]
    width: int
    has_bias: bool = False
    activation: Activation | None = None
    is_split_by_row: bool = True

    @property
    def num_weights(self) -> int:
        """Elements of the weight."""
        return sum(self.num_rows) * self.width


Shape = TableShape | NormShape | LinearShape


@dataclass(frozen=True, slots=True)
class LayerShapes:
    """One layer; all layers of a decoder are alike."""

    attention_norm: NormShape
    qkv: LinearShape
    query_norm: NormShape | None
    key_norm: NormShape | None
    attention_out: LinearShape
    feed_forward_norm: NormShape
    up: LinearShape
    down: LinearShape

    @classmethod
    def of(cls, spec: DecoderSpec) -> "LayerShapes":
        """Return the shapes of any layer of a model."""
        names, width, head_dim = spec.weights, spec.hidden_size, spec.head_dim
        heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
        inner = (spec.intermediate_size,) * (2 if spec.is_gated else 1)
        return cls(
            attention_norm=_norm(spec, names.attention_norm, width),
            qkv=LinearShape(names.qkv, tuple(count * head_dim for count in heads), width, spec.has_qkv_bias),
            query_norm=_head_norm(spec, names.query_norm),
            key_norm=_head_norm(spec, names.key_norm),
            attention_out=LinearShape(
                (names.attention_out,),
                (width,),
                spec.num_heads * head_dim,
                spec.has_attention_out_bias,
                is_split_by_row=False,
            ),
            feed_forward_norm=_norm(spec, names.feed_forward_norm, width),
            up=LinearShape(names.feed_forward_in, inner, width, spec.has_feed_forward_bias, spec.activation),
            down=LinearShape(
                (names.feed_forward_out,),
                (width,),
                spec.intermediate_size,
                spec.has_feed_forward_bias,
                is_split_by_row=False,
            ),
        )

    def __iter__(self) -> Iterator[Shape]:
        shapes = (self.attention_norm, self.qkv, self.query_norm, self.key_norm, self.attention_out)
        return (shape for shape in (*shapes, self.feed_forward_norm, self.up, self.down) if shape is not None)


@dataclass(frozen=True, slots=True)
class DecoderShapes:
    """A whole decoder: what stands around its layers, and one of them. `head` has no module if it may be tied."""

    embedding: TableShape
    positions: TableShape | None
    project_in: LinearShape | None
    layer: LayerShapes
    final_norm: NormShape | None
    project_out: LinearShape | None
    head: LinearShape

    @classmethod
    def of(cls, spec: DecoderSpec) -> "DecoderShapes":
        """Return the shapes of a model. Raises ModelError for a width that nothing projects to."""
        names, width, hidden = spec.weights, spec.embedding_size, spec.hidden_size
        num_positions = spec.max_position_embeddings + spec.position_offset
        return cls(
            embedding=TableShape(names.embedding, spec.vocab_size, width),
            positions=None if names.positions is None else TableShape(names.positions, num_positions, hidden),
            project_in=_projection(names.project_in, hidden, width),
            layer=LayerShapes.of(spec),
            final_norm=_norm(spec, names.final_norm, hidden) if spec.has_final_norm else None,
            project_out=_projection(names.project_out, width, hidden),
            head=LinearShape((names.head,), (spec.vocab_size,), width),
        )

    def __iter__(self) -> Iterator[Shape]:
        """Yield what stands around the layers."""
        shapes = (self.embedding, self.positions, self.project_in, self.final_norm, self.project_out, self.head)
        return (shape for shape in shapes if shape is not None)


def _norm(spec: DecoderSpec, module: str, width: int) -> NormShape:
    return NormShape(module, width, has_bias=spec.norm == "layer")


def _head_norm(spec: DecoderSpec, module: str | None) -> NormShape | None:
    return _norm(spec, module, spec.head_dim) if module is not None and spec.has_query_key_norm else None


def _projection(module: str | None, out_size: int, in_size: int) -> LinearShape | None:
    """Return the layer between two widths; None where they are the same."""
    if out_size == in_size:
        return None
    if module is None:
        raise ModelError(f"embeddings of width {in_size} or {out_size} need a projection, which the family has not")
    return LinearShape((module,), (out_size,), in_size)
