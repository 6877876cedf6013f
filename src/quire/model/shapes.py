"""Shapes of a decoder's weights, from a spec alone.

The one source of shapes: weights are read by them, and `footprint.py` counts them, without torch.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

from quire.core.errors import ModelError
from quire.model.spec import (
    Activation,
    Attention,
    DecoderSpec,
    DeltaNet,
    ExpertNames,
    Experts,
    FeedForward,
    LatentAttention,
    LayerSpec,
    Mamba,
    Merging,
    Mixer,
    ShortConv,
    VisionSpec,
)


class TableShape(NamedTuple):
    """Embeddings [num_rows, width]."""

    module: str
    num_rows: int
    width: int


class NormShape(NamedTuple):
    """A norm over `width` dimensions: a weight, and in a LayerNorm a bias; either may be missing.

    `num_heads`: heads that have weights of their own, in one tensor, or each in the module of its number `{head}`; 0:
    one weight.
    """

    module: str
    width: int
    has_bias: bool
    has_weight: bool = True
    num_heads: int = 0

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """[width], or [num_heads, width]."""
        return (self.num_heads, self.width) if self.num_heads else (self.width,)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors, by their names without the prefix."""
        modules, shape = [self.module], self.weight_shape
        if "{head}" in self.module:
            modules, shape = [self.module.format(head=head) for head in range(self.num_heads)], (self.width,)
        parts = ["weight"] * self.has_weight + ["bias"] * self.has_bias
        return {f"{module}.{part}": shape for part in parts for module in modules}


class VectorShape(NamedTuple):
    """A small tensor, by its whole name, kept in float32: attention sinks, biases of a choice, convolutions.

    `stored`: its shape in a checkpoint.
    """

    name: str
    stored: tuple[int, ...]

    @property
    def length(self) -> int:
        """Elements."""
        return prod(self.stored)


class LinearShape(NamedTuple):
    """A layer [sum(num_rows), width], the modules' rows on top of each other, then `activation`.

    One module for several row counts means that the checkpoint has them fused already; of several modules `counts` says
    how many each has, (): one. `num_groups`: the rows of the
    one module are stored in so many groups, each with rows of all counts in order; 1: they are not.
    `share_of_tokens`: of those of a step, the ones that are multiplied with the weight. `is_always_dense`: not
    quantized with the others. `num_gated_heads`: the rows of the first module are, for each of so many heads, those of
    a query and as many of a gate; all queries are kept first, then all gates. `is_by_head`: the groups are those of
    heads, each of which is kept as two layers, of its rows of the first count transposed and of those of the second.
    `is_cut_anywhere`: ranges of rows of the one module are taken from the whole, where formats cannot be cut.
    """

    modules: tuple[str, ...]
    num_rows: tuple[int, ...]
    width: int
    has_bias: bool = False
    activation: Activation | None = None
    num_groups: int = 1
    share_of_tokens: Fraction = Fraction(1)
    is_always_dense: bool = False
    is_by_head: bool = False
    num_gated_heads: int = 0
    counts: tuple[int, ...] = ()
    is_cut_anywhere: bool = False

    @property
    def num_weights(self) -> int:
        return sum(self.num_rows) * self.width

    @property
    def module_rows(self) -> list[tuple[str, tuple[int, ...]]]:
        """The row counts of each module."""
        counts = self.counts or (len(self.num_rows) if len(self.modules) == 1 else 1,) * len(self.modules)
        ends = list(accumulate(counts, initial=0))
        assert ends[-1] == len(self.num_rows), f"{counts} row counts of {self.modules}, not {len(self.num_rows)}"
        parts = (self.num_rows[start:stop] for start, stop in pairwise(ends))
        return list(zip(self.modules, parts, strict=True))


Shape = TableShape | NormShape | VectorShape | LinearShape


