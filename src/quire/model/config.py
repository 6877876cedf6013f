"""Model config: config.json of a folder, checked and turned into a `DecoderSpec` by the family that it names.

Of generation_config.json only the end-of-sequence tokens are read here;
`quire.engine.requests.generation_config` has the rest.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from quire.core.errors import ConfigError, ModelError
from quire.core.model_files import read_json_object
from quire.model.architectures import ENCODER_ARCHITECTURES, FAMILIES, MODEL_TYPES, REFUSED
from quire.model.config_reader import CONFIG_FILE, ConfigReader
from quire.model.spec import DecoderSpec, SpecError

GENERATION_CONFIG_FILE = "generation_config.json"
EOS_KEY = "eos_token_id"
DTYPES = "float32", "bfloat16", "float16"
BASE_MODEL, WITH_HEAD = "Model", "ForCausalLM"  # ends of names of architectures


def read_config(folder: Path) -> dict[str, object]:
    """Return the config.json of `folder`: a JSON object of a known architecture with sizes that make sense.

    Raises ModelError with the file and the reason.
    """
    config = read_json_object(folder, CONFIG_FILE)
    spec_from_config(config, str(folder / CONFIG_FILE))
    return config


class UnknownArchitectureError(ModelError):
    """No family of Quire has the architecture that a config names."""


def spec_from_config(config: Mapping[str, object], source: str = CONFIG_FILE) -> DecoderSpec:
    """Return the spec of the architecture that `config` names. `source` is what errors call the config.

    Raises ModelError for an unknown architecture, with the known ones, and for any impossible value.
    """
    reader = ConfigReader(config, source)
    try:
        family, has_head = _family(reader)
        return replace(family(reader), has_head=has_head)
    except SpecError as error:
        raise reader.error(str(error)) from error


def resolved_dtype(asked: str, config: Mapping[str, object], source: str = CONFIG_FILE) -> str:
    """Return the dtype asked for, or the checkpoint's own (key dtype, in older files torch_dtype), or float32."""
    names = {name: name for name in DTYPES}
    if asked != "auto":
        if asked not in names:
            raise ConfigError(f"dtype must be auto, {', '.join(names)}, got {asked!r}")
        return asked
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    return ConfigReader(config, source).choice(key, names, default="float32")


def eos_token_ids(folder: Path, config: Mapping[str, object], vocab_size: int) -> frozenset[int]:
    """Return the ids that end an answer; generation_config.json wins over config.json, and null means none there.

    Raises ModelError for a broken file or for anything but a token id of the model, a list of them or null.
    """
    for name, values in ((GENERATION_CONFIG_FILE, _generation_config(folder)), (CONFIG_FILE, config)):
        value = values.get(EOS_KEY)
        if value is not None:
            return checked_eos_token_ids(value, str(folder / name), vocab_size)
    return frozenset()


def checked_eos_token_ids(value: object, place: str, vocab_size: int) -> frozenset[int]:
    """Return the ids in a value of `EOS_KEY`. Raises ModelError, with `place`, for anything but ids of the model."""
    items = value if isinstance(value, list) else [value]
    return frozenset(_checked(item, place, vocab_size) for item in items)


def _family(config: ConfigReader) -> tuple[Callable[[ConfigReader], DecoderSpec], bool]:
    """Return the family of the architecture that the config names, or of its model type if it names none.

    The second is False for the base model of the architecture, which has no head: `Qwen3Model` of `Qwen3ForCausalLM`.
    """
    named = config.raw("architectures")
    found = named[0] if isinstance(named, list) and named else MODEL_TYPES.get(str(config.raw("model_type")))
    whole = found
    if isinstance(found, str) and found.endswith(BASE_MODEL):
        whole = found.removesuffix(BASE_MODEL) + WITH_HEAD
        if whole in FAMILIES:
            return FAMILIES[whole], False
    if isinstance(found, str) and found in ENCODER_ARCHITECTURES:
        return ENCODER_ARCHITECTURES[found]
    for name in (found, whole):
        if isinstance(name, str) and name in REFUSED:
            raise config.error(f"architecture {found!r} is not supported yet: {REFUSED[name]}")
    if not isinstance(found, str) or found not in FAMILIES:
        what = f"architecture {found!r:.80}" if found is not None else f"model_type {config.raw('model_type')!r:.80}"
        known = ", ".join((*FAMILIES, *ENCODER_ARCHITECTURES))
        raise UnknownArchitectureError(str(config.error(f"unknown {what}; known are {known}")))
    return FAMILIES[found], True


def _generation_config(folder: Path) -> Mapping[str, object]:
    has_file = (folder / GENERATION_CONFIG_FILE).exists()
    return read_json_object(folder, GENERATION_CONFIG_FILE) if has_file else {}


def _checked(value: object, place: str, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ModelError(f"{place}: {EOS_KEY} must be a token id from 0 to {vocab_size - 1} or a list of them, "
                         f"got {value!r:.80}")
    return value
