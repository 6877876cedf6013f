"""JSON of values that a model writes as text."""

import json

from quire.server.tool_formats.argument_types import TYPE_NAMES

_LITERALS = {"True": ("true", "boolean"), "False": ("false", "boolean"), "None": ("null", "null")}


def string_text(text: str) -> str:
    """Return the inside of the JSON string of a text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_value(text: str, types: frozenset[str] | None) -> str:
    """Return the JSON of a value that was written as text: of one of the types, of any if there are none.

    What is no JSON of these types is a string.
    """
    value = text.strip()
    literal, type_name = _LITERALS.get(value, (value, ""))
    if not type_name:
        try:
            type_name = TYPE_NAMES[type(json.loads(value, parse_constant=_refuse))]
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
    if type_name == "string":
        is_json = bool(types and "string" not in types)  # the model wrote the quotes of a value that is no text
    else:
        is_json = not types or type_name in types or (type_name == "integer" and "number" in types)
    return literal if is_json else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