class ExpertShapes(NamedTuple):
    """A mixture of experts: the router's layer, and each expert's to its inner width and back; a shared one is last.

    `bias`: of the choice of experts. `scales`: of their weights.
    """

    router: LinearShape
    experts: tuple[tuple[LinearShape, LinearShape], ...]
    bias: VectorShape | None = None
    scales: VectorShape | None = None

    @classmethod
    def of(cls, names: ExpertNames, width: int, mixture: Experts) -> "ExpertShapes":
        """Return the shapes of a mixture of a model of a width; without a shared expert beside latents."""
        share, inputs = Fraction(mixture.num_active, mixture.num_experts), mixture.latent_size or width
        experts = [
            _feed_forward(
                tuple(name.format(expert=number) for name in names.expert_in),
                names.expert_out.format(expert=number), inputs, mixture.expert, share,
            )
            for number in range(mixture.num_experts)
        ]  # fmt: skip
        rows, has_bias = (mixture.num_experts,), mixture.has_router_bias
        router = LinearShape((names.router,), rows, width, has_bias, is_always_dense=True)
        if mixture.shared is not None and not mixture.latent_size:
            experts.append(_feed_forward(names.shared_in, names.shared_out, width, mixture.shared))
            if mixture.is_shared_scored:
                router = router._replace(modules=(names.router, names.shared_gate), num_rows=(mixture.num_experts, 1))
        stored = (1, mixture.num_experts) if names.is_bias_row else (mixture.num_experts,)
        bias = VectorShape(names.router_bias, stored)
        scales = VectorShape(names.router_scales, (mixture.num_experts,)) if mixture.has_scales else None
        return cls(router, tuple(experts), bias if mixture.has_choice_bias else None, scales)

    @property
    def layers(self) -> tuple[LinearShape, ...]:
        return (self.router, *(layer for expert in self.experts for layer in expert))


class ExpertNormShapes(NamedTuple):
    """The norms of experts beside a dense feed-forward: of what the router scores, and around both."""

    router_norm: NormShape
    norm: NormShape
    output_norm: NormShape
    dense_output_norm: NormShape


class AttentionShapes(NamedTuple):
    """Attention; `qkv` is without what is not projected: values that are keys, all but queries of another's cache."""

    qkv: LinearShape
    query_norm: NormShape | None
    key_norm: NormShape | None
    sinks: VectorShape | None
    attention_out: LinearShape

    @classmethod
    def of(cls, spec: DecoderSpec, attention: Attention) -> "AttentionShapes":
        """Return the shapes of the attention of a layer."""
        names, width = spec.weights, spec.hidden_size
        num_inputs = 2 * width if attention.reads_embedding else width
        num_heads, num_kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        num_gated = num_heads if attention.has_output_gate else 0
        rows = tuple(count * head_dim for count in (num_heads + num_gated, num_kv_heads, num_kv_heads))
        groups, num_projected = num_kv_heads if names.is_qkv_grouped else 1, attention.num_projected
        assert num_projected == len(rows) or len(names.qkv) == len(rows), "modules of queries and keys in one"
        modules = names.qkv[:num_projected]
        return cls(
            qkv=LinearShape(
                modules, rows[:num_projected], num_inputs, attention.has_qkv_bias, num_groups=groups,
                num_gated_heads=num_gated,
            ),
            query_norm=_head_norm(spec, attention, names.query_norm, num_heads),
            key_norm=_head_norm(spec, attention, names.key_norm, num_kv_heads) if num_projected > 1 else None,
            sinks=_vector(names.sinks, num_heads) if attention.has_sinks else None,
            attention_out=LinearShape(
                (names.attention_out,), (width,), num_heads * head_dim, attention.has_attention_out_bias
            ),
        )


class LatentShapes(NamedTuple):
    """Attention over latents; `kv_up` is kept by head, transposed for keys, and always dense."""

    qkv: LinearShape
    query_norm: NormShape | None
    key_norm: NormShape
    query_up: LinearShape | None
    kv_up: LinearShape
    attention_out: LinearShape

    @classmethod
    def of(cls, spec: DecoderSpec, latent: LatentAttention) -> "LatentShapes":
        """Return the shapes of the attention of a layer."""
        names, width, num_heads, rank = spec.weights, spec.hidden_size, latent.num_heads, latent.query_rank
        assert names.query_norm is not None
        assert names.key_norm is not None
        assert names.query_up is not None
        query_columns, expanded = num_heads * latent.query_dim, (latent.nope_dim, latent.expanded_dim)
        return cls(
            qkv=LinearShape(names.qkv, (rank or query_columns, latent.head_dim), width),
            query_norm=_norm(spec, names.query_norm, rank) if rank else None,
            key_norm=_norm(spec, names.key_norm, latent.latent_dim),
            query_up=LinearShape((names.query_up,), (query_columns,), rank) if rank else None,
            kv_up=LinearShape(
                names.kv_up, tuple(num_heads * count for count in expanded), latent.latent_dim,
                num_groups=num_heads, is_always_dense=True, is_by_head=True,
            ),
            attention_out=LinearShape((names.attention_out,), (width,), latent.width),
        )  # fmt: skip


