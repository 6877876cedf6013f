"""A chat template in place of the model's: from a file, or the template itself."""

from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.engine.options import EngineOptions
from quire.text.text_settings import given_chat_template


def test_template_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[0].content }}é\\n")
    assert given_chat_template(str(path)) == "{{ messages[0].content }}é\\n"


def test_template_may_be_given_itself_in_one_line() -> None:
    assert given_chat_template("{{ messages }}\\nend") == "{{ messages }}\nend"
    assert given_chat_template(None) is None


@pytest.mark.parametrize("given", ["no/such/file.jinja", "", "a" * 5000, "null\0", "."])
def test_what_is_neither_is_refused_by_name(given: str) -> None:
    with pytest.raises(ConfigError, match=r"^chat_template must be a template or the path of one"):
        given_chat_template(given)
    with pytest.raises(ConfigError, match=r"^chat_template must be"):
        EngineOptions(chat_template=given)


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="chat_template must be"):
        given_chat_template(str(path))
