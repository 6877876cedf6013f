"""Files of a model folder: regular ones that lie in it and are not too large; anything else is named and refused."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.core.errors import ModelError
from quire.core.model_files import MAX_TEXT_BYTES, file_inside, read_json_object, read_text


def link_out(path: Path) -> None:
    (path.parent.parent / "secret").write_text("{}")
    path.symlink_to("../secret")


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, MAX_TEXT_BYTES + 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (link_out, "links to .*secret, outside of the model folder"),
        (link_to_a_device, "no file config.json"),
        (os.mkfifo, "no file config.json"),
        (Path.mkdir, "no file config.json"),
        (lambda path: path.symlink_to(path.name), "no file config.json"),
        (lambda path: path.symlink_to("missing"), "no file config.json"),
        (huge, f"config.json: larger than {MAX_TEXT_BYTES} bytes"),
        (lambda path: path.write_bytes(b"\xff"), "config.json: cannot be read as text"),
    ],
    ids=["link out", "device", "pipe", "folder", "loop", "dangling", "huge", "not text"],
)
def test_what_is_no_file_of_the_folder_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    make(folder / "config.json")
    for read in (read_text, read_json_object):
        with pytest.raises(ModelError, match=message) as caught:
            read(folder, "config.json")
        assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a\0b", "~"])
def test_names_with_a_way_in_them_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=r"is not a plain file name|no file ~"):
        file_inside(tmp_path, name)


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text('{"a": 1}')
    (tmp_path / "config.json").symlink_to("real.json")
    assert read_json_object(tmp_path, "config.json") == {"a": 1}
