"""Tools of a request: the functions that a model may call, checked, and as text for templates that render none."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from quire.core.checks import shown
from quire.core.errors import InvalidRequestError
from quire.core.structured_outputs import SchemaLimits, check_schema

MAX_NAME_CHARS = 128
NAME_PATTERN = rf"[\w.:/-]{{1,{MAX_NAME_CHARS}}}"
_NAME = re.compile(NAME_PATTERN)

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolLimits(SchemaLimits):
    """Bounds on each function's schema, and on the arguments of each call in a message; a server's are its flags."""

    max_argument_bytes: int = 1 << 20


DEFAULT_TOOL_LIMITS = ToolLimits()


def check_tools(tools: object) -> list[dict[str, Any]]:
    """Return the tools. InvalidRequestError for the field `tools` if one is no function with a valid name.

    Does not look into schemas: takes microseconds.
    """
    if not isinstance(tools, list | tuple):
        _refuse("tools", f"must be a list, got {type(tools).__name__}")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            _refuse(where, 'must be of the form {"type": "function", "function": {"name": ...}}')
        _check_function(f"{where}.function", tool["function"])
    return list(tools)


def _check_function(where: str, function: Mapping[str, Any]) -> None:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = f"must be 1 to {MAX_NAME_CHARS} letters, digits, or characters of _-.:/"
        _refuse(f"{where}.name", f"{expected}, got {shown(name)}")
    for field, kind, expected in (
        ("description", str, "a string"), ("parameters", dict, "a JSON schema, an object,"), ("strict", bool, "a bool")
    ):  # fmt: skip
        value = function.get(field)
        if value is not None and not isinstance(value, kind):
            _refuse(f"{where}.{field}", f"must be {expected} or null, got {type(value).__name__}")
    kind = (function.get("parameters") or {}).get("type", "object")
    if kind != "object":
        _refuse(f"{where}.parameters", f"must be the schema of an object, got the type {shown(kind)}")


def check_schemas(tools: Sequence[Tool], limits: ToolLimits) -> None:
    """Raise InvalidRequestError for a function with a schema past the limits. Linear in the sizes of the schemas."""
    for index, tool in enumerate(tools):
        where, schema = f"tools[{index}].function.parameters", tool["function"].get("parameters") or {}
        check_schema(where, schema, limits, param="tools")


def without_nulls(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools as they are given, without fields of functions that are null."""
    return [
        dict(tool) | {"function": {name: value for name, value in tool["function"].items() if value is not None}}
        for tool in tools
    ]


def with_defaults(tools: Sequence[Tool], fields: Collection[str]) -> list[dict[str, Any]]:
    """Return the tools with those of the fields that a function lacks: `description`, `parameters`, `properties`.

    Some templates read them without a test.
    """
    return [dict(tool) | {"function": _with_defaults(tool["function"], fields)} for tool in tools]


def _with_defaults(function: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    filled = dict(function)
    if "description" in fields and "description" not in filled:
        filled = {"name": filled["name"], "description": ""} | filled
    if "parameters" in fields and not filled.get("parameters"):
        filled["parameters"] = {"type": "object", "properties": {}}
    if "properties" in fields and "properties" not in filled.get("parameters", {"properties": {}}):
        filled["parameters"] = filled["parameters"] | {"properties": {}}
    return filled


def parameters_of(tool: Tool) -> dict[str, Any]:
    """Return the schema of a function's arguments. A function without one takes nothing."""
    schema: dict[str, Any] = tool["function"].get("parameters") or {"type": "object", "properties": {}}
    return schema


def tools_text(tools: Sequence[Tool], write_calls: Callable[[Sequence[tuple[str, Any]]], str] | None = None) -> str:
    """Return the text that describes tools in a message, with the format of calls if a function writes them."""
    functions = (json.dumps({"type": "function", "function": dict(tool["function"])}, ensure_ascii=False)
                 for tool in tools)  # fmt: skip
    lines = ["You can call these functions, each described by a JSON object:", "<tools>", *functions, "</tools>"]
    if write_calls is not None:
        lines += [
            "To call one, write its name and its arguments in this form, once for each call:",
            write_calls([("NAME", {"PARAMETER": "VALUE"})]),
            "The results follow between <tool_response> and </tool_response>.",
        ]
    return "\n".join(lines)


def _refuse(where: str, problem: str) -> NoReturn:
    raise InvalidRequestError(f"{where} {problem}", param="tools")
