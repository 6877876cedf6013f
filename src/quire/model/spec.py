"""DecoderSpec: a model family as data, layer by layer; `quire.model.layer_builder` makes a layer program of it.

A family is two things: a function from config.json to a `DecoderSpec`, and a `WeightMap` with the names of its tensors.
Sizes are checked here, once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from quire.core.errors import ModelError

NormKind = Literal["rms", "rms_float", "rms_offset", "layer"]  # weights applied in float32: OLMo 2; those plus 1: Gemma
# Before each sublayer (GPT-2 and on); after its sum with the residual (the original transformer); around it, on its
# input and on its output (Gemma 2); on its output alone (OLMo 2).
NormPosition = Literal["pre", "post", "around", "output"]
Activation = Literal[  # _and_mul: gated, two in
    "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "clamped_silu_and_mul", "gelu", "gelu_tanh", "relu",
    "relu2", "quick_gelu",
]  # fmt: skip
ACTIVATIONS: dict[str, Activation] = {  # without a gate, by their names in config.json
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
}
Place = Literal[  # ops of a layer that a part may follow
    "attention_norm", "qkv", "split_heads", "query_up", "rotary_write", "attention", "attention_out", "conv_in", "conv",
    "conv_out", "delta_in", "delta_rates", "gate_down", "gate_up", "decay_down", "decay_up", "delta", "delta_out",
    "mamba_in", "mamba", "mamba_out", "feed_forward_norm", "feed_forward_in", "feed_forward_out", "latent_in",
    "latent_out", "layer_gate", "layer_out",
]  # fmt: skip
PoolingOfTexts = Literal["cls", "mean"]  # the hidden state of the first token, the mean of all


MAX_EXPERTS = 4096  # most experts of a layer


class SpecError(ModelError):
    """Sizes that do not fit together. Does not name the file that they are from: its reader adds that."""


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """A tensor of all experts of a layer, and the tensors, one of each expert, of which it has the rows.

    [num_experts, rows of all of them, ...], or [num_experts, width, rows] if `is_transposed`. Rows of several tensors
    come one after the other, or in turns if `is_interleaved`. `width`: of rows, for families that are stored both ways:
    tensors of another one are transposed.
    """

    name: str
    tensors: tuple[str, ...]
    is_transposed: bool = False
    is_interleaved: bool = False
    width: int = 0


GATE, UP, DOWN = (f"mlp.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down"))
STACKED = (
    StackedTensor("mlp.experts.gate_up_proj", (f"{GATE}.weight", f"{UP}.weight")),
    StackedTensor("mlp.experts.down_proj", (f"{DOWN}.weight",)),
)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the modules of a mixture of experts; `{expert}` is an expert's number.

    `stacked`: the tensors of checkpoints in which experts are stacked; `stacked_names`: other names there, of tensors
    that are not.
    """

    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"  # a tensor's whole name: it takes part in the choice alone
    is_bias_row: bool = False                              # the tensor is [1, num_experts]
    router_scales: str = "router.per_expert_scale"         # a tensor's whole name
    router_norm: str = "router.scale"                      # experts beside a dense feed-forward, and the norms around
    norm: str = "pre_feedforward_layernorm_2"
    output_norm: str = "post_feedforward_layernorm_2"
    dense_output_norm: str = "post_feedforward_layernorm_1"
    expert_in: tuple[str, ...] = (GATE, UP)
    expert_out: str = DOWN
    stacked: tuple[StackedTensor, ...] = STACKED
    stacked_names: Mapping[str, str] = field(default_factory=dict)
    latent_in: str = ""                                    # experts between two projections
    latent_out: str = ""
    shared_gate: str = "mlp.shared_expert_gate"
    shared_in: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_out: str = "mlp.shared_expert.down_proj"


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Hugging Face names of a family's modules, without the `.weight` and `.bias` at the end.

    `prefixes` precede every name but the head's; the usual one is first, base-model classes write the others.
    Tuples of several modules are fused row by row, in that order: query, key, value; gate, up.
    """

    prefixes: tuple[str, ...]
    layer: str                              # "layers.{layer}.", precedes the names of a layer's modules
    embedding: str
    attention_norm: str
    qkv: tuple[str, ...]                    # one name when the checkpoint has them fused
    attention_out: str
    feed_forward_norm: str | None           # None: parallel sublayers share a norm
    feed_forward_in: tuple[str, ...]        # gate and up, or the one projection of an ungated feed-forward
    feed_forward_out: str
    final_norm: str
    head: str = "lm_head"                   # or the last layer of a classifier
    classifier: str | None = None           # the layer before it; both have names without a prefix
    classifier_norm: str | None = None      # norm of that layer's output, named like it
    token_types: str | None = None          # embeddings of the two texts of a pair
    embedding_norm: str | None = None
    positions: str | None = None            # learned position embeddings
    query_norm: str | None = None           # `{head}`: the number of a head that has a module of its own
    key_norm: str | None = None
    sinks: str | None = None                # a tensor, its whole name
    query_up: str | None = None             # attention over latents: from the width between two projections to heads
    kv_up: tuple[str, ...] = ()             # and from latents to keys and values by head; two: [heads, out, in] of each
    conv_in: str | None = None              # projections around short convolutions, and the convolution
    conv: str | None = None
    conv_out: str | None = None
    is_conv_plain: bool = False             # as in GGUF: convolutions are [channels, taps], else [channels, 1, taps]
    delta_in: tuple[str, ...] = ()          # to queries, keys and values of delta nets, and to gates; one: by key heads
    delta_rates: tuple[str, ...] = ()       # to each value head's share of a token and decay; one: by key heads
    delta_gates: tuple[str, str] | None = None   # two projections each to gates, and to decays of rows; delta_rates are
    delta_decays: tuple[str, str] | None = None  # then shares alone, delta_in without gates
    delta_conv: tuple[str, ...] = ()        # the convolution, [channels, 1, taps] as is_conv_plain says; or three parts
    delta_rate: str | None = None           # tensors, their whole names
    delta_rate_bias: str | None = None
    delta_norm: str | None = None
    delta_out: str | None = None
    delta_layer_norms: tuple[str, str] | None = None  # norms in front of layers with a delta net; None: as in others
    mamba_in: str | None = None             # to gates, values, keys, queries and time steps of a Mamba-2
    mamba_conv: str | None = None           # the convolution, with its bias
    mamba_rate: str | None = None           # tensors, their whole names
    mamba_rate_bias: str | None = None
    mamba_skip: str | None = None
    mamba_norm: str | None = None
    mamba_out: str | None = None
    attention_output_norm: str | None = None     # sublayers with norms around them
    feed_forward_output_norm: str | None = None
    mtp_norms: tuple[str, str] | None = None     # an MTP head's norms of an embedding and of a hidden state, and
    mtp_projection: str | None = None            # the projection of both
    layer_scale: str | None = None          # a tensor, its whole name: a number that the stream behind a layer is times
    layer_table: str | None = None          # embeddings by layer (Gemma 4), and what is projected and added to them
    layer_projection: str | None = None
    layer_projection_norm: str | None = None
    layer_gate: str | None = None           # a layer's projections around its part of these, and its norm
    layer_out: str | None = None
    layer_output_norm: str | None = None
    experts: ExpertNames | None = None      # layers with experts in place of a dense feed-forward
    project_in: str | None = None           # between embeddings and hidden states of another width
    project_out: str | None = None
    is_transposed: bool = False             # linear weights of layers are stored [in, out]
    is_qkv_grouped: bool = False            # the fused rows are, for each KV head, those of its queries, key and value
    other_heads: tuple[str, ...] = ()       # names of the head in other checkpoints, which count where they are found
    skipped: tuple[str, ...] = ()           # parts of names of tensors that are not served: vision
    harmless: tuple[str, ...] = ()          # ends of names that checkpoints have and no layer reads
    renamed: Mapping[str, str] = field(default_factory=dict)  # ends of names of tensors, and what stands for them


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding: what the frequencies of pairs of dimensions are computed from. See `rope.py`."""

    head_dim: int                           # dimensions of a head that are rotated, the first ones
    theta: float
    max_positions: int                      # the longest sequence, with what a scaling adds
    factor: float = 1.0                     # positions are pressed together by it: all, or those that the next two say
    turns: tuple[float, float, float] | None = None  # Llama 3.1: original length, turns in it of the slow and the kept
    ramp: tuple[float, float] | None = None  # YaRN: the last pair that is kept, the first that is interpolated
    scale: float = 1.0                      # multiplies cosines and sines (YaRN's attention factor)
    dynamic: tuple[int, float] | None = None  # dynamic NTK: original length, factor
    divisors: tuple[float, ...] | None = None  # one for each pair's frequency
    long: tuple[int, tuple[float, ...]] | None = None  # longrope: original length, divisors of longer sequences
    is_interleaved: bool = False            # pairs are dimensions (2i, 2i + 1), else (i, head_dim / 2 + i)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A dense feed-forward: projections to `size` dimensions, activated, and one back."""

    size: int
    activation: Activation
    has_bias: bool = False

    @property
    def is_gated(self) -> bool:
        """The feed-forward multiplies an activated gate with a second projection."""
        return self.activation.endswith("_and_mul")

    @property
    def active_size(self) -> int:
        """Inner dimensions that a token uses."""
        return self.size

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.size,)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: a token uses the `num_active` ones that a router scores highest (Shazeer et al. 2017)."""

    num_experts: int
    num_active: int
    expert: FeedForward
    is_normalized: bool                # the weights of a token's experts sum to 1
    has_router_bias: bool = False
    shared: FeedForward | None = None  # used by every token, times the sigmoid of a score of its own
    is_shared_scored: bool = True      # False: times 1
    is_sigmoid: bool = False           # weights are sigmoids of scores, not a softmax
    has_choice_bias: bool = False      # experts are chosen by their weights plus a bias of each
    factor: float = 1.0                # on the weights of a token's experts
    num_groups: int = 1                # equal in size; a token's experts are in the best `num_kept_groups`
    num_kept_groups: int = 1
    num_group_keys: int = 2            # a group is as good as the sum of so many of its best experts
    has_scales: bool = False           # an expert's weight is times a number of its own
    latent_size: int = 0               # width between two projections, of all but the shared expert; 0: there are none

    def __post_init__(self) -> None:
        if self.num_active > self.num_experts:
            raise SpecError(f"{self.num_active} experts of each token are more than {self.num_experts} experts")
        if self.num_experts % self.num_groups or self.num_kept_groups > self.num_groups:
            groups = f"{self.num_kept_groups} of {self.num_groups} groups"
            raise SpecError(f"{self.num_experts} experts do not divide into {groups} of equal size")
        num_kept = self.num_experts // self.num_groups * self.num_kept_groups
        if self.num_active > num_kept:
            raise SpecError(f"{self.num_active} experts of each token are more than {num_kept} in the kept groups")
        assert self.shared is not None or not self.latent_size, "latents without a shared expert beside them"

    @property
    def active_size(self) -> int:
        """Inner dimensions that a token uses, over all of its experts."""
        return self.num_active * self.expert.size + (0 if self.shared is None else self.shared.size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Widths of inner activations: of an expert, and of the shared one."""
        return (self.expert.size,) if self.shared is None else (self.expert.size, self.shared.size)


