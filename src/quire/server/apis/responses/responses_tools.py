"""Tools of /v1/responses as functions of a chat. Tools that a server would run itself are left out."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from quire.core.checks import refuse, shown
from quire.core.errors import InvalidRequestError
from quire.server.apis.responses.input_items import CUSTOM_ARGUMENT, qualified
from quire.server.errors import invalid
from quire.text.tools import check_tools

log = logging.getLogger(__name__)

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
    "required": [CUSTOM_ARGUMENT],
}


class Tools(NamedTuple):
    """Tools of a body, and how their calls are written in items."""

    functions: list[dict[str, Any]]                             # functions in the form of chats
    custom: frozenset[str] = frozenset()                        # names of those with one text as argument
    namespaces: Mapping[str, tuple[str, str]] = MappingProxyType({})    # and own names, by the names of functions


NO_TOOLS = Tools([])


def functions_of(given: Any, added: Sequence[Any], max_tools: int) -> Tools:  # noqa: ANN401 (JSON)
    """Return the tools of a body, without those that are neither functions nor custom tools, with one warning.

    `added`: those of its items. The tools of a namespace are functions, too, with its name in front of theirs.
    InvalidRequestError names the first invalid tool.
    """
    functions, custom, others = list[dict[str, Any]](), set[str](), list[str]()
    namespaces = dict[str, tuple[str, str]]()
    for where, namespace, tool in chain(_flat("tools", given), _flat("tools of items", added)):
        kind, name = tool["type"], tool.get("name")
        if kind not in ("function", "custom"):
            others.append(kind)
            continue
        if namespace is not None and isinstance(name, str):
            own, name = name, qualified(namespace, name)
            namespaces[name] = namespace, own
        functions.append(_function(where, tool | {"name": name}))
        if kind == "custom":
            custom.add(str(name))
    if len(functions) > max_tools:
        refuse("tools", functions, f"at most {max_tools} of them (max_tools), those of namespaces counted")
    if others:
        kinds = ", ".join(shown(kind) for kind in sorted(set(others))[:8])
        log.warning("%d tools of a request are ignored, which are neither functions nor custom: %s", len(others), kinds)
    return Tools(functions, frozenset(custom), namespaces)


def _flat(where: str, given: Any, namespace: str | None = None) -> Iterator[tuple[str, str | None, dict[str, Any]]]:  # noqa: ANN401
    """Yield the place, the namespace and the object of each tool."""
    if given is None:
        return
    if not isinstance(given, list | tuple):
        refuse(where, given, "a list")
    for index, tool in enumerate(given):
        place, kind = f"{where}[{index}]", tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or not isinstance(kind, str):
            refuse(place, tool, "an object with a type")
        if kind != "namespace":
            yield place, namespace, tool
        elif namespace is not None or not isinstance(tool.get("name"), str):
            refuse(place, tool, "a namespace with a name, in none")
        else:
            yield from _flat(f"{place}.tools", tool.get("tools"), tool["name"])


def _function(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
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
        message = str(error).replace("tools[0].function", where, 1)
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
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        return choice
    name, namespace = choice.get("name"), choice.get("namespace")
    if isinstance(name, str) and isinstance(namespace, str):
        name = qualified(namespace, name)
    return choice | {"type": "function"} | ({} if name is None else {"name": name})
