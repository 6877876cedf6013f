"""Settings of speculative decoding: the method that drafts tokens, and how many, checked before anything is loaded.

The keys and their meanings are those of vLLM's `speculative_config`.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from quire.core.checks import shown
from quire.core.errors import ConfigError
from quire.core.options import parse_json_object

SpeculationMethod = Literal["ngram", "suffix", "draft_model", "mtp", "eagle3"]
METHODS: tuple[str, ...] = get_args(SpeculationMethod)
# vLLM's names of MTP heads, by the family that has them; `mtp` means the head of the model's own family.
MTP_METHODS = ("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
_REFUSED = {
    "eagle": "heads of EAGLE 1 and 2 are not read, those of EAGLE-3 are: eagle3", "medusa": "Medusa heads are not read",
    "mlp_speculator": "MLP speculators are not read", "dflash": "DFlash heads, which draft whole blocks, are not read",
    "dspark": "DSpark heads, which draft whole blocks, are not read",
    "gemma4_mtp": "Gemma 4's assistants, which read keys and values of their target, are not read",
}  # fmt: skip

# Methods with files of their own, and those by which something runs beside the target.
FILES_OF_METHODS = {
    "draft_model": "folder, GGUF file or hub id", "eagle3": "folder or hub id of a head for the model that is served",
}  # fmt: skip
METHODS_WITH_MODELS = {"draft_model": "a draft model", "mtp": "an MTP head", "eagle3": "an EAGLE-3 head"}

MAX_DRAFTS = 16           # tokens of a draft: rows of 17 tokens in a step of decodes
DEFAULT_DRAFTS = 4
MAX_LOOKUP = 64           # tokens of an n-gram
DEFAULT_LOOKUP_MIN, DEFAULT_LOOKUP_MAX = 2, 5
_SHORT_FLAGS = {"method": "spec_method", "model": "spec_model", "num_speculative_tokens": "spec_tokens"}
_KEYS = (*_SHORT_FLAGS, "prompt_lookup_min", "prompt_lookup_max")
_NGRAM_MODELS = ("ngram", "[ngram]")  # vLLM's older spelling of the method, as a model


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Settings of speculative decoding. `model` is of `draft_model` and `eagle3`, `prompt_lookup_*` of `ngram`."""

    method: SpeculationMethod
    num_speculative_tokens: int = DEFAULT_DRAFTS    # the most of one draft
    model: str | None = None                        # folder, GGUF file or hub id
    prompt_lookup_min: int = DEFAULT_LOOKUP_MIN     # tokens of the shortest n-gram
    prompt_lookup_max: int = DEFAULT_LOOKUP_MAX     # length of the longest


def parse_speculation(
    text: str, method: str | None = None, model: str | None = None, num_speculative_tokens: int | None = None
) -> SpeculationConfig | None:
    """Return the settings in a JSON object, and in the flags for three of its keys; None without any.

    Raises ConfigError for an unknown key, a value out of range, a key that the method does not have, and a flag that
    says another thing than the JSON.
    """
    keys = _json_object(text)
    for (key, flag), value in zip(_SHORT_FLAGS.items(), (method, model, num_speculative_tokens), strict=True):
        if value is None:
            continue
        if keys.get(key, value) != value:
            raise ConfigError(f"{flag} is {shown(value)}, but speculative_config has {key} {shown(keys[key])}")
        keys[key] = value
    return _config(keys) if keys else None


def _json_object(text: str) -> dict[str, Any]:
    """Return the keys of a JSON object that have a value."""
    keys = parse_json_object(text, "speculative_config")
    return {key: value for key, value in keys.items() if value is not None}


def _config(keys: dict[str, Any]) -> SpeculationConfig:
    for key in keys:
        if key not in _KEYS:
            raise ConfigError(f"speculative_config can have {', '.join(_KEYS)}, got {shown(key)}")
    if keys.get("model") in _NGRAM_MODELS and keys.get("method", "ngram") == "ngram":
        keys = {key: value for key, value in keys.items() if key != "model"} | {"method": "ngram"}
    method, model = _method(keys), keys.get("model")
    if method in FILES_OF_METHODS and (not isinstance(model, str) or not model):
        raise ConfigError(
            f"speculative_config with the method {method} needs a model: {FILES_OF_METHODS[method]}, got {shown(model)}"
        )
    if method not in FILES_OF_METHODS and model is not None:
        where = ": an MTP head is in the folder of the model itself" if method == "mtp" else ""
        raise ConfigError(
            f"speculative_config has the model {shown(model)}, but the method {method} has no model{where}"
        )
    lookups = [key for key in ("prompt_lookup_min", "prompt_lookup_max") if key in keys]
    if method != "ngram" and lookups:
        raise ConfigError(f"speculative_config has {lookups[0]}, but the method {method} has none; ngram has")
    longest = _count(keys, "prompt_lookup_max", DEFAULT_LOOKUP_MAX, MAX_LOOKUP)
    if "prompt_lookup_max" not in keys:
        longest = max(longest, _count(keys, "prompt_lookup_min", DEFAULT_LOOKUP_MIN, MAX_LOOKUP))
    shortest = _count(keys, "prompt_lookup_min", min(DEFAULT_LOOKUP_MIN, longest), longest)
    num_drafts = _count(keys, "num_speculative_tokens", DEFAULT_DRAFTS, MAX_DRAFTS)
    return SpeculationConfig(method, num_drafts, model, shortest, longest)


def _method(keys: dict[str, Any]) -> Any:  # noqa: ANN401 (checked to be one of METHODS)
    model, method = keys.get("model"), keys.get("method")
    if method is None and model is not None:  # vLLM knows heads by their names, too
        method = "eagle3" if isinstance(model, str) and "eagle3" in model.lower() else "draft_model"
    if method is None:
        raise ConfigError(f"speculative_config needs a method: {', '.join(METHODS)}")
    if isinstance(method, str) and method in MTP_METHODS:
        return "mtp"
    if method not in METHODS:
        why = f": {_REFUSED[method]}" if isinstance(method, str) and method in _REFUSED else ""
        raise ConfigError(
            f"speculative_config: the method must be one of {', '.join(METHODS)}, got {shown(method)}{why}"
        )
    return method


def _count(keys: dict[str, Any], key: str, default: int, high: int) -> int:
    """Return a count from 1 to `high`."""
    value = keys.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise ConfigError(f"speculative_config: {key} must be an integer from 1 to {high}, got {shown(value)}")
    return value


MAX_DRAFTED_ROWS = 64  # at once: with 4 drafts and blocks of 16 their scratch blocks hold 3,072 tokens
MAX_PENDING = 16       # known tokens without keys and values before the drafts: 1, or those that a grammar has forced


@dataclass(frozen=True, slots=True)
class ScratchBlocks:
    """Count of scratch blocks: for `num_rows` rows at once, `per_row` for each."""

    num_rows: int
    num_drafts: int    # the most of a row
    per_row: int

    @classmethod
    def of(cls, num_drafts: int, max_num_seqs: int, block_size: int) -> "ScratchBlocks":
        """Return the count for drafts of up to `num_drafts` tokens. The last draft token is not computed."""
        num_tokens = block_size - 1 + MAX_PENDING + num_drafts - 1  # behind the last whole block
        return cls(min(max_num_seqs, MAX_DRAFTED_ROWS), num_drafts, -(-num_tokens // block_size))

    @property
    def num_blocks(self) -> int:
        return self.num_rows * self.per_row
