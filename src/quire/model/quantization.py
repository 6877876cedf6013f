"""Quantization of a model's linear layers: storage and arithmetic, known before any weight is read. No torch.

It comes from the options of the engine, which quantize a float checkpoint while it is loaded, or from the checkpoint:
the packages of `quire.formats` have subclasses for layers that differ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from quire.core.errors import ConfigError

OnlineMethod = Literal["int8", "int4"]                                          # floats are rounded as they are read
CheckpointMethod = Literal["awq", "gptq", "compressed-tensors", "fp8", "mxfp4", "gguf"]  # vLLM's names of formats
Method = Literal["none", OnlineMethod, CheckpointMethod]
Activations = Literal["int8", "bfloat16"]
ONLINE_METHODS: tuple[OnlineMethod, ...] = get_args(OnlineMethod)
CHECKPOINT_METHODS: tuple[CheckpointMethod, ...] = get_args(CheckpointMethod)
CONFIG_KEYS = ("quantization_config", "compression_config")  # keys of config.json; the second in old folders

DEFAULT_GROUP_SIZE = 128
MIN_GROUP_SIZE = 32
WHOLE_ROW = -1           # the group size that means all inputs of an output
MIN_INT8_ACTIVATION_GROUP = 16  # weights in smaller groups are expanded by default: each group ends with float work
MIN_PART_OF_GROUP = 64          # inputs that share a scale of int8 activations where a weight's group is cut for them
MAX_ACTIVATION_GROUP = 256      # inputs that share a scale of int8 activations; decision 0018 has the measurement


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Storage and arithmetic of a linear layer; the fields are those of its `LinearWeight`."""

    format: str = "dense"
    group_size: int = 0             # inputs that share a scale; WHOLE_ROW: all of an output
    activation_group_size: int = 0  # inputs that share a scale of int8 activations; 0: weights are expanded
    correction: str = "constant"    # one zero point for all, or `zeros` or `minimums` of each group

    def __str__(self) -> str:
        """Return the description in logs: "int4 weights in groups of 128, int8 activations in groups of 128"."""
        if self.format == "dense":
            return "unquantized weights"
        groups = "a scale for each output" if self.group_size == WHOLE_ROW else f"groups of {self.group_size}"
        if not self.activation_group_size:
            return f"{self.format} weights in {groups}, expanded to the model's dtype"
        return f"{self.format} weights in {groups}, int8 activations in groups of {self.activation_group_size}"


class TableBlocks(NamedTuple):
    """Blocks of an embedding table that a CPU keeps as they are stored, unless the model's dtype is float16."""

    num_elements: int  # elements of a block
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization of a model."""

    method: str = "none"
    layers: WeightScheme = WeightScheme()  # the scheme of most layers
    head: WeightScheme = WeightScheme()
    table: TableBlocks | None = None       # None: the embedding table is of floats
    layer_table: TableBlocks | None = None  # and that of embeddings by layer

    def scheme(self, modules: Sequence[str]) -> WeightScheme:
        """Return the scheme of the layer that modules, by their full names in the checkpoint, are fused to."""
        return self.layers

    @property
    def vision(self) -> WeightScheme:
        """The scheme of an encoder of images: int8, as the head, of floats that are rounded as they are read.

        Checkpoints have encoders of floats.
        """
        return self.head if self.method in ONLINE_METHODS else WeightScheme()

    def __str__(self) -> str:
        """Return the description in logs."""
        return f"{self.method}: {self.layers}; output head: {self.head}"


UNQUANTIZED = Quantization()


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """Quantization that is asked for; None: as the checkpoint says, or the default."""

    method: Method | None = None
    group_size: int = DEFAULT_GROUP_SIZE
    activations: Activations | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a group size that there is none of, or that is not used."""
        size = self.group_size
        if size != WHOLE_ROW and (size < MIN_GROUP_SIZE or size % MIN_GROUP_SIZE):
            raise ConfigError(
                f"quantization_group_size must be a multiple of {MIN_GROUP_SIZE}, or {WHOLE_ROW} for one scale for "
                f"each output, got {size}"
            )
        if size != DEFAULT_GROUP_SIZE and self.method not in ONLINE_METHODS:
            raise ConfigError(
                f"quantization_group_size {size} is for quantization {' or '.join(ONLINE_METHODS)}, "
                f"got quantization {self.method!r}"
            )

    def rounds_draft_model(self, stored: Quantization) -> bool:
        """Return whether a draft model, with the quantization `stored` in its files, is rounded as its target is."""
        return stored == UNQUANTIZED and self.method is not None and self.method not in CHECKPOINT_METHODS


def resolve(asked: QuantizationOptions, source: str) -> Quantization:
    """Return the quantization of a model with floating-point weights; `source` names its config.

    Raises ConfigError for options of quantized weights.
    """
    method = asked.method or "none"
    if method in CHECKPOINT_METHODS:
        raise ConfigError(
            f"quantization {method!r} is the format of a checkpoint, and {source} has no {CONFIG_KEYS[0]}; "
            f"{' or '.join(ONLINE_METHODS)} quantize its weights while they are loaded"
        )
    if method == "none":
        if asked.activations is not None:
            raise ConfigError(
                f"quantization_activations {asked.activations!r} is for quantized weights, and those of {source} are "
                f"not; set quantization to {' or '.join(ONLINE_METHODS)}"
            )
        return UNQUANTIZED
    return Quantization(method, online_scheme(method, asked), online_scheme("int8", asked))


def online_scheme(weight_format: str, asked: QuantizationOptions) -> WeightScheme:
    """Return the scheme of integer weights that are quantized while they are loaded."""
    return WeightScheme(weight_format, asked.group_size, activation_group_size(asked.group_size, asked.activations))


def activation_group_size(group_size: int, activations: Activations | None = None) -> int:
    """Return the inputs that share a scale of int8 activations beside integer weights in groups; 0: none do.

    activations: None is the default for the group size.
    """
    is_small = group_size != WHOLE_ROW and group_size < MIN_INT8_ACTIVATION_GROUP
    if activations == "bfloat16" or (activations is None and is_small):
        return 0
    if group_size == WHOLE_ROW:
        return MAX_ACTIVATION_GROUP
    common = math.gcd(group_size, MAX_ACTIVATION_GROUP)
    return common if common >= MIN_PART_OF_GROUP else group_size
