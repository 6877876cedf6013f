"""JSON of values that a model writes as text, and the texts that would be read as other values than strings."""

import json
from collections.abc import Sequence

from quire.text.tool_formats.tool_format import TYPE_NAMES

_LITERALS = {"True": ("true", "boolean"), "False": ("false", "boolean"), "None": ("null", "null")}
_SPACE = r"[\s\x1c-\x1f]*"  # what str.strip removes
_WRITTEN = {  # regexes of the texts of values, by their types; longer than need be where JSON is no regular language
    "integer": r"-?[0-9]+",
    "number": r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
    "boolean": "true|false|True|False",
    "null": "null|None",
    "object": r"\{(?s:.*)\}",
    "array": r"\[(?s:.*)\]",
}


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
        try:  # (integers are not converted: that takes time quadratic in their digits)
            type_name = TYPE_NAMES[type(json.loads(value, parse_constant=_refuse, parse_int=_no_digits))]
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
    return literal if reads_json(type_name, types) else json.dumps(text, ensure_ascii=False)


def reads_json(type_name: str, types: frozenset[str] | None) -> bool:
    """Return whether `json_value` reads the JSON of a value of a type as that value, and not as a string."""
    if type_name == "string":  # the model wrote the quotes of a value that is no text
        return bool(types and "string" not in types)
    return not types or type_name in types or (type_name == "integer" and "number" in types)


def misread_texts(types: frozenset[str]) -> Sequence[str]:
    """Return regexes of all texts that `json_value` would not read as strings, for these types; and of some others."""
    if types == {"string"}:
        return ()
    written = [_WRITTEN[name] for name in _WRITTEN if not types or name in types]
    if types and "string" not in types:
        written.append('"(?s:.*)"')
    return [f"{_SPACE}(?:{'|'.join(written)}){_SPACE}"]


def _no_digits(_: str) -> int:
    return 0


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
