"""Messages of a conversation in OpenAI's form, checked, and one form of each content.

A content is a text, a list of text parts, or, beside calls, missing. A tool's message has its function's name, and
reasoning is found under each of the names that templates read. `quire.text.fitted_messages` turns such messages into
those of one chat template.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from quire.core.checks import shown
from quire.core.errors import InvalidRequestError
from quire.core.schema_limits import check_json_bytes
from quire.text.parts import TEXT_TYPES, part_reasoning, part_text, part_type, plain_part
from quire.text.tools import ToolLimits

_REASONING_NAMES = ("reasoning", "reasoning_content", "thinking")  # vLLM's, DeepSeek's and Qwen's, gpt-oss's

_SPEAKERS = ("user", "system", "developer")  # null is no content of theirs; an assistant's message may have calls alone
_LISTENED_TO = (*_SPEAKERS, "tool")  # messages of these roles have no reasoning

Message = Mapping[str, Any]


def checked_conversation(messages: object, limits: ToolLimits) -> list[dict[str, Any]]:
    """Return copies of the messages, checked. InvalidRequestError names an invalid one."""
    if not isinstance(messages, list | tuple) or not messages:
        refuse("messages must be a list of at least one message")
    names: dict[object, str] = {}                 # of the functions called so far, by the ids of their calls
    return [_checked(index, message, names, limits) for index, message in enumerate(messages)]


def refuse(message: str, cause: Exception | None = None) -> NoReturn:
    """Raise InvalidRequestError for the field `messages`."""
    raise InvalidRequestError(message, param="messages") from cause


def _checked(index: int, message: object, names: dict[object, str], limits: ToolLimits) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        refuse(f"{where} must be an object, got {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        refuse(f"{where} must have a role that is a string")
    checked = {name: value for name, value in message.items() if value is not None}  # clients send null for nothing
    calls = checked.pop("tool_calls", None)
    if calls:
        checked["tool_calls"] = _tool_calls(where, calls, names, limits)
    elif "content" in message and message["content"] is None and checked["role"] in _SPEAKERS:
        refuse(f"{where}.content must be a string or a list of parts, got null")
    content = message.get("content")
    if checked["role"] not in _LISTENED_TO:
        content, thought = split_reasoning(content)
        if thought and not any(isinstance(checked.get(name), str) for name in _REASONING_NAMES):
            checked[_REASONING_NAMES[0]] = thought
    if content is not None or not calls:
        checked["content"] = _content(where, content)
    if checked["role"] == "tool" and (name := names.get(_hashable(checked.get("tool_call_id")))):
        checked.setdefault("name", name)
    reasoning = next((text for name in _REASONING_NAMES if isinstance(text := checked.get(name), str)), None)
    if reasoning is not None:
        checked |= {name: reasoning for name in _REASONING_NAMES if name not in checked}
    return checked


def content_text(where: str, content: object) -> str:
    """Return the content of a message as one text, parts joined by newlines. Errors as in `checked_conversation`."""
    return text_of(_content(where, content))


def text_of(content: str | list[dict[str, Any]] | None) -> str:
    """Return a checked content as one text, parts joined by newlines."""
    return content or "" if content is None or isinstance(content, str) else "\n".join(part["text"] for part in content)


def _content(where: str, content: object) -> str | list[dict[str, Any]]:
    """Return the content of a message: a text, or text parts with nothing but their texts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        refuse(f"{where}.content must be a string, a list of parts or null, got {type(content).__name__}")
    parts = []
    for index, part in enumerate(content):
        text = part_text(part)
        if text is None:
            refuse(
                f'{where}.content[{index}] must be a text or a part of text ({", ".join(TEXT_TYPES)}), '
                f"got the type {shown(part_type(part))}"
            )
        parts.append(plain_part(text))
    return parts


def split_reasoning(content: object) -> tuple[object, str]:
    """Return a content without its parts of reasoning, and their text."""
    if not isinstance(content, list | tuple):
        return content, ""
    thoughts = [part_reasoning(part) for part in content]
    rest = [part for part, thought in zip(content, thoughts, strict=True) if thought is None]
    return rest, "\n".join(filter(None, thoughts))


def _tool_calls(where: str, calls: object, names: dict[object, str], limits: ToolLimits) -> list[dict[str, Any]]:
    """Return the calls, and add the names of their functions to `names`."""
    if not isinstance(calls, list | tuple):
        refuse(f"{where}.tool_calls must be a list, got {type(calls).__name__}")
    return [_tool_call(f"{where}.tool_calls[{index}]", call, names, limits) for index, call in enumerate(calls)]


def _tool_call(where: str, call: object, names: dict[object, str], limits: ToolLimits) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        refuse(f"{where} must be an object with a function that is an object")
    name = function.get("name")
    if not isinstance(name, str):
        refuse(f"{where}.function must have a name that is a string")
    names[_hashable(call.get("id"))] = name
    arguments = function.get("arguments")
    place, limit = f"{where}.function.arguments", limits.max_argument_bytes
    check_json_bytes(place, arguments, limit, "max_argument_bytes", "messages")
    return {"type": "function"} | call | {"function": function | {"arguments": arguments}}


def _hashable(value: object) -> object:
    return value if isinstance(value, str) else None