@dataclass(frozen=True, slots=True)
class Part:
    """An op that a family adds to a layer: the extension point of layer programs (docs/adding-a-model.md).

    `make(reader, name)` returns the op: a `quire.kernels.program.Op` of that name, its weights read by `reader`, the
    layer's WeightReader. It runs behind the layer's op `after`. `shapes` are those of its weights.
    """

    name: str
    after: Place
    make: Callable[..., Any]
    shapes: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention over cached keys and values; several query heads share a KV head (Ainslie et al. 2023)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float | None = None        # None: 1 / sqrt(head_dim)
    window: int | None = None                   # tokens looked back on, itself included
    has_qkv_bias: bool = False
    has_attention_out_bias: bool = False
    has_query_key_norm: bool = False
    is_query_key_norm_over_heads: bool = False  # all heads of a token together
    is_query_key_norm_by_head: bool = False     # each head has weights of its own, and no bias
    softcap: float = 0.0                        # scores become softcap * tanh(score / softcap); 0: none
    has_sinks: bool = False                     # a score for each head, of one more key without values
    qkv_limit: float = 0.0                      # normed queries, keys, and values are clipped to +- limit; 0: not
    position_scale: tuple[float, int] | None = None  # b, n: queries times 1 + b * log(1 + position // n)
    has_rotary: bool = True                     # False: no positions in this layer
    rotary: Rotary | None = None                # this layer's alone; None: the decoder's
    is_causal: bool = True                      # False: a token attends to those after it as well
    has_output_gate: bool = False               # results times sigmoids of what is projected behind each query
    has_value_norm: bool = False                # values are normalized over each head, without weights
    are_values_keys: bool = False               # values are keys before their norm, and are not projected
    cache_layer: int | None = None              # reads the cache of this earlier layer, and has no keys; None: its own
    reads_embedding: bool = False               # projects an embedding beside the hidden state (EAGLE-3 heads)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise SpecError(f"{self.num_heads} attention heads do not divide among {self.num_kv_heads} key-value heads")
        assert self.has_value_norm or not self.are_values_keys, "values in the memory of keys"

    @property
    def num_projected(self) -> int:
        """Number of queries, keys and values that are projected."""
        return 1 if self.cache_layer is not None else 2 if self.are_values_keys else 3

    @property
    def scale(self) -> float:
        """The factor on attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def key_value_dim(self) -> int:
        """Dimensions of a cached key, its first ones, that are its value; 0: values are cached by themselves."""
        return 0

    @property
    def output_dim(self) -> int:
        """Columns of a head before the last projection."""
        return self.head_dim

    @property
    def width(self) -> int:
        """Columns of all heads before the last projection."""
        return self.num_heads * self.output_dim

    @property
    def attended_flops(self) -> int:
        """Operations for a pair of a token and one that it attends to."""
        return 2 * self.num_heads * (self.head_dim + (self.key_value_dim or self.head_dim))


@dataclass(frozen=True, slots=True)
class LatentAttention(Attention):
    """Attention over one latent of each token (DeepSeek-AI 2024, section 2.1), absorbed at every row count.

    Tokens have one KV head: `latent_dim` normalized dimensions, which are its value, and behind them `rope_dim` rotated
    ones. `nope_dim` dimensions of a query head are projected to the latent's, and the rest is rotated; what the head
    attends to is projected from the latent to `expanded_dim` dimensions.
    """

    latent_dim: int = 512
    query_rank: int = 0    # width between two projections of queries, with a norm; 0: there is one projection
    nope_dim: int = 128
    expanded_dim: int = 128

    def __post_init__(self) -> None:
        Attention.__post_init__(self)
        if self.latent_dim % 8:
            raise SpecError(f"latents of {self.latent_dim} dimensions are not supported: multiples of 8 are")

    @property
    def rope_dim(self) -> int:
        """Rotated dimensions of keys and queries."""
        return self.head_dim - self.latent_dim

    @property
    def query_dim(self) -> int:
        """Dimensions of a query head as it is projected."""
        return self.nope_dim + self.rope_dim

    @property
    def key_value_dim(self) -> int:
        """The latent is the value."""
        return self.latent_dim

    @property
    def output_dim(self) -> int:
        """Dimensions of an expanded value."""
        return self.expanded_dim


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Causal convolution of each channel over the last `taps` tokens, gated on both sides (LFM2: Liquid AI 2025)."""

    width: int                  # channels, as many as a hidden state has
    taps: int                   # tokens that a token sees, itself included
    has_bias: bool = False      # the convolution's and both projections'


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A gated delta rule over a state per sequence, behind a convolution over `taps` tokens (Yang et al. 2025)."""

    num_key_heads: int
    num_value_heads: int        # several share a key head
    key_dim: int                # width of a key head, and of a query head
    value_dim: int
    taps: int                   # tokens that a token's convolution sees, itself included
    is_tiled: bool = False      # value head i reads key head i % num_key_heads; else those of one are neighbours
    has_plain_rate: bool = False  # the tensor of decays is their rate times -1, else its logarithm
    max_share: float = 1.0        # 2: a token may turn around what the state holds for its key (Grazzi et al. 2025)
    norm_eps: float | None = None  # epsilon of the results' norm; None: the model's
    low_rank: int = 0  # Kimi's, with a decay of each row of the state: width between two projections of those and gates

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            counts = f"{self.num_value_heads} value heads do not divide among {self.num_key_heads} key heads"
            raise SpecError(f"a gated delta net: {counts}")
        for name, dim in (("keys", self.key_dim), ("values", self.value_dim)):
            if dim % 16:
                raise SpecError(f"a gated delta net: {name} of {dim} dimensions are not supported: multiples of 16 are")

    @property
    def width(self) -> int:
        """Columns of all heads before the last projection."""
        return self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Mamba:
    """A Mamba-2: a decaying state per sequence and head, behind a convolution over `taps` tokens (Dao and Gu 2024)."""

    num_groups: int             # groups of heads, which share what their states are written and read by
    num_heads: int
    state_dim: int              # width of that
    head_dim: int
    taps: int                   # tokens that a token's convolution sees, itself included
    has_conv_bias: bool = True
    has_bias: bool = False      # both projections'
    has_norm: bool = True       # over each group's heads, of results that are gated
    is_norm_first: bool = False  # the gate multiplies what is normed; else what will be
    has_plain_rate: bool = False  # the tensor of decays is their rate times -1, else its logarithm
    multipliers: tuple[float, ...] = (1.0,) * 5  # on gates, values, keys, queries and time steps, as they are projected

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise SpecError(f"a Mamba-2: {self.num_heads} heads do not divide among {self.num_groups} groups")
        for name, dim in (("states", self.state_dim), ("heads", self.head_dim)):
            if dim % 16:
                raise SpecError(f"a Mamba-2: {name} of {dim} dimensions are not supported: multiples of 16 are")

    @property
    def width(self) -> int:
        """Columns of all heads before the last projection."""
        return self.num_heads * self.head_dim

    @property
    def sections(self) -> tuple[int, ...]:
        """Columns of gates, values, keys, queries and time steps."""
        keys = self.num_groups * self.state_dim
        return self.width, self.width, keys, keys, self.num_heads


# Kinds of sublayers that move information between the tokens of a sequence.
Mixer = Attention | ShortConv | DeltaNet | Mamba


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: a mixer and a feed-forward, each with a norm and a residual connection. Layers may differ.

    Either may be missing, with its norm: a Nemotron-H has layers of one sublayer. A Falcon-H1 has a second mixer.
    `experts_beside` read the same stream as a dense feed-forward; each of both has a norm of its output, and their sum
    another (Gemma 4).
    """

    mixer: Mixer | None
    feed_forward: FeedForward | Experts | None
    norm_position: NormPosition = "pre"
    has_attention_norm: bool = True             # False: the mixer reads the stream itself
    is_parallel: bool = False                   # mixer and feed-forward read the same stream
    residual_multiplier: float = 1.0            # factor on what each sublayer adds to the stream
    beside: Mamba | None = None                 # reads what the mixer reads; their outputs are added
    mixer_multipliers: tuple[float, float] = (1.0, 1.0)         # factors on the outputs of the mixer and of that
    feed_forward_multipliers: tuple[float, float] = (1.0, 1.0)  # and on the feed-forward's input and output
    experts_beside: Experts | None = None
    has_scale: bool = False                     # the stream behind the layer is times a number of the checkpoint
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        is_whole = self.mixer is not None and self.feed_forward is not None
        if not is_whole and (self.is_parallel or self.norm_position not in ("pre", "around")):
            raise SpecError(f"layers of one sublayer with {self.norm_position} norms are not supported")
        has_multipliers = {*self.mixer_multipliers, *self.feed_forward_multipliers} != {1.0}
        if (self.beside is not None or has_multipliers) and (self.is_parallel or self.norm_position != "pre"):
            raise SpecError(f"two mixers, or multipliers, with {self.norm_position} norms are not supported")
        if self.experts_beside is not None:
            assert isinstance(self.feed_forward, FeedForward), "experts beside a dense feed-forward"
            assert self.norm_position == "around", "norms of the outputs of both"

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixer, and that beside it, if there are any."""
        return tuple(each for each in (self.mixer, self.beside) if each is not None)

    @property
    def feed_forwards(self) -> "tuple[FeedForward | Experts, ...]":
        """The feed-forward, and the experts beside it, if there are any."""
        return tuple(each for each in (self.feed_forward, self.experts_beside) if each is not None)

    @property
    def attention(self) -> Attention | None:
        """The mixer if it is attention."""
        return self.mixer if isinstance(self.mixer, Attention) else None

    def with_attention(self, **changes: Any) -> "LayerSpec":  # noqa: ANN401 (any field)
        """Return the layer with changed fields of its attention; the same if it has none."""
        attention = self.attention
        return self if attention is None else replace(self, mixer=replace(attention, **changes))


@dataclass(frozen=True, slots=True)
class Classifier:
    """A head that classifies a text by its pooled hidden states: a layer as wide, activated, and one to labels."""

    num_labels: int
    activation: Activation | Literal["tanh"]
    has_bias: bool = True              # the first layer has one
    pooling: PoolingOfTexts = "cls"


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Input that each layer adds to the stream behind its feed-forward (Gemma 4): `size` dimensions of a token, gated.

    They are a row of a table, and a projection of the token's embedding.
    """

    size: int
    num_rows: int          # rows of the table, one for each token id
    activation: Activation  # on the gate, which is projected from the stream


