"""Chat template that is given in place of the model's: the path of a file, or the template itself."""

from pathlib import Path

from quire.core.errors import ConfigError

_MARKS = "{}\n"         # a path has none of them, and a template has one


def given_chat_template(given: str | None) -> str | None:
    """Return the template; in one that is given itself `\\n` is a line break. ConfigError for neither of both."""
    if given is None:
        return None
    if any(mark in given for mark in _MARKS):
        return given.replace("\\n", "\n")
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template must be a template or the path of one, got {given!r}: {error}") from error
