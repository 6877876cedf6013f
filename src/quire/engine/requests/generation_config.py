"""Generation config: defaults of sampling parameters, and the ids that end an answer, as a model's files name them.

The keys of generation_config.json that vLLM reads, with its meanings. What `override_generation_config` names comes
before the file; other keys change nothing here. Loads no torch.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from quire.core.checks import check_int
from quire.core.errors import ConfigError, InvalidRequestError, ModelError
from quire.core.model_files import read_json_object
from quire.core.sampling_params import SamplingParams
from quire.engine.messages import SamplingDefaults
from quire.engine.options import EngineOptions
from quire.engine.options.sampling_options import OVERRIDE
from quire.model.config import EOS_KEY, GENERATION_CONFIG_FILE, checked_eos_token_ids
from quire.model.resolve import resolve_model

MAX_TOKENS_KEY = "max_new_tokens"
_SAME_NAMES = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "skip_special_tokens",
)  # fmt: skip


def sampling_defaults(options: EngineOptions, model: Path) -> SamplingDefaults:
    """Return the defaults of the model that `resolve_model` has found.

    ModelError or ConfigError names the place, the key and the value of what is no such parameter.
    """
    override, folder = _override(options), _folder(options, model)
    params: dict[str, float | int | bool] = {}
    if folder is not None:
        params |= _params(read_json_object(folder, GENERATION_CONFIG_FILE), str(folder / GENERATION_CONFIG_FILE))
    params |= _params(override, OVERRIDE)
    # As in vLLM: what the model itself says is a default, what the user has chosen bounds all requests.
    bounds = _params(override, OVERRIDE) if options.generation_config in ("auto", "vllm") else params
    return SamplingDefaults(params, bounds.get("max_tokens"))  # type: ignore[arg-type]


def eos_token_ids(
    options: EngineOptions, path: Path, vocab_size: int, own: Callable[[], frozenset[int]]
) -> frozenset[int]:
    """Return the ids that end an answer: of the override, of the folder that is named, or `own`: of the model.

    Raises ModelError for anything but ids of the vocabulary.
    """
    override, folder = _override(options), _folder(options, path)
    is_named = folder is not None and options.generation_config != "auto"
    configs = {OVERRIDE: override}
    if is_named and folder is not None:
        configs[str(folder / GENERATION_CONFIG_FILE)] = read_json_object(folder, GENERATION_CONFIG_FILE)
    for place, config in configs.items():
        if (value := config.get(EOS_KEY)) is not None:
            return checked_eos_token_ids(value, place, vocab_size)
    return own()


def _folder(options: EngineOptions, model: Path) -> Path | None:
    """Return the folder with the file that gives defaults, or None. ModelError if one is named that has none."""
    match options.generation_config:
        case "vllm":
            return None
        case "auto":
            return model if (model / GENERATION_CONFIG_FILE).exists() else None
        case named:
            folder = resolve_model(named, (GENERATION_CONFIG_FILE,))
            if not (folder / GENERATION_CONFIG_FILE).exists():
                raise ModelError(f"generation_config {named!r:.200}: {folder} has no {GENERATION_CONFIG_FILE}")
            return folder


def _override(options: EngineOptions) -> dict[str, object]:
    """Return the override, which `EngineOptions` has parsed once to check it."""
    content: dict[str, object] = json.loads(options.override_generation_config or "{}")
    return content


def _params(config: Mapping[str, object], place: str) -> dict[str, float | int | bool]:
    """Return the parameters that a config names, checked."""
    named = {key: config[key] for key in (*_SAME_NAMES, MAX_TOKENS_KEY) if config.get(key) is not None}
    try:
        if (max_tokens := named.pop(MAX_TOKENS_KEY, None)) is not None:
            named["max_tokens"] = check_int(MAX_TOKENS_KEY, max_tokens, 1)
        checked = SamplingParams(**named)  # type: ignore[arg-type]
    except InvalidRequestError as error:
        kind = ConfigError if place == OVERRIDE else ModelError
        raise kind(f"{place}: {error}") from error
    return {name: getattr(checked, name) for name in named}