@dataclass(frozen=True, slots=True)
class Eagle:
    """Parts of an EAGLE-3 head (Li et al. 2025) beside its layers, and the target that it was trained for.

    It reads streams of the target in front of the layers `taps`, of `target_size` columns each, projected to one
    hidden state. The first layer's attention reads the normalized embedding of a token and the normalized hidden state
    of the token before, side by side.
    """

    taps: tuple[int, ...]              # ascending; empty: those of the target's depth, by `fitted`
    num_taps: int
    target_size: int
    num_drafted: int                   # rows of its head: tokens that it drafts
    has_table: bool                    # embeddings of its own, else the target's
    has_joined_norm: bool = False      # the streams side by side are normalized, or each by itself
    has_tap_norms: bool = False
    is_residual_normed: bool = False   # the layer's stream begins with the normalized hidden state
    is_output_normed: bool = False     # the next draft reads the final norm's output, else its input


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Sizes and choices of a decoder, or of an encoder, and how its weights are called.

    The layers of an encoder are not causal. It keeps no keys and values: it computes whole texts, and its hidden states
    are pooled or classified.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    norm: NormKind
    norm_eps: float
    weights: WeightMap = field(repr=False)
    rotary: Rotary | None = field(default=None, repr=False)  # None: learned positions
    positions_reason: str = ""                  # for fewer positions than the model was made for
    position_offset: int = 0                    # rows of the position table before position 0
    embedding_size: int = 0                     # 0: hidden_size; else projected in and out
    norm_has_weight: bool = True
    norm_has_bias: bool = True                  # LayerNorms alone
    has_final_norm: bool = True
    is_head_tied: bool = False                  # the head is the embedding table
    has_head: bool = True                       # False: a base model; its hidden states are pooled
    has_head_bias: bool = False
    embedding_multiplier: float = 1.0
    is_embedding_multiplier_rounded: bool = False  # to the model's dtype, before it multiplies
    logit_multiplier: float = 1.0
    logit_softcap: float = 0.0                  # logits become softcap * tanh(logit / softcap); 0: none
    num_token_types: int = 0                    # 0: no embeddings of token types
    has_embedding_norm: bool = False
    classifier: Classifier | None = None        # the head, in place of one over the vocabulary
    layer_input: LayerInput | None = None
    vision: "VisionSpec | None" = field(default=None, repr=False)  # None: reads text alone
    mtp: "DecoderSpec | None" = field(default=None, repr=False)  # an MTP head of the checkpoint, as `with_mtp` makes it
    eagle: Eagle | None = None                  # parts of an EAGLE-3 head; None: it is none

    def __post_init__(self) -> None:
        object.__setattr__(self, "embedding_size", self.embedding_size or self.hidden_size)
        if self.rotary is not None:
            object.__setattr__(self, "max_position_embeddings", self.rotary.max_positions)
        if not self.attentions:
            raise SpecError("models without a layer of attention are not supported")
        if len({attention.is_causal for attention in self.attentions}) > 1:
            raise SpecError("causal layers together with others are not supported yet")
        if not self.is_causal and len({(each.num_kv_heads, each.head_dim) for each in self.attentions}) > 1:
            raise SpecError("encoders of layers with different heads are not supported yet")
        head_dims = sorted({attention.head_dim for attention in self.attentions})
        if len(head_dims) > 1 and (odd := [each for each in head_dims if each % 8]):
            raise SpecError(f"layers with heads of {head_dims} dimensions need multiples of 8, and {odd[0]} is none")
        for attention in self.attentions:
            rotary = self.rotary_of(attention)
            if rotary is not None and rotary.head_dim % 2:
                raise SpecError(f"rotary embedding needs an even head_dim, got {rotary.head_dim}")
            if rotary is not None and not 0 < rotary.head_dim <= attention.head_dim:
                raise SpecError(f"rotary embedding of {rotary.head_dim} dimensions of heads of {attention.head_dim}")

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The layers that are attention, in order."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))

    @property
    def cached_attentions(self) -> tuple[Attention, ...]:
        """Layers with a KV cache of their own, in order: none of an encoder's."""
        return tuple(each for each in self.attentions if each.is_causal and each.cache_layer is None)

    @property
    def feed_forwards(self) -> tuple[FeedForward | Experts, ...]:
        """The feed-forwards of the layers that have one, and the experts beside them."""
        return tuple(each for layer in self.layers for each in layer.feed_forwards)

    def rotary_of(self, attention: Attention) -> Rotary | None:
        """Return the rotary embedding of a layer; None for none."""
        return (attention.rotary or self.rotary) if attention.has_rotary else None

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The different rotary embeddings of the layers."""
        found = map(self.rotary_of, self.attentions)
        return tuple(dict.fromkeys(rotary for rotary in found if rotary is not None))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Attention heads of the layer with the most."""
        return max(attention.num_heads for attention in self.attentions)

    @property
    def head_dim(self) -> int:
        """Dimensions of the widest heads."""
        return max(attention.head_dim for attention in self.attentions)

    @property
    def has_tails(self) -> bool:
        """True if blocks keep inputs of short convolutions beside keys and values."""
        return any(isinstance(layer.mixer, ShortConv) for layer in self.layers)

    @property
    def delta_nets(self) -> tuple[DeltaNet, ...]:
        """The layers that are gated delta nets, in order."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaNet))

    @property
    def mambas(self) -> tuple[Mamba, ...]:
        """The layers that are a Mamba-2, in order."""
        return tuple(each for layer in self.layers for each in layer.mixers if isinstance(each, Mamba))

    @property
    def has_states(self) -> bool:
        """True if layers keep a state per sequence."""
        return bool(self.delta_nets or self.mambas)

    @property
    def mixed_width(self) -> int:
        """Columns of the widest output of a mixer, before its last projection."""
        return max(mixer.width for layer in self.layers for mixer in layer.mixers)

    @property
    def attended_flops(self) -> int:
        """Operations of all layers for a pair of a token and one that it attends to."""
        return sum(attention.attended_flops for attention in self.attentions)

    @property
    def is_mtp(self) -> bool:
        """True if it is an MTP head: its embeddings and its layer to logits are those of its target."""
        return self.weights.mtp_projection is not None

    @property
    def is_draft_head(self) -> bool:
        """Return whether it is a head that reads hidden states of a target."""
        return self.is_mtp or self.eagle is not None

    @property
    def is_causal(self) -> bool:
        """True if it is a decoder; else an encoder."""
        return self.attentions[0].is_causal

    @property
    def generates(self) -> bool:
        """True if it has logits of next tokens."""
        return self.is_causal and self.has_head

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer that is attention."""
        return tuple(attention.window for attention in self.attentions)

    def with_layers(self, change: Callable[[LayerSpec], LayerSpec]) -> "DecoderSpec":
        """Return the spec with all layers changed."""
        return replace(self, layers=tuple(map(change, self.layers)))

    def with_attention(self, **changes: Any) -> "DecoderSpec":  # noqa: ANN401 (any field)
        """Return the spec with changed fields in the attention of all layers that have it."""
        return self.with_layers(lambda layer: layer.with_attention(**changes))

    def with_windowed_layers(self, types: Sequence[str], **changes: Any) -> "DecoderSpec":  # noqa: ANN401 (any field)
        """Return the spec with changed attention in the layers of the type `sliding_attention`; `types`: of all."""
        pairs = zip(self.layers, types, strict=True)
        layers = (layer.with_attention(**changes) if kind == "sliding_attention" else layer for layer, kind in pairs)
        return replace(self, layers=tuple(layers))

    def with_windows(self, windows: Sequence[int | None]) -> "DecoderSpec":
        """Return the spec with these windows, one per layer. Raises SpecError for another number of them."""
        if len(windows) != self.num_layers:
            raise SpecError(f"windows: {len(windows)} entries for {self.num_layers} layers")
        layers = (layer.with_attention(window=each) for layer, each in zip(self.layers, windows, strict=True))
        return replace(self, layers=tuple(layers))

    @property
    def default_positions(self) -> int:
        """The longest sequence unless a longer one is asked for: as long as no scaling depends on it."""
        changing = [each for rotary in self.rotaries for each in (rotary.dynamic, rotary.long) if each is not None]
        return min([self.max_position_embeddings, *(original for original, _ in changing)])

    @property
    def sliding_window(self) -> int | None:
        """The widest window, as in `widest_window`."""
        return widest_window(self.windows)