class ShortConvShapes(NamedTuple):
    """A short convolution between two projections, the first to gates, gates and values."""

    conv_in: LinearShape
    weight: VectorShape
    bias: VectorShape | None
    conv_out: LinearShape

    @classmethod
    def of(cls, spec: DecoderSpec, conv: ShortConv) -> "ShortConvShapes":
        """Return the shapes of the short convolution of a layer."""
        names, width, hidden, has_bias = spec.weights, conv.width, spec.hidden_size, conv.has_bias
        assert names.conv is not None, "a short convolution in a map of names without it"
        assert names.conv_in is not None
        assert names.conv_out is not None
        stored = (width, conv.taps) if names.is_conv_plain else (width, 1, conv.taps)
        return cls(
            conv_in=LinearShape((names.conv_in,), (width, width, width), hidden, has_bias),
            weight=VectorShape(f"{names.conv}.weight", stored),
            bias=VectorShape(f"{names.conv}.bias", (width,)) if has_bias else None,
            conv_out=LinearShape((names.conv_out,), (hidden,), width, has_bias),
        )


class DeltaNetShapes(NamedTuple):
    """A gated delta net between its projections: to queries, keys, values and gates; to shares and decays; and back.

    With decays of rows gates and decays have two projections each.
    """

    delta_in: LinearShape
    delta_rates: LinearShape
    gate_down: LinearShape | None
    gate_up: LinearShape | None
    decay_down: LinearShape | None
    decay_up: LinearShape | None
    conv_weight: VectorShape        # for queries alone, where keys and values have tensors of their own
    key_conv: VectorShape | None
    value_conv: VectorShape | None
    rate: VectorShape
    rate_bias: VectorShape
    norm_weight: VectorShape
    delta_out: LinearShape

    @classmethod
    def of(cls, spec: DecoderSpec, net: DeltaNet) -> "DeltaNetShapes":
        """Return the shapes of the gated delta net of a layer."""
        names, hidden, key_rows = spec.weights, spec.hidden_size, net.num_key_heads * net.key_dim
        assert names.delta_rate is not None, "a gated delta net in a map of names without it"
        assert names.delta_rate_bias is not None
        assert names.delta_out is not None
        decay_rows = net.num_value_heads * net.key_dim
        gates, decays, rank = names.delta_gates or ("", ""), names.delta_decays or ("", ""), net.low_rank
        rows = (key_rows, key_rows, net.width) if rank else (key_rows, key_rows, net.width, net.width)
        groups, parts = net.num_key_heads if len(names.delta_in) == 1 else 1, (3, 1) if len(names.delta_in) == 2 else ()
        counts = (net.num_value_heads,) * (1 if rank else 2)
        groups_of_rates = 1 if len(names.delta_rates) == len(counts) else net.num_key_heads
        taps = (net.taps,) if names.is_conv_plain else (1, net.taps)
        rates = (net.num_value_heads, 1) if names.is_conv_plain else (1, 1, net.num_value_heads, 1)
        channels = (sum(rows[:3]),) if len(names.delta_conv) == 1 else rows[:3]
        conv, *others = (
            VectorShape(f"{name}.weight", (count, *taps))
            for name, count in zip(names.delta_conv, channels, strict=True)
        )
        return cls(
            delta_in=LinearShape(names.delta_in, rows, hidden, num_groups=groups, counts=parts),
            delta_rates=LinearShape(
                names.delta_rates, counts, hidden, num_groups=groups_of_rates, is_always_dense=True
            ),
            gate_down=LinearShape(gates[:1], (rank,), hidden) if rank else None,
            gate_up=LinearShape(gates[1:], (net.width,), rank) if rank else None,
            decay_down=LinearShape(decays[:1], (rank,), hidden, is_always_dense=True) if rank else None,
            decay_up=LinearShape(decays[1:], (decay_rows,), rank, is_always_dense=True) if rank else None,
            conv_weight=conv,
            key_conv=others[0] if others else None,
            value_conv=others[1] if others else None,
            rate=VectorShape(names.delta_rate, rates if rank else (net.num_value_heads,)),
            rate_bias=VectorShape(names.delta_rate_bias, (decay_rows,) if rank else (net.num_value_heads,)),
            norm_weight=VectorShape(f"{names.delta_norm}.weight", (net.value_dim,)),
            delta_out=LinearShape((names.delta_out,), (hidden,), net.width),
        )


