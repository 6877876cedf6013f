"""Quantization of a model's linear layers: storage and arithmetic, known before any weight is read. No torch.

It comes from the options of the engine, which quantize a float checkpoint while it is loaded, or from the checkpoint.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from quire.core.errors import ConfigError
from quire.model.weight_formats.options import HEAD
from quire.model.weight_formats.quantization_config import quantization_from_config
from quire.model.weight_formats.schemes import StoredQuantization, StoredScheme

OnlineMethod = Literal["int8", "int4"]                                          # floats are rounded as they are read
CheckpointMethod = Literal["awq", "gptq", "compressed-tensors", "fp8", "gguf"]  # vLLM's names of formats
Method = Literal["none", OnlineMethod, CheckpointMethod]
Activations = Literal["int8", "bfloat16"]
ONLINE_METHODS: tuple[OnlineMethod, ...] = get_args(OnlineMethod)
CHECKPOINT_METHODS: tuple[CheckpointMethod, ...] = get_args(CheckpointMethod)
CONFIG_KEY = "quantization_config"

DEFAULT_GROUP_SIZE = 128
MIN_GROUP_SIZE = 32
WHOLE_ROW = -1           # the group size that means all inputs of an output
MIN_INT8_ACTIVATION_GROUP = 16  # weights in smaller groups are expanded by default: each group ends with float work
MIN_PART_OF_GROUP = 64          # inputs that share a scale of int8 activations where a weight's group is cut for them
MAX_TOKEN_INPUTS = 1 << 16      # inputs that share a scale where checkpoints say one for each token: all, up to these
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


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization of a model."""

    method: str = "none"
    layers: WeightScheme = WeightScheme()  # of a checkpoint's, that of most
    head: WeightScheme = WeightScheme()
    stored: StoredQuantization | None = None  # of a quantized checkpoint: the scheme of each module
    activations: Activations | None = None    # asked for; None: the default for each module
    modules: Mapping[str, WeightScheme] | None = None  # of a GGUF file: the scheme of each module

    def scheme(self, modules: Sequence[str]) -> WeightScheme:
        """Return the scheme of the layer that modules, by their full names in the checkpoint, are fused to."""
        if self.stored is not None:
            return stored_scheme(self.stored.fused_scheme(modules), self.activations)
        if self.modules is None:
            return self.layers
        schemes = {self.modules.get(module, WeightScheme()) for module in modules}
        return schemes.pop() if len(schemes) == 1 else _fused_blocks(schemes, self.activations)

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


def resolve(asked: QuantizationOptions, config: Mapping[str, object], source: str) -> Quantization:
    """Return the quantization of a model, from its config.json and from the options; `source` names the config.

    Raises ConfigError for options that contradict the config, ModelError for a config that is not supported.
    """
    stored = quantization_from_config(config, source)
    if stored is not None:
        return _resolve_stored(asked, stored, source)
    method = asked.method or "none"
    if method in CHECKPOINT_METHODS:
        raise ConfigError(
            f"quantization {method!r} is the format of a checkpoint, and {source} has no {CONFIG_KEY}; "
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


def _resolve_stored(asked: QuantizationOptions, stored: StoredQuantization, source: str) -> Quantization:
    """Return the quantization of a quantized checkpoint."""
    if asked.method not in (None, stored.method):
        raise ConfigError(f"quantization {asked.method!r} contradicts {source}: {CONFIG_KEY} says {stored.method!r}")
    if asked.activations == "int8" and any(scheme.element == "fp8" for scheme in stored.schemes):
        raise ConfigError(f"quantization_activations 'int8' is for integer weights, and {source} has fp8 weights")
    layers = stored_scheme(stored.schemes[-1] if stored.schemes else None, asked.activations)
    head = stored_scheme(stored.scheme(HEAD), asked.activations)
    return Quantization(stored.method, layers, head, stored, asked.activations)


def stored_scheme(scheme: StoredScheme | None, activations: Activations | None) -> WeightScheme:
    """Return the scheme of a weight as a checkpoint has it; None is dense. activations: as of `QuantizationOptions`."""
    if scheme is None:
        return WeightScheme()
    group_size, correction = scheme.group_size or WHOLE_ROW, "zeros" if scheme.has_zero_points else "constant"
    activation_groups = 0 if scheme.element == "fp8" else activation_group_size(group_size, activations)
    if scheme.quantizes_activations and activations != "bfloat16":
        activation_groups = scheme.group_size or MAX_TOKEN_INPUTS
    return WeightScheme(scheme.element, group_size, activation_groups, correction)


def _fused_blocks(schemes: Collection[WeightScheme], activations: Activations | None) -> WeightScheme:
    """Return the scheme of blocks of several types as one layer: 8-bit integers in the smallest groups, or dense."""
    if any(scheme.format == "dense" for scheme in schemes):
        return WeightScheme()
    group_size = min(scheme.group_size for scheme in schemes)
    has_minimums = any(scheme.correction == "minimums" for scheme in schemes)
    correction = "minimums" if has_minimums else "zeros"
    return WeightScheme("int8", group_size, activation_group_size(group_size, activations), correction)


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
