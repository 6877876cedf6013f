"""Input items as messages of a chat.

Chat templates expect instructions in one system message in front, and each turn of the assistant, its reasoning, text
and calls, in one message.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from quire.core.checks import refuse, shown
from quire.server.errors import invalid

Message = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_SYSTEM = "system"
CUSTOM_ARGUMENT = "input"   # the one argument of a custom tool


def messages_of(instructions: str | None, given: Any, max_items: int) -> list[Message]:  # noqa: ANN401 (JSON)
    """Return the messages of an input. InvalidRequestError or ApiError 400 names the first invalid item."""
    conversation = _Conversation()
    if instructions:
        conversation.add_message("developer", instructions)
    if isinstance(given, str):
        conversation.add_message("user", given)
        return conversation.messages
    if not isinstance(given, list) or not given:
        refuse("input", given, "text, or a list of items that is not empty")
    if len(given) > max_items:
        refuse("input", given, f"at most {max_items} of them (max_messages)")
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            refuse(where, item, "an object")
        kind = item.get("type") or "message"
        add = _KINDS.get(kind) if isinstance(kind, str) else None
        if add is None:
            _refuse_kind(where, kind)
        add(conversation, where, item)
    return conversation.messages


class _Conversation:
    """Messages so far. The last one grows while items belong to the same turn of the assistant."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def add_message(self, role: str, text: str) -> None:
        """Add the text of a message; leading instructions of all kinds are one system message."""
        role = _SYSTEM if role == "developer" else role
        last = self.messages[-1] if self.messages else None
        if role == _SYSTEM and last is not None and last["role"] == _SYSTEM and len(self.messages) == 1:
            last["content"] += f"\n\n{text}"
        elif role == "assistant":
            self._turn("content", "tool_calls")["content"] = text
        else:
            self.messages.append({"role": role, "content": text})

    def add_reasoning(self, text: str) -> None:
        """Begin a turn of the assistant with reasoning."""
        self._turn("reasoning", "content", "tool_calls")["reasoning"] = text

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call to the turn of the assistant."""
        function = {"name": name, "arguments": arguments}
        calls = self._turn().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def add_result(self, call_id: str, text: str) -> None:
        """Add the result of a call."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _turn(self, *unless: str) -> Message:
        """Return the last message if it is the assistant's and has none of these fields, or a new one."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or not last.keys().isdisjoint(unless):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


def _add_message(conversation: _Conversation, where: str, item: Mapping[str, Any]) -> None:
    role = item.get("role")
    if role not in _ROLES:
        refuse(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    conversation.add_message(role, _text(f"{where}.content", item.get("content")))


def _add_reasoning(conversation: _Conversation, where: str, item: Mapping[str, Any]) -> None:
    """Add the reasoning of an earlier output, or its summary; encrypted reasoning of other servers has no text."""
    text = _text(f"{where}.content", item.get("content") or []) or _text(f"{where}.summary", item.get("summary") or [])
    if text:
        conversation.add_reasoning(text)


def _add_call(conversation: _Conversation, where: str, item: Mapping[str, Any]) -> None:
    call_id, name, arguments = (_string(where, item, field) for field in ("call_id", "name", "arguments"))
    conversation.add_call(call_id, name, arguments)


def _add_custom_call(conversation: _Conversation, where: str, item: Mapping[str, Any]) -> None:
    call_id, name, text = (_string(where, item, field) for field in ("call_id", "name", "input"))
    conversation.add_call(call_id, name, json.dumps({CUSTOM_ARGUMENT: text}, ensure_ascii=False))


def _add_result(conversation: _Conversation, where: str, item: Mapping[str, Any]) -> None:
    conversation.add_result(_string(where, item, "call_id"), _text(f"{where}.output", item.get("output")))


_KINDS: Mapping[str, Callable[[_Conversation, str, Mapping[str, Any]], None]] = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_result,
    "custom_tool_call": _add_custom_call,
    "custom_tool_call_output": _add_result,
}


def _refuse_kind(where: str, kind: object) -> NoReturn:
    if kind == "item_reference":
        message = f"{where} is a reference to an item, but this server stores no items: send the item itself"
    else:
        message = f"{where}.type must be one of {', '.join(_KINDS)}, got {shown(kind)}"
    invalid(message, param="input", code="unsupported_parameter")


def _string(where: str, item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        refuse(f"{where}.{field}", value, "a string")
    return value


def _text(where: str, content: Any) -> str:  # noqa: ANN401 (JSON)
    """Return the text of content: a string, or parts of text, which become lines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(where, content, "a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            message = f"{where}[{index}].type must be one of {', '.join(_TEXT_PARTS)}, got {shown(kind)}"
            invalid(message, param="input", code="unsupported_parameter")
        texts.append(_string(f"{where}[{index}]", part, "refusal" if kind == "refusal" else "text"))
    return "\n".join(texts)
