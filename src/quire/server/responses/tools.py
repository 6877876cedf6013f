"""Tools of /v1/responses as functions of a chat. Tools that a server would run itself are left out."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.core.checks import refuse, shown
from quire.core.errors import InvalidRequestError
from quire.server.errors import invalid
from quire.server.responses.input_items import CUSTOM_ARGUMENT
from quire.text.tools import check_tools

log = logging.getLogger(__name__)

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
    "required": [CUSTOM_ARGUMENT],
}


class Tools(NamedTuple):
    """Tools of a body."""

    functions: list[dict[str, Any]]     # in the form of chats
    custom: frozenset[str]              # names of those with one text as argument


def functions_of(given: Any) -> Tools:  # noqa: ANN401 (JSON)
    """Return the tools of a body, without those that are neither functions nor custom tools, with one warning.

    InvalidRequestError names the first invalid one.
    """
    if given is None:
        return Tools([], frozenset())
    if not isinstance(given, list):
        refuse("tools", given, "a list")
    functions, custom, others = list[dict[str, Any]](), set[str](), list[str]()
    for index, tool in enumerate(given):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            refuse(f"tools[{index}]", tool, "an object with a type")
        if kind not in ("function", "custom"):
            others.append(kind)
            continue
        functions.append(_function(index, tool))
        if kind == "custom":
            custom.add(tool["name"])
    if others:
        kinds = ", ".join(shown(kind) for kind in sorted(set(others))[:8])
        log.warning("%d tools of a request are ignored, which are neither functions nor custom: %s", len(others), kinds)
    return Tools(functions, frozenset(custom))


def _function(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of chats. A format of a custom tool's text is told to the model, and not forced."""
    function = {name: tool[name] for name in _FUNCTION_FIELDS if tool.get(name) is not None}
    if tool["type"] == "custom":
        function["parameters"] = _CUSTOM_PARAMETERS
        definition = tool["format"].get("definition") if isinstance(tool.get("format"), dict) else None
        if isinstance(definition, str):
            told = f"{function.get('description', '')}\n\nFormat of the input:\n{definition}"
            function["description"] = told.lstrip()
    try:
        (checked,) = check_tools([{"type": "function", "function": function}])
    except InvalidRequestError as error:
        message = str(error).replace("tools[0].function", f"tools[{index}]", 1)
        raise InvalidRequestError(message, param="tools") from error
    return checked


def choice_of(choice: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return the choice among tools in the form of chats, to be checked there: a custom tool is a function."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        return choice | {"tools": [_as_function(each) for each in choice["tools"]]}
    if kind not in ("function", "custom", "allowed_tools"):
        invalid(f"tool_choice.type must be function, custom or allowed_tools, got {shown(kind)}", param="tool_choice")
    return _as_function(choice)


def _as_function(choice: Any) -> Any:  # noqa: ANN401 (JSON)
    is_custom = isinstance(choice, dict) and choice.get("type") == "custom"
    return choice | {"type": "function"} if is_custom else choice
