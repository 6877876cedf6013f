"""Place of the fault in a schema: the innermost subschema that has it."""

from collections.abc import Callable, Iterator
from typing import Any

from quire.grammar_writing.schemas import SCHEMAS_BY_NAME, escaped_name
from quire.grammar_writing.texts import json_text, schema_fault

_MAX_TRIES = 256        # subschemas that are compiled by themselves
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "contains", "propertyNames")


def place_of_fault(schema: Any, reason: str, fault: Callable[[str], str]) -> str:  # noqa: ANN401 (JSON)
    """Return the place as a JSON pointer; empty: the schema itself. `fault` returns what is wrong with a grammar."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema}
    place, current, num_tries = "", schema, 0
    while True:
        for step, below in _subschemas(current):
            num_tries += 1
            if num_tries > _MAX_TRIES:
                return place
            alone = below | shared if isinstance(below, dict) else below
            if _kind(fault(f"start: {json_text(alone)}\n")) == _kind(reason):
                place, current = place + step, below
                break
        else:
            return place


def _kind(reason: str) -> str:
    """Return the part of a fault that is the same wherever it is."""
    return schema_fault(reason).partition("\n")[0]


def _subschemas(schema: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 (JSON)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            yield from ((f"/{key}/{escaped_name(name)}", each) for name, each in value.items())
        elif key in _LISTS and isinstance(value, list):
            yield from ((f"/{key}/{number}", each) for number, each in enumerate(value))
        elif key in _SINGLE and isinstance(value, dict):
            yield f"/{key}", value
