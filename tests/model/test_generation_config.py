"""Tokens that end an answer."""

from pathlib import Path

import pytest

from quire.core.errors import ModelError
from quire.model.config import eos_token_ids


def write(folder: Path, content: str | None) -> Path:
    if content is not None:
        (folder / "generation_config.json").write_text(content)
    return folder


@pytest.mark.parametrize(
    ("content", "config", "expected"),
    [
        (None, {}, set()),
        (None, {"eos_token_id": 2}, {2}),
        (None, {"eos_token_id": None}, set()),
        ("{}", {"eos_token_id": [1, 2]}, {1, 2}),
        ('{"eos_token_id": 7}', {"eos_token_id": [1, 2]}, {7}),
        ('{"eos_token_id": [7, 8, 7]}', {}, {7, 8}),
        ('{"eos_token_id": null}', {"eos_token_id": 0}, {0}),
    ],
)
def test_generation_config_wins(tmp_path: Path, content: str | None, config: dict, expected: set[int]) -> None:
    assert eos_token_ids(write(tmp_path, content), config, vocab_size=9) == expected


@pytest.mark.parametrize("value", ['"2"', "-1", "9", "[1, 1000000]", "true", "[1, null]", "1.5", "{}"])
def test_anything_but_ids_of_the_vocabulary_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id must be a token id from 0 to 8 or"):
        eos_token_ids(write(tmp_path, f'{{"eos_token_id": {value}}}'), {}, vocab_size=9)
    with pytest.raises(ModelError, match=r"config.json: eos_token_id must be"):
        eos_token_ids(write(tmp_path, "{}"), {"eos_token_id": "end"}, vocab_size=9)


def test_broken_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        eos_token_ids(write(tmp_path, "{"), {"eos_token_id": 2}, vocab_size=9)
