"""References of JSON schemas into their own document."""

from collections.abc import Mapping
from typing import Any

_MAX_NAMES = 16  # of one reference


def referenced(schema: Mapping[str, Any], reference: object) -> object:
    """Return the part of a schema that a reference into it names, or None."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    names = reference[2:].split("/")
    part: object = schema if len(names) <= _MAX_NAMES else None
    for name in names[:_MAX_NAMES]:
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part
