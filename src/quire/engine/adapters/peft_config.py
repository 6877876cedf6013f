"""PEFT configurations: `adapter_config.json` of a LoRA folder, or what in it is not served, by name."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire.core.checks import shown
from quire.core.errors import ModelError

CONFIG_FILE = "adapter_config.json"
MAX_ALPHA = 1e6
# Options that change more than the two factors of a module, with the values that leave them off.
_REFUSED: dict[str, str] = {
    "use_dora": "DoRA scales outputs by magnitudes of its own",
    "modules_to_save": "whole modules in place of the model's are not applied",
    "lora_bias": "biases of factors are not applied",
    "layer_replication": "layers are not replicated",
    "trainable_token_indices": "embeddings are not changed",
    "target_parameters": "only linear layers have factors",
    "alora_invocation_tokens": "an adapter is applied from the first token on",
    "use_qalora": "QALoRA pools the inputs of a layer",
    "use_bdlora": "block-diagonal factors are not applied",
    "arrow_config": "adapters are not combined",
    "corda_config": "it changes the weights of the model",
}
# Initializations that change the weights of the model, which an adapter of them needs.
_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
_PATTERN = re.compile(r"\^?(?:[A-Za-z0-9_\-]|\.|\\\.)+\$?")


class Factor(NamedTuple):
    """The rank of a module's factors, and their scale."""

    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Ranks and scales of an adapter's modules."""

    rank: int
    alpha: float
    is_rank_stabilized: bool                 # scale alpha / sqrt(rank), not alpha / rank (Kalajdzievski 2023)
    rank_pattern: Mapping[str, int]          # keyed by the end of a module's name
    alpha_pattern: Mapping[str, float]

    def factor_of(self, module: str) -> Factor:
        """Return rank and scale of a module, by its full name in the model."""
        rank = _by_pattern(self.rank_pattern, module, self.rank)
        alpha = _by_pattern(self.alpha_pattern, module, self.alpha)
        return Factor(rank, alpha / (rank**0.5 if self.is_rank_stabilized else rank))


def parse_config(content: bytes, path: Path) -> PeftConfig:
    """Return the configuration. ModelError for one that is broken, or asks for what is not served, by name."""
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(config).__name__}")
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type must be LORA, got {shown(config.get('peft_type'))}")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise ModelError(f"{path}: task_type must be CAUSAL_LM, got {shown(config['task_type'])}")
    for name, reason in _REFUSED.items():
        if config.get(name):
            raise ModelError(f"{path}: {name} {shown(config[name])} is not supported: {reason}")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias must be none, got {shown(config['bias'])}: biases are those of the model")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGING_INITS):
        raise ModelError(
            f"{path}: init_lora_weights {shown(start)} is not supported: it changes the weights of the model; save the "
            "adapter as one of the unchanged model (path_initial_model_for_weight_conversion of PEFT)"
        )
    ranks, alphas = (_patterns(path, config, name) for name in ("rank_pattern", "alpha_pattern"))
    return PeftConfig(
        _rank(path, "r", config.get("r")),
        _alpha(path, "lora_alpha", config.get("lora_alpha")),
        _flag(path, "use_rslora", config.get("use_rslora", False)),
        {key: _rank(path, f"rank_pattern[{key!r:.80}]", value) for key, value in ranks},
        {key: _alpha(path, f"alpha_pattern[{key!r:.80}]", value) for key, value in alphas},
    )


def _rank(path: Path, name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ModelError(f"{path}: {name} must be an integer of at least 1, got {shown(value)}")
    return value


def _alpha(path: Path, name: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -MAX_ALPHA <= value <= MAX_ALPHA:  # type: ignore[operator]
        raise ModelError(f"{path}: {name} must be a number from {-MAX_ALPHA:g} to {MAX_ALPHA:g}, got {shown(value)}")
    return float(value)  # type: ignore[arg-type]


def _flag(path: Path, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ModelError(f"{path}: {name} must be true or false, got {shown(value)}")
    return value


def _patterns(path: Path, config: Mapping[str, Any], name: str) -> list[tuple[str, object]]:
    """Return the entries of a pattern option. ModelError for keys that are regular expressions: they could run long."""
    given = config.get(name) or {}
    if not isinstance(given, dict):
        raise ModelError(f"{path}: {name} must be an object, got {shown(given)}")
    for key in given:
        if not _PATTERN.fullmatch(key):
            raise ModelError(f"{path}: {name} has the key {shown(key)}; keys must be names of modules or ends of them")
    return list(given.items())


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:  # noqa: ANN401 (a rank or an alpha)
    """Return the value of the first key that is the module's name or, after a dot, its end."""
    for key, value in patterns.items():
        name = key.removesuffix("$").replace("\\.", ".")
        if name.startswith("^"):
            if module == name[1:]:
                return value
        elif module == name or module.endswith(f".{name}"):
            return value
    return default