@dataclass(frozen=True, slots=True)
class Merging:
    """An encoder of images of any size (Qwen-VL, Pixtral): a square of neighboring patches becomes one row.

    The patches of a square are consecutive, with rotary positions by row and column. `axes`: for each pair of the
    decoder's rotary dimensions, whether it turns by an image token's time (0), row (1) or column (2); empty: tokens of
    images have one position, as those of texts.
    """

    axes: tuple[int, ...] = ()
    has_column_frequencies: bool = False   # columns turn by the frequencies between those of rows (Pixtral)
    num_frames: int = 1                    # frames of a patch; an image is all of them
    window: int = 0                        # squares in a row, and in a column, that see each other; 0: all do
    whole_layers: frozenset[int] = frozenset()  # without windows
    # Layers with outputs that are projected, too, and added behind the decoder's first layers; names of their modules.
    deep_layers: tuple[int, ...] = ()
    deep_norm: str = "deepstack_merger_list.{index}.norm"
    merger: str | None = None              # module of a layer that joins a square, by channels, before the projector
    deep_projector: tuple[str, str] = (
        "deepstack_merger_list.{index}.linear_fc1", "deepstack_merger_list.{index}.linear_fc2"
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tiles:
    """Images of any size as tiles of one size (LLaVA-OneVision): of all of the image, and of it scaled to a size.

    size: pixels of a tile in a row. sizes: of images, height and width, multiples of that. most: tiles with as many
    rows as the image keeps. newline: module of the vector behind each row.
    """

    size: int
    sizes: tuple[tuple[int, int], ...]
    most: int
    newline: str = "image_newline"


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """An encoder of images, and the projector from its width to the decoder's.

    Square images, or with `merging` any, are cut into patches, which are projected; with learned positions they pass
    the layers of `tower`, which are not causal. `projector`: modules of its one or two layers, below one of
    `projector_prefixes`.
    """

    family: str                            # the family of the processors that make pixels
    image_token_id: int                    # its embeddings are replaced by what the projector gives
    tower: DecoderSpec                     # `vocab_size`: positions, of a square, interpolated with `merging`; 0: none
    image_size: int                        # pixels; 0: any
    patch_size: int                        # pixels
    num_channels: int
    hidden_size: int                       # the decoder's
    has_class_token: bool = False          # before the patches
    keeps_class_token: bool = False        # behind the layers
    has_patch_bias: bool = False
    pool: int = 1                          # rows of patches, and columns, that become one: by their mean, or merged
    sees_whole: bool = False               # the decoder's tokens of one image see each other
    has_row_ends: bool = False             # behind each row of an image's tokens is one of text (Pixtral)
    projector_norm: str | None = None      # before the projector, with weights plus 1 (Gemma)
    projector_norm_eps: float | None = None  # None: the encoder's
    projector_activation: Activation | None = None
    projector_has_bias: bool = False
    projector_size: int = 0                # between its two layers; 0: the decoder's
    patches: str = "embeddings.patch_embedding"
    class_token: str = "embeddings.class_embedding"  # noqa: S105 (no password)
    pre_norm: str | None = None
    projector: tuple[str, ...] = ("linear_1", "linear_2")
    is_projector_transposed: bool = False
    projector_prefixes: tuple[str, ...] = ("multi_modal_projector.", "model.multi_modal_projector.")
    merging: Merging | None = None         # None: images of one size, or of tiles of one
    tiles: Tiles | None = None

    @property
    def grid(self) -> int:
        """Patches in a row, and in a column, of images of one size."""
        return self.image_size // self.patch_size

    @property
    def num_tokens(self) -> int:
        """Rows of the decoder that an image of one size gives."""
        return (self.grid // self.pool) ** 2 + self.keeps_class_token

    @property
    def has_places(self) -> bool:
        """True if the decoder's tokens of images have positions by row and column."""
        return self.merging is not None and bool(self.merging.axes)

    @property
    def unit(self) -> int:
        """Rows of pixels, and columns, that one row of the decoder stands for."""
        return self.patch_size * self.pool

    @property
    def row_width(self) -> int:
        """Columns of an encoded row: the decoder's, and those for each of its layers that adds some."""
        return self.hidden_size * (1 if self.merging is None else 1 + len(self.merging.deep_layers))


def widest_window(windows: Sequence[int | None]) -> int | None:
    """Return the widest of the layers' windows if every layer has one, else None: blocks before it can be freed."""
    widths = [window for window in windows if window is not None]
    return max(widths) if widths and len(widths) == len(windows) else None


def with_mtp(spec: DecoderSpec, **names: Any) -> DecoderSpec:  # noqa: ANN401 (fields of WeightMap)
    """Return the spec with an MTP head: one layer as its last layer of attention, with other names of modules.

    The head predicts the token behind the next one from that token's embedding and the hidden state before it
    (DeepSeek-AI 2024, V3, section 2.2).
    """
    layer = next(layer for layer in reversed(spec.layers) if layer.attention is not None)
    head = replace(spec, layers=(layer,), weights=replace(spec.weights, skipped=(), **names), vision=None)
    return replace(spec, mtp=head)


def interleaved(spec: DecoderSpec) -> DecoderSpec:
    """Return the spec with interleaved pairs in its rotary embedding."""
    return spec if spec.rotary is None else replace(spec, rotary=replace(spec.rotary, is_interleaved=True))