class MambaShapes(NamedTuple):
    """A Mamba-2 between its projections: to gates, values, keys, queries and time steps; and back."""

    mamba_in: LinearShape
    conv_weight: VectorShape
    conv_bias: VectorShape | None
    rate: VectorShape
    rate_bias: VectorShape
    skip: VectorShape
    norm_weight: VectorShape | None
    mamba_out: LinearShape

    @classmethod
    def of(cls, spec: DecoderSpec, mamba: Mamba) -> "MambaShapes":
        """Return the shapes of the Mamba-2 of a layer."""
        names, hidden, is_plain, heads = spec.weights, spec.hidden_size, spec.weights.is_conv_plain, (mamba.num_heads,)
        channels, groups = sum(mamba.sections[1:4]), (mamba.num_groups, mamba.width // mamba.num_groups)
        assert names.mamba_in is not None, "a Mamba-2 in a map of names without it"
        assert names.mamba_rate is not None
        assert names.mamba_rate_bias is not None
        assert names.mamba_skip is not None
        assert names.mamba_out is not None
        return cls(
            mamba_in=LinearShape((names.mamba_in,), mamba.sections, hidden, mamba.has_bias, is_cut_anywhere=True),
            conv_weight=VectorShape(
                f"{names.mamba_conv}.weight", (channels, mamba.taps) if is_plain else (channels, 1, mamba.taps)
            ),
            conv_bias=VectorShape(f"{names.mamba_conv}.bias", (channels,)) if mamba.has_conv_bias else None,
            rate=VectorShape(names.mamba_rate, (*heads, 1) if is_plain else heads),
            rate_bias=VectorShape(names.mamba_rate_bias, heads),
            skip=VectorShape(names.mamba_skip, (*heads, 1) if is_plain else heads),
            norm_weight=VectorShape(f"{names.mamba_norm}.weight", groups if is_plain else (mamba.width,))
            if mamba.has_norm else None,
            mamba_out=LinearShape((names.mamba_out,), (hidden,), mamba.width, mamba.has_bias),
        )


# The last field of each: back to hidden states.
MixerShapes = AttentionShapes | LatentShapes | ShortConvShapes | DeltaNetShapes | MambaShapes


class LayerShapes(NamedTuple):
    """One layer; `up` and `down` are those of a dense feed-forward, `experts` a mixture in its place or beside it.

    `mixer`: a tuple of the kind of the layer's mixer, with linear layers by the names of their ops.
    """

    attention_norm: NormShape | None
    mixer: MixerShapes | None
    beside: MambaShapes | None
    feed_forward_norm: NormShape | None
    up: LinearShape | None
    down: LinearShape | None
    experts: ExpertShapes | None
    attention_output_norm: NormShape | None
    feed_forward_output_norm: NormShape | None
    expert_norms: ExpertNormShapes | None
    layer_gate: LinearShape | None
    layer_out: LinearShape | None
    layer_output_norm: NormShape | None
    scale: VectorShape | None
    latent_in: LinearShape | None
    latent_out: LinearShape | None

    @classmethod
    def of(cls, spec: DecoderSpec, layer: LayerSpec) -> "LayerShapes":
        """Return the shapes of a layer of a model; the feed-forward beside latents is the shared expert."""
        names, width, mixer, feed_forward = spec.weights, spec.hidden_size, layer.mixer, layer.feed_forward
        up, down, experts, expert_norms, expert_names = None, None, None, None, names.experts or ExpertNames()
        if isinstance(feed_forward, FeedForward):
            up, down = _feed_forward(names.feed_forward_in, names.feed_forward_out, width, feed_forward)
        mixture = feed_forward if isinstance(feed_forward, Experts) else layer.experts_beside
        if mixture is not None:
            experts = ExpertShapes.of(expert_names, width, mixture)
            if mixture.latent_size and mixture.shared is not None:
                up, down = _feed_forward(expert_names.shared_in, expert_names.shared_out, width, mixture.shared)
        latents = 0 if mixture is None else mixture.latent_size
        if layer.experts_beside is not None:
            fields = ExpertNormShapes._fields
            expert_norms = ExpertNormShapes(*(_norm(spec, getattr(expert_names, name), width) for name in fields))
        layer_gate, layer_out, layer_output_norm = _layer_input(spec)

        def norm(module: str | None, sublayer: object) -> NormShape | None:
            return _norm_or_none(spec, None if sublayer is None else module, width)

        attention_norm, feed_forward_norm = names.attention_norm, names.feed_forward_norm
        if isinstance(mixer, DeltaNet) and names.delta_layer_norms is not None:
            attention_norm, feed_forward_norm = names.delta_layer_norms
        return cls(
            attention_norm=norm(attention_norm if layer.has_attention_norm else None, mixer),
            mixer=None if mixer is None else _mixer(spec, mixer),
            beside=None if layer.beside is None else MambaShapes.of(spec, layer.beside),
            feed_forward_norm=norm(feed_forward_norm, feed_forward),
            up=up,
            down=down,
            experts=experts,
            attention_output_norm=norm(names.attention_output_norm, mixer),
            feed_forward_output_norm=norm(names.feed_forward_output_norm, feed_forward),
            expert_norms=expert_norms,
            layer_gate=layer_gate,
            layer_out=layer_out,
            layer_output_norm=layer_output_norm,
            scale=_vector(names.layer_scale, 1) if layer.has_scale else None,
            latent_in=LinearShape((expert_names.latent_in,), (latents,), width) if latents else None,
            latent_out=LinearShape((expert_names.latent_out,), (width,), latents) if latents else None,
        )

    @property
    def feed_forwards(self) -> Sequence[tuple[LinearShape, LinearShape]]:
        """The feed-forward and those of all experts: the layer to the inner width, and the one back."""
        experts = () if self.experts is None else self.experts.experts
        return experts if self.up is None or self.down is None else ((self.up, self.down), *experts)

    @property
    def linears(self) -> dict[str, LinearShape]:
        """The linear layers without experts and heads' own, by the names of their ops."""
        named: dict[str, object] = {}
        for mixer in (self.mixer, self.beside):
            named |= {} if mixer is None else mixer._asdict()
        named |= {
            "feed_forward_in": self.up, "feed_forward_out": self.down, "layer_gate": self.layer_gate,
            "layer_out": self.layer_out, "latent_in": self.latent_in, "latent_out": self.latent_out,
        }  # fmt: skip
        return {
            name: shape for name, shape in named.items() if isinstance(shape, LinearShape) and not shape.is_always_dense
        }


def _mixer(spec: DecoderSpec, mixer: Mixer) -> MixerShapes:
    if isinstance(mixer, ShortConv):
        return ShortConvShapes.of(spec, mixer)
    if isinstance(mixer, DeltaNet):
        return DeltaNetShapes.of(spec, mixer)
    if isinstance(mixer, Mamba):
        return MambaShapes.of(spec, mixer)
    return LatentShapes.of(spec, mixer) if isinstance(mixer, LatentAttention) else AttentionShapes.of(spec, mixer)


def layer_shapes(spec: DecoderSpec, layer: LayerSpec) -> tuple[Shape | None, ...]:
    """Return the shapes of a layer, with those of its experts and of the parts that its family adds."""
    shapes = LayerShapes.of(spec, layer)
    single = (shape for shape in shapes if not isinstance(shape, MixerShapes | ExpertShapes | ExpertNormShapes))
    experts = () if shapes.experts is None else (*shapes.experts.layers, *shapes.experts[2:])
    nested = *(shapes.mixer or ()), *(shapes.beside or ()), *(shapes.expert_norms or ())
    return (*single, *nested, *experts, *(shape for part in layer.parts for shape in part.shapes))


class DecoderShapes(NamedTuple):
    """The modules before and after the layers."""

    embedding: TableShape
    positions: TableShape | None
    token_types: TableShape | None
    embedding_norm: NormShape | None
    project_in: LinearShape | None
    final_norm: NormShape | None
    project_out: LinearShape | None
    classifier: LinearShape | None
    classifier_norm: NormShape | None
    layer_table: TableShape | None
    layer_projection: LinearShape | None
    layer_projection_norm: NormShape | None
    head: LinearShape

    @classmethod
    def of(cls, spec: DecoderSpec) -> "DecoderShapes":
        """Return the shapes of a model. Raises ModelError for a width that nothing projects to."""
        names, width, hidden = spec.weights, spec.embedding_size, spec.hidden_size
        num_positions, classifier, classifier_norm = spec.max_position_embeddings + spec.position_offset, None, None
        num_outputs = spec.vocab_size if spec.classifier is None else spec.classifier.num_labels
        if spec.eagle is not None:
            num_outputs = spec.eagle.num_drafted
        if spec.classifier is not None and spec.has_head:
            assert names.classifier is not None, "a classifier in a map of names without it"
            activation = None if spec.classifier.activation == "tanh" else spec.classifier.activation
            classifier = LinearShape((names.classifier,), (hidden,), hidden, spec.classifier.has_bias, activation)
            classifier_norm = _norm_or_none(spec, names.classifier_norm, hidden)
        return cls(
            embedding=TableShape(names.embedding, spec.vocab_size, width),
            positions=None if names.positions is None else TableShape(names.positions, num_positions, hidden),
            token_types=_token_types(names.token_types, spec.num_token_types, hidden),
            embedding_norm=_norm_or_none(spec, names.embedding_norm, hidden) if spec.has_embedding_norm else None,
            project_in=_projection(names.project_in, hidden, width),
            final_norm=_norm(spec, names.final_norm, hidden) if spec.has_final_norm else None,
            project_out=_projection(names.project_out, width, hidden),
            classifier=classifier,
            classifier_norm=classifier_norm,
            **_layer_inputs(spec),
            head=LinearShape((names.head,), (num_outputs,), width, spec.has_head_bias),
        )


class MtpShapes(NamedTuple):
    """The modules of an MTP head around its layer."""

    embedding_norm: NormShape
    hidden_norm: NormShape
    projection: LinearShape
    final_norm: NormShape

    @classmethod
    def of(cls, spec: DecoderSpec) -> "MtpShapes":
        """Return the shapes of a head, which is the `mtp` of a decoder's spec."""
        names, width = spec.weights, spec.hidden_size
        assert names.mtp_norms is not None, "a decoder that is no MTP head"
        assert names.mtp_projection is not None
        norms = (_norm(spec, module, width) for module in (*names.mtp_norms, names.final_norm))
        embedding_norm, hidden_norm, final_norm = norms
        projection = LinearShape((names.mtp_projection,), (width,), 2 * width)
        return cls(embedding_norm, hidden_norm, projection, final_norm)


class EagleShapes(NamedTuple):
    """The modules of an EAGLE-3 head around its layers, without its layer to logits."""

    embedding: TableShape | None
    joined_norm: NormShape | None
    tap_norms: tuple[NormShape, ...]
    projection: LinearShape
    embedding_norm: NormShape
    hidden_norm: NormShape
    final_norm: NormShape

    @classmethod
    def of(cls, spec: DecoderSpec) -> "EagleShapes":
        """Return the shapes of a head."""
        names, width, eagle = spec.weights, spec.hidden_size, spec.eagle
        assert eagle is not None, "a decoder that is no EAGLE-3 head"
        num_columns, first = eagle.num_taps * eagle.target_size, names.layer.format(layer=0)
        return cls(
            embedding=TableShape(names.embedding, spec.vocab_size, width) if eagle.has_table else None,
            joined_norm=_norm(spec, "input_norm", num_columns) if eagle.has_joined_norm else None,
            tap_norms=tuple(
                _norm(spec, f"fc_norm.{number}", eagle.target_size)
                for number in range(eagle.num_taps if eagle.has_tap_norms else 0)
            ),
            projection=LinearShape(("fc",), (width,), num_columns),
            embedding_norm=_norm(spec, first + names.attention_norm, width),
            hidden_norm=_norm(spec, f"{first}hidden_norm", width),
            final_norm=_norm(spec, names.final_norm, width),
        )

    @property
    def all(self) -> tuple[Shape | None, ...]:
        """All of them, in order."""
        return (*self[:2], *self.tap_norms, *self[3:])


def shapes_around(spec: DecoderSpec) -> tuple[Shape | None, ...]:
    """Return the shapes of the modules before and after the layers, without the layer to logits."""
    if spec.eagle is not None:
        return EagleShapes.of(spec).all
    return tuple(MtpShapes.of(spec)) if spec.is_mtp else DecoderShapes.of(spec)[:-1]


class ProjectorShapes(NamedTuple):
    """A norm, and the layers from an encoder's width to the decoder's."""

    norm: NormShape | None
    layers: tuple[LinearShape, ...]


class VisionShapes(NamedTuple):
    """The modules of an encoder of images around its layers; `deep`: the projectors of layers before the last."""

    patches: LinearShape
    class_token: VectorShape | None
    positions: TableShape | None
    pre_norm: NormShape | None
    post_norm: NormShape | None
    newline: VectorShape | None
    projector: ProjectorShapes
    deep: tuple[ProjectorShapes, ...] = ()

    @classmethod
    def of(cls, spec: VisionSpec) -> "VisionShapes":
        """Return the shapes of an encoder."""
        tower, names, merging = spec.tower, spec.tower.weights, spec.merging
        width, num_values = tower.hidden_size, spec.num_channels * spec.patch_size**2
        if merging is None:
            norm = None if spec.projector_norm is None else NormShape(spec.projector_norm, width, False)
            projectors = [ProjectorShapes(norm, _projector(spec, spec.projector, width))]
        else:
            num_values *= merging.num_frames
            projectors = _merged_projectors(spec, merging)
        return cls(
            patches=LinearShape((spec.patches,), (width,), num_values, spec.has_patch_bias, is_always_dense=True),
            class_token=VectorShape(spec.class_token, (width,)) if spec.has_class_token else None,
            positions=TableShape(names.embedding, tower.vocab_size, width) if tower.vocab_size else None,
            pre_norm=_norm_or_none(tower, spec.pre_norm, width),
            post_norm=_norm(tower, names.final_norm, width) if tower.has_final_norm else None,
            newline=None if spec.tiles is None else VectorShape(f"{spec.tiles.newline}.weight", (spec.hidden_size,)),
            projector=projectors[0],
            deep=tuple(projectors[1:]),
        )


def _merged_projectors(spec: VisionSpec, merging: Merging) -> list[ProjectorShapes]:
    """Return the projector of joined patches, and those of earlier layers: these norm all of a row, it each patch."""
    tower, width = spec.tower, spec.tower.hidden_size
    merged = width * spec.pool**2
    deep = [
        ProjectorShapes(
            _norm(tower, merging.deep_norm.format(index=index, layer=layer), merged),
            _projector(spec, tuple(name.format(index=index, layer=layer) for name in merging.deep_projector), merged),
        )
        for index, layer in enumerate(merging.deep_layers)
    ]
    norm = _norm_or_none(tower, spec.projector_norm, width)
    if merging.merger is None:
        return [ProjectorShapes(norm, _projector(spec, spec.projector, merged)), *deep]
    joined = LinearShape((merging.merger,), (width,), merged)
    return [ProjectorShapes(norm, (joined, *_projector(spec, spec.projector, width))), *deep]


def _projector(spec: VisionSpec, names: tuple[str, ...], width: int) -> tuple[LinearShape, ...]:
    """Return the layers of a projector of one or two layers from a width to the decoder's."""
    has_bias, out = spec.projector_has_bias, spec.hidden_size
    inner = spec.projector_size or out
    first, *more = names
    return (
        LinearShape((first,), (inner if more else out,), width, has_bias, spec.projector_activation),
        *(LinearShape((name,), (out,), inner, has_bias) for name in more),
    )


def vision_shapes(spec: VisionSpec) -> list[Shape | None]:
    """Return the shapes of all weights of an encoder of images."""
    tower = spec.tower
    *around, projector, deep = VisionShapes.of(spec)
    projectors = (shape for each in (projector, *deep) for shape in (each.norm, *each.layers))
    return [*around, *projectors, *(shape for layer in tower.layers for shape in layer_shapes(tower, layer))]


def _feed_forward(
    modules_in: tuple[str, ...],
    module_out: str,
    width: int,
    feed_forward: FeedForward,
    share_of_tokens: Fraction = Fraction(1),
) -> tuple[LinearShape, LinearShape]:
    """Return a feed-forward's layers, to its inner width and back."""
    size, has_bias = feed_forward.size, feed_forward.has_bias
    rows = (size,) * (2 if feed_forward.is_gated else 1)
    up = LinearShape(modules_in, rows, width, has_bias, feed_forward.activation, share_of_tokens=share_of_tokens)
    return up, LinearShape((module_out,), (width,), size, has_bias, share_of_tokens=share_of_tokens)


def _norm(spec: DecoderSpec, module: str, width: int) -> NormShape:
    has_bias = spec.norm == "layer" and spec.norm_has_bias
    return NormShape(module, width, has_bias, spec.norm_has_weight)


def _norm_or_none(spec: DecoderSpec, module: str | None, width: int) -> NormShape | None:
    return None if module is None else _norm(spec, module, width)


def _head_norm(spec: DecoderSpec, attention: Attention, module: str | None, num_heads: int) -> NormShape | None:
    width = attention.head_dim * (num_heads if attention.is_query_key_norm_over_heads else 1)
    norm = _norm_or_none(spec, module, width) if attention.has_query_key_norm else None
    if norm is None or not attention.is_query_key_norm_by_head:
        return norm
    return norm._replace(num_heads=num_heads, has_bias=False)


def _layer_inputs(spec: DecoderSpec) -> dict[str, Any]:
    """Return the modules that make the inputs of all layers, by the names of their fields."""
    names, own = spec.weights, spec.layer_input
    if own is None:
        return dict.fromkeys(("layer_table", "layer_projection", "layer_projection_norm"))
    assert names.layer_table is not None, "embeddings by layer in a map of names without them"
    assert names.layer_projection is not None
    assert names.layer_projection_norm is not None
    width = spec.num_layers * own.size
    return {
        "layer_table": TableShape(names.layer_table, own.num_rows, width),
        "layer_projection": LinearShape((names.layer_projection,), (width,), spec.hidden_size, is_always_dense=True),
        "layer_projection_norm": _norm(spec, names.layer_projection_norm, own.size),
    }


def _layer_input(spec: DecoderSpec) -> tuple[LinearShape | None, LinearShape | None, NormShape | None]:
    """Return a layer's gate of its input, the projection back, and the norm of that."""
    names, own, width = spec.weights, spec.layer_input, spec.hidden_size
    if own is None:
        return None, None, None
    assert names.layer_gate is not None, "embeddings by layer in a map of names without them"
    assert names.layer_out is not None
    gate = LinearShape((names.layer_gate,), (own.size,), width, activation=own.activation)
    out, norm = LinearShape((names.layer_out,), (width,), own.size), _norm_or_none(spec, names.layer_output_norm, width)
    return gate, out, norm


def _token_types(module: str | None, num_types: int, width: int) -> TableShape | None:
    return TableShape(module, num_types, width) if module is not None and num_types > 0 else None


def _vector(name: str | None, length: int) -> VectorShape:
    assert name is not None, "a vector of a layer in a map of names without it"
    return VectorShape(name, (length,))


def _projection(module: str | None, out_size: int, in_size: int) -> LinearShape | None:
    """Return the layer between two widths; None where they are the same."""
    if out_size == in_size:
        return None
    if module is None:
        raise ModelError(f"embeddings of width {in_size} or {out_size} need a projection, which the family has not")
    return LinearShape((module,), (out_size,), in_size)
