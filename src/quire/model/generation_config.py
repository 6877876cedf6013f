"""End-of-sequence tokens: the one thing of generation_config.json that changes what a model's answer is."""

from collections.abc import Mapping
from pathlib import Path

from quire.core.errors import ModelError
from quire.model.config_reader import CONFIG_FILE, read_json_object

GENERATION_CONFIG_FILE = "generation_config.json"
KEY = "eos_token_id"


def eos_token_ids(folder: Path, config: Mapping[str, object]) -> frozenset[int]:
    """Return the ids that end an answer; generation_config.json wins over config.json, and null means none there.

    Raises ModelError for a broken file or for anything but an id, a list of ids or null.
    """
    for name, values in ((GENERATION_CONFIG_FILE, _generation_config(folder)), (CONFIG_FILE, config)):
        value = values.get(KEY)
        if value is not None:
            return frozenset(_checked(item, folder / name) for item in (value if isinstance(value, list) else [value]))
    return frozenset()


def _generation_config(folder: Path) -> Mapping[str, object]:
    has_file = (folder / GENERATION_CONFIG_FILE).exists()
    return read_json_object(folder, GENERATION_CONFIG_FILE) if has_file else {}


def _checked(value: object, path: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelError(f"{path}: {KEY} must be a token id or a list of them, got {value!r:.80}")
    return value
