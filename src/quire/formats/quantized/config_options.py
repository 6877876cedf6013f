"""Options that the parsers of several quantization methods share. No torch."""

from collections.abc import Mapping
from typing import TypeVar

from quire.formats.quantized.patterns import PatternError, compile_pattern
from quire.formats.quantized.schemes import Element, MatchKind, ModuleRule, StoredScheme
from quire.model.config_reader import MAX_SIZE, ConfigReader

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
