"""Quantization of a folder with quantized weights: storage and arithmetic of each layer. Loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.errors import ConfigError
from quire.formats.quantized.config_options import HEAD
from quire.formats.quantized.schemes import StoredQuantization, StoredScheme
from quire.model.quantization import (
    CONFIG_KEYS,
    WHOLE_ROW,
    Activations,
    Quantization,
    QuantizationOptions,
    WeightScheme,
    activation_group_size,
)

FLOAT_ELEMENTS = "fp8", "codebook4"
MAX_TOKEN_INPUTS = 1 << 16  # inputs that share a scale where checkpoints say one for each token: all, up to these


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderQuantization(Quantization):
    """A `Quantization` with a scheme for each module."""

    stored: StoredQuantization
    activations: Activations | None = None  # asked for; None: the default for each module

    def scheme(self, modules: Sequence[str]) -> WeightScheme:
        """Return the scheme of the layer that modules are fused to: dense where they differ."""
        return weight_scheme(self.stored.fused_scheme(modules), self.activations)


def folder_quantization(asked: QuantizationOptions, stored: StoredQuantization, source: str) -> FolderQuantization:
    """Return the quantization of a folder. ConfigError for options that contradict it; `source` names its config."""
    if asked.method not in (None, stored.method):
        raise ConfigError(
            f"quantization {asked.method!r} contradicts {source}: {CONFIG_KEYS[0]} says {stored.method!r}"
        )
    floats = [scheme.element for scheme in stored.schemes if scheme.element in FLOAT_ELEMENTS]
    if asked.activations == "int8" and floats:
        raise ConfigError(
            f"quantization_activations 'int8' is for integer weights, and {source} has {floats[0]} weights"
        )
    layers = weight_scheme(stored.schemes[-1] if stored.schemes else None, asked.activations)
    head = weight_scheme(stored.scheme(HEAD), asked.activations)
    return FolderQuantization(stored.method, layers, head, stored=stored, activations=asked.activations)


def weight_scheme(scheme: StoredScheme | None, activations: Activations | None) -> WeightScheme:
    """Return the scheme of a weight as a checkpoint has it; None is dense. activations: as of `QuantizationOptions`."""
    if scheme is None:
        return WeightScheme()
    group_size, correction = scheme.group_size or WHOLE_ROW, "zeros" if scheme.has_zero_points else "constant"
    activation_groups = 0 if scheme.element in FLOAT_ELEMENTS else activation_group_size(group_size, activations)
    if scheme.quantizes_activations and activations != "bfloat16":
        activation_groups = scheme.group_size or MAX_TOKEN_INPUTS
    return WeightScheme(scheme.element, group_size, activation_groups, correction)
