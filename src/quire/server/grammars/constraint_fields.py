"""Fields of bodies that constrain an output, in OpenAI's and vLLM's names, as fields of StructuredOutputsParams."""

from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from typing import Any

from quire.core.checks import refuse, shown
from quire.core.errors import InvalidRequestError
from quire.core.structured_outputs import CONSTRAINTS, StructuredOutputsParams

# Fields of bodies that constrain the output.
CONSTRAINT_FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_whitespace_pattern", "structural_tag",
)  # fmt: skip
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
    "structural_tag": "structural_tag",
}
_FIELDS = [field.name for field in dataclass_fields(StructuredOutputsParams)]


def constraint_of(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of the constraint, and the client's name of each; both are empty if there is none.

    InvalidRequestError for two constraints, and for a `response_format` of unknown form.
    """
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}

    def add(field: str, value: object, name: str) -> None:
        if value is None or (field == "json_object" and value is False):
            return
        others = [each for each in fields if each == field or {each, field} <= set(CONSTRAINTS)]
        if others:
            message = f"{name} and {names[others[0]]} exclude each other: an output has one constraint"
            raise InvalidRequestError(message, param=name)
        fields[field], names[field] = value, name

    params = given.get("structured_outputs")
    if params is not None and not isinstance(params, dict):
        refuse("structured_outputs", params, "an object")
    for field, value in (params or {}).items():
        add(field, value, f"structured_outputs.{field}")
    for name, field in _GUIDED.items():
        add(field, given.get(name), name)
    if given.get("response_format") is not None:
        add(*_of_response_format(given["response_format"]))
    if fields.keys() & set(CONSTRAINTS):
        return fields, names
    if params is None:
        return {}, {}           # options of a constraint that there is none of
    kinds = ", ".join(CONSTRAINTS)
    unknown = next((f"; it has no field {shown(name)}" for name in params if name not in _FIELDS), "")
    message = f"structured_outputs must have exactly one of {kinds}, got none{unknown}"
    raise InvalidRequestError(message, param="structured_outputs")


def _of_response_format(value: Any) -> tuple[str, Any, str]:  # noqa: ANN401 (JSON)
    """Return the field, its value and its name."""
    if not isinstance(value, dict):
        refuse("response_format", value, "an object")
    kind = value.get("type")
    if kind == "text":
        return "json", None, ""
    if kind == "json_object":
        schema = value.get("schema")  # a form of llama.cpp
        if schema is not None:
            return "json", schema, "response_format.schema"
        return "json_object", True, "response_format"
    if kind == "json_schema":
        return "json", _schema_of(value.get("json_schema")), "response_format.json_schema.schema"
    if kind == "structural_tag":
        return "structural_tag", dict(value), "response_format"
    expected = "one of text, json_object, json_schema, structural_tag"
    raise InvalidRequestError(
        f"response_format.type must be {expected}, got {shown(kind)}", param="response_format.type"
    )


def _schema_of(value: Any) -> Any:  # noqa: ANN401 (JSON)
    name = "response_format.json_schema"
    if not isinstance(value, dict):
        refuse(name, value, "an object with a schema")
    for field, kind, expected in (("name", str, "a string"), ("strict", bool, "true or false")):
        if value.get(field) is not None and not isinstance(value[field], kind):
            refuse(f"{name}.{field}", value[field], expected)
    schema = value.get("schema")
    return {"type": "object"} if schema is None else schema
