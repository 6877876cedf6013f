"""End-of-sequence tokens: the one thing of generation_config.json that changes what a model's answer is."""

from collections.abc import Mapping
from pathlib import Path

from quire.core.errors import ModelError
from quire.core.model_files import read_json_object
from quire.model.config_reader import CONFIG_FILE

GENERATION_CONFIG_FILE = "generation_config.json"
KEY = "eos_token_id"


def eos_token_ids(folder: Path, config: Mapping[str, object], vocab_size: int) -> frozenset[int]:
    """Return the ids that end an answer; generation_config.json wins over config.json, and null means none there.

    Raises ModelError for a broken file or for anything but a token id of the model, a list of them or null.
    """
    for name, values in ((GENERATION_CONFIG_FILE, _generation_config(folder)), (CONFIG_FILE, config)):
        value = values.get(KEY)
        if value is not None:
            items = value if isinstance(value, list) else [value]
            return frozenset(_checked(item, folder / name, vocab_size) for item in items)
    return frozenset()


def _generation_config(folder: Path) -> Mapping[str, object]:
    has_file = (folder / GENERATION_CONFIG_FILE).exists()
    return read_json_object(folder, GENERATION_CONFIG_FILE) if has_file else {}


def _checked(value: object, path: Path, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ModelError(f"{path}: {KEY} must be a token id from 0 to {vocab_size - 1} or a list of them, "
                         f"got {value!r:.80}")
    return value
