"""Quantization of a GGUF file: the schemes of its tensors' types. Loads no torch.

Activations of integers are rounded to int8 in the groups of their blocks, 16 or 32 inputs, unless bfloat16 is asked
for; codes are expanded as they are used.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from quire.core.errors import ConfigError
from quire.formats.gguf.gguf_file import GGUFFile
from quire.model.quantization import (
    Activations,
    Quantization,
    QuantizationOptions,
    TableBlocks,
    WeightScheme,
    activation_group_size,
    resolve,
)
from quire.model.spec import DecoderSpec

GGUF = "gguf"
SCHEMES = {
    "Q4_0": WeightScheme("int4", 32),
    "Q4_1": WeightScheme("int4", 32, correction="minimums"),
    "Q5_0": WeightScheme("int8", 32),
    "Q5_1": WeightScheme("int8", 32, correction="minimums"),
    "Q8_0": WeightScheme("int8", 32),
    "Q4_K": WeightScheme("int4", 32, correction="minimums"),
    "Q5_K": WeightScheme("int8", 32, correction="minimums"),
    "Q6_K": WeightScheme("int8", 16),
    "IQ4_NL": WeightScheme("codebook4", 32),
    "IQ4_XS": WeightScheme("codebook4", 32),
    "MXFP4": WeightScheme("codebook4", 32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFQuantization(Quantization):
    """A `Quantization` with a scheme for each module that a file has."""

    modules: Mapping[str, WeightScheme]
    activations: Activations | None = None  # asked for; None: the default for each module

    def scheme(self, modules: Sequence[str]) -> WeightScheme:
        """Return the scheme of the layer that modules are fused to."""
        schemes = {self.modules.get(module, WeightScheme()) for module in modules}
        return schemes.pop() if len(schemes) == 1 else _fused(schemes, self.activations)


def gguf_quantization(file: GGUFFile, spec: DecoderSpec, asked: QuantizationOptions) -> Quantization:
    """Return the quantization of a file: of layers the scheme with most elements, and of the head its own.

    A file of floats may be quantized while it is loaded. Raises ConfigError for options that contradict the file.
    """
    names = spec.weights
    head = f"{names.head}.weight" if f"{names.head}.weight" in file.tensors else f"{names.embedding}.weight"
    counts: Counter[str] = Counter()
    for name, entry in file.tensors.items():
        if len(entry.shape) > 1 and name != head and name.split(".")[0] not in (names.embedding, names.positions):
            counts[entry.type.name] += math.prod(entry.shape)
    head_kind = file.tensors[head].type.name
    found = [kind for kind, _ in counts.most_common() if kind in SCHEMES]
    if not found and head_kind not in SCHEMES:
        method = None if asked.method == GGUF else asked.method
        return resolve(QuantizationOptions(method, asked.group_size, asked.activations), str(file.path))
    kinds = ", ".join(dict.fromkeys([*found, *([head_kind] if head_kind in SCHEMES else [])]))
    if asked.method not in (None, GGUF):
        raise ConfigError(f"quantization {asked.method!r} contradicts {file.path}, which is quantized to {kinds}")
    layers = block_scheme(counts.most_common(1)[0][0] if counts else "F32", asked.activations)
    of_head = block_scheme(head_kind, asked.activations)
    modules = {
        name.removesuffix(".weight"): block_scheme(entry.type.name, asked.activations)
        for name, entry in file.tensors.items()
        if name.endswith(".weight")
    }
    table = file.tensors[f"{names.embedding}.weight"].type
    return GGUFQuantization(
        f"{GGUF} ({kinds})", layers, of_head, modules=modules, activations=asked.activations,
        table=TableBlocks(table.block_size, table.block_bytes) if table.name in SCHEMES else None,
    )  # fmt: skip


def block_scheme(kind: str, activations: Activations | None) -> WeightScheme:
    """Return the scheme of tensors of a type; dense for types of floats."""
    stored = SCHEMES.get(kind, WeightScheme())
    if stored.format not in ("int8", "int4"):
        return stored
    group = activation_group_size(stored.group_size, activations)
    return WeightScheme(stored.format, stored.group_size, group, stored.correction)


def _fused(schemes: Collection[WeightScheme], activations: Activations | None) -> WeightScheme:
    """Return the scheme of blocks of several types as one layer: 8-bit integers in the smallest groups, or dense."""
    if any(scheme.format == "dense" for scheme in schemes):
        return WeightScheme()
    group_size = min(scheme.group_size for scheme in schemes)
    has_minimums = any(scheme.correction == "minimums" for scheme in schemes)
    correction = "minimums" if has_minimums else "zeros"
    return WeightScheme("int8", group_size, activation_group_size(group_size, activations), correction)
