"""Schemes of quantized checkpoints: the storage of the weight of each linear layer, from config.json alone. No torch.

A `StoredQuantization` is what the quantization_config of a folder says: an ordered list of rules from module names to
schemes. The parsers of the methods make it (`quantization_config`), the readers of tensors take it (`quantized`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quire.formats.quantized.patterns import matches_start

# packed and float_codes: compressed-tensors, integers and small floats; plain: an element per byte
Storage = Literal["gptq", "awq", "packed", "float_codes", "plain", "mxfp4"]
ScaleKind = Literal["float", "exponent", "global"]  # exponent: a power of two; global: over a number for the module
Element = Literal["int4", "int8", "fp8", "codebook4"]
MatchKind = Literal["all", "name", "part", "module", "path", "pattern"]


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """Storage of one quantized weight [out_features, in_features]."""

    storage: Storage
    element: Element
    group_size: int = 0             # inputs that share a scale; 0: all, of a row or of the whole tensor
    block_rows: int = 1             # outputs that share scales
    has_zero_points: bool = False
    zero_offset: int = 0            # to be added to zero points as stored: 1 in GPTQ v1
    has_input_order: bool = False   # groups need not be of consecutive inputs, a tensor says which are
    quantizes_activations: bool = False  # to int8, a scale per token
    stored_bits: int = 0            # bits of a stored element, where fewer than its kind has
    scale_kind: ScaleKind = "float"


@dataclass(frozen=True, slots=True)
class ModuleRule:
    """Scheme of the modules that a text matches; None: they are not quantized.

    "name": the text is the whole name; "part": it is in the name; "module": the name ends with it, or begins with it
    and a dot; "path": the name begins or ends with it, or, as a pattern, begins with a match that ends at a dot;
    "pattern": a regular expression matches the beginning of the name; "all": any name.
    """

    kind: MatchKind
    text: str
    scheme: StoredScheme | None

    def matches(self, module: str) -> bool:
        """Return whether the rule is one for the module."""
        match self.kind:
            case "all":
                return True
            case "name":
                return module == self.text
            case "part":
                return self.text in module
            case "module":
                return module.endswith(self.text) or module.startswith(f"{self.text}.")
            case "pattern":
                return matches_start(self.text, module)
            case "path":
                return module.endswith(self.text) or matches_start(
                    self.text, module, ends=lambda end: end == len(module) or "." in module[max(end - 1, 0) : end + 1]
                )


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """Quantization of a checkpoint: its method, as the config names it, and the rules that give modules a scheme."""

    method: str
    rules: tuple[ModuleRule, ...]

    @property
    def schemes(self) -> list[StoredScheme]:
        """Schemes of all rules; the last is that of most modules."""
        return [rule.scheme for rule in self.rules if rule.scheme is not None]

    def scheme(self, module: str) -> StoredScheme | None:
        """Return the scheme of the first rule that matches a module's full name; None: its weight is dense."""
        return next((rule.scheme for rule in self.rules if rule.matches(module)), None)

    def fused_scheme(self, modules: Sequence[str]) -> StoredScheme | None:
        """Return the scheme of modules that are one layer; None, dense, where they differ."""
        schemes = {self.scheme(module) for module in modules}
        return schemes.pop() if len(schemes) == 1 else None
