"""Use of tools in a chat: those of a body and the client's choice among them, checked before anything is rendered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.checks import shown
from quire.server.errors import invalid
from quire.text.tools import Tool, check_tools

_CHOICES = 'none, auto, required, {"type": "function", ...} or {"type": "allowed_tools", ...}'


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a call, and the use that an output may make of them."""

    tools: Sequence[Tool] = ()      # described to the model
    allowed: Sequence[Tool] = ()    # an output may call these; none if it may call no tool
    is_required: bool = False       # an output calls at least one
    is_parallel: bool = True        # an output may call more than one

    @property
    def is_constrained(self) -> bool:
        """Whether calls are not left to the model alone."""
        is_strict = any(tool["function"].get("strict") for tool in self.allowed)
        is_restricted = len(self.allowed) < len(self.tools) or not self.is_parallel
        return bool(self.allowed) and (self.is_required or is_strict or is_restricted)


NO_TOOLS = ToolUse()


def tool_use(given: Any, choice: Any, *, is_parallel: bool) -> ToolUse:  # noqa: ANN401
    """Return the tools of a body and their use, in OpenAI's JSON.

    InvalidRequestError or ApiError 400 names the invalid field, `tools` or `tool_choice`.
    """
    tools = check_tools(given or [])
    if choice in (None, "auto", "none"):
        return ToolUse(tools, [] if choice == "none" else tools, is_parallel=is_parallel)
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in ("required", "function", "allowed_tools"):
        invalid(f"tool_choice must be {_CHOICES}, got {shown(choice)}", param="tool_choice")
    if not tools:
        invalid(f"tool_choice {shown(kind)} needs tools", param="tool_choice")
    if kind == "required":
        return ToolUse(tools, tools, is_required=True, is_parallel=is_parallel)
    assert isinstance(choice, dict), "a choice of this kind is an object"
    if kind == "function":
        return ToolUse(tools, [_named("tool_choice", choice, tools)], is_required=True, is_parallel=False)
    return _allowed_tools(choice, tools, is_parallel=is_parallel)


def _allowed_tools(choice: Mapping[str, Any], tools: Sequence[Tool], *, is_parallel: bool) -> ToolUse:
    given = choice.get("allowed_tools", choice)  # Responses have its members one level higher
    named = given.get("tools") if isinstance(given, dict) else None
    mode = given.get("mode", "auto") if isinstance(given, dict) else None
    if mode not in ("auto", "required") or not isinstance(named, list) or not named:
        expected = '{"mode": "auto" or "required", "tools": [{"type": "function", ...}, ...]}'
        invalid(f"tool_choice.allowed_tools must be {expected}, got {shown(given)}", param="tool_choice")
    where = "tool_choice.allowed_tools.tools"
    chosen = {id(tool): tool for tool in (_named(f"{where}[{index}]", each, tools) for index, each in enumerate(named))}
    return ToolUse(tools, list(chosen.values()), is_required=mode == "required", is_parallel=is_parallel)


def _named(where: str, choice: object, tools: Sequence[Tool]) -> Tool:
    """Return the tool with the name in `{"type": "function", "function": {"name": ...}}`."""
    function = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        expected = '{"type": "function", "function": {"name": ...}}'
        invalid(f"{where} must be {expected}, got {shown(choice)}", param="tool_choice")
    found = next((tool for tool in tools if tool["function"]["name"] == name), None)
    if found is None:
        invalid(f"{where} names the function {shown(name)}, which is not in tools", param="tool_choice")
    return found
