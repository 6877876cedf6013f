"""English prose that every Python brings: the language reference."""

from pydoc_data.topics import topics

_TOPICS = ("assignment", "exceptions", "import", "naming", "objects")


def prose(num_chars: int) -> str:
    """Return the beginning of the prose."""
    return "".join(topics[name] for name in _TOPICS)[:num_chars]
