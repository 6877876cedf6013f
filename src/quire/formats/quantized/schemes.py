"""Schemes of quantized checkpoints: the storage of the weight of each linear layer, by config.json alone. No torch.

A `StoredQuantization` is what the quantization_config of a folder says: an ordered list of rules from module names to
schemes. The parsers of the methods make it (`quantization_config`), the readers of tensors take it (`quantized`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from quire.formats.quantized.patterns import PatternError, compile_pattern, matches_start
from quire.model.config_reader import MAX_SIZE, ConfigReader

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


INTEGER_ELEMENTS: Mapping[int, Element] = {4: "int4", 8: "int8"}
FLOAT_ELEMENTS: Mapping[int, Element] = {8: "fp8"}
HEAD = "lm_head"  # dense unless a config says otherwise
MAX_GROUP_SIZE = 1 << 16  # inputs; int8 activations in groups have exact sums up to here
MAX_PATTERNS_CHARACTERS = 4096  # sum over all patterns of a config: they are matched with every module's name

# Options that say how a checkpoint was made, or on which kernels it was to run: they change no weight.
NOTES = (
    "quant_method", "method", "pack_impl", "meta", "tokenizer", "dataset", "backend", "batch_size", "damp_percent",
    "damp_auto_increment", "true_sequential", "static_groups", "act_group_aware", "model_name_or_path",
    "model_file_base_name", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block",
    "pad_token_id", "max_input_length", "use_exllama", "disable_exllama", "exllama_config", "use_cuda_fp16",
    "cache_block_outputs", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "dequantize", "mse", "nsamples", "seqlen",
    "iters", "lr", "minmax_lr", "amp", "train_bs", "low_gpu_mem_usage", "gradient_accumulate_steps",
    "enable_quanted_input", "enable_minmax_tuning", "scale_dtype", "data_type", "autoround_version", "quantizer",
    "kv_cache_scheme", "is_checkpoint_fp8_serialized",
)  # fmt: skip

T = TypeVar("T")


def number_choice(config: ConfigReader, key: str, choices: Mapping[int, T], default: int | None = None) -> T:
    """Return the entry of `choices` for an integer option."""
    value = config.size(key, default, least=-MAX_SIZE)
    if value not in choices:
        raise config.error(f"{key} = {value} is not supported; supported are {', '.join(map(str, choices))}")
    return choices[value]


def group_size(config: ConfigReader, key: str, default: int | None = None) -> int:
    """Return the inputs that share a scale, 0 for all of a row, which configs write as -1."""
    value = config.size(key, default or -1 if default is not None else None, least=-1, limit=MAX_GROUP_SIZE)
    if value == 0:
        raise config.error(f"{key} must be at least 1, or -1 for a whole row, got 0")
    return max(value, 0)


def block_of(config: ConfigReader, key: str) -> tuple[int, int]:
    """Return the outputs and inputs of a block that shares a scale, [128, 128] or "128x128"; (1, 0) where missing."""
    value = config.raw(key)
    if value is None:
        return 1, 0
    sizes = value.split("x") if isinstance(value, str) else value
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise config.error(f"{key} must be two sizes, got {value!r:.80}")
    numbers = [int(size) if isinstance(size, str) and size.isdecimal() and len(size) < 9 else size for size in sizes]
    names = {"outputs": numbers[0], "inputs": numbers[1]}
    block = config.nested(key, names)
    return block.size("outputs"), block.size("inputs", limit=MAX_GROUP_SIZE)


def matching_rule(config: ConfigReader, kind: MatchKind, text: str, scheme: StoredScheme | None) -> ModuleRule:
    """Return the rule of a text that may be a pattern. Raises ModelError for a pattern that is not supported.

    A path that is a plain name is no pattern: models with experts list some for each layer.
    """
    if kind == "path" and text.replace(".", "").isidentifier():
        return ModuleRule("module", text, scheme)
    try:
        if kind in ("pattern", "path"):
            compile_pattern(text)
    except PatternError as error:
        raise config.error(f"pattern {text!r:.80} is not supported: {error}") from error
    return ModuleRule(kind, text, scheme)


def checked_rules(config: ConfigReader, *rules: ModuleRule) -> tuple[ModuleRule, ...]:
    """Return the rules; ModelError where their patterns would take too long to match."""
    num_characters = sum(len(rule.text) for rule in rules if rule.kind in ("pattern", "path"))
    if num_characters > MAX_PATTERNS_CHARACTERS:
        raise config.error(f"patterns of {num_characters} characters; at most {MAX_PATTERNS_CHARACTERS} are supported")
    return rules
