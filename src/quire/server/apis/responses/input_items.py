"""Input items as messages of a chat.

Chat templates expect instructions in one system message in front, and each turn of the assistant, its reasoning, text
and calls, in one message.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from quire.core.checks import refuse, shown
from quire.server.errors import invalid
from quire.server.images.image_inputs import image_url_part
from quire.text.conversation import PART_FIELDS, TEXT_TYPES, is_image, part_reasoning, part_text, part_type, plain_part

Message = dict[str, Any]
Content = str | list[Any]   # a text, or parts: texts and images

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = (*TEXT_TYPES, "reasoning_text", "summary_text")
_SYSTEM = "system"
CUSTOM_ARGUMENT = "input"   # the one argument of a custom tool
# Calls of tools that OpenAI's models know: the name that a function would have, and the field with its arguments.
_BUILT_IN = {
    "apply_patch_call": ("apply_patch", "operation"),
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "tool_search_call": ("tool_search", "arguments"),
}
# Calls that a server ran, as above, and the field with the result.
_RUN = {
    "code_interpreter_call": ("code_interpreter", "code", "outputs"),
    "file_search_call": ("file_search", "queries", "results"),
    "web_search_call": ("web_search", "action", "results"),
}
_ADDS_TOOLS = ("additional_tools", "tool_search_output")


def qualified(namespace: str, name: str) -> str:
    """Return the name of the function that a tool of a namespace is."""
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def added_tools(given: Any) -> list[Any]:  # noqa: ANN401 (JSON)
    """Return the tools that items of an input add to those of the body. ApiError 400 for what is no list."""
    added: list[Any] = []
    for index, item in enumerate(given if isinstance(given, list) else ()):
        if isinstance(item, dict) and item.get("type") in _ADDS_TOOLS and item.get("tools") is not None:
            if not isinstance(item["tools"], list):
                invalid(f"input[{index}].tools must be a list, got {shown(item['tools'])}", param="input")
            added += item["tools"]
    return added


def messages_of(
    instructions: str | None, given: Any, max_items: int, *, reads_images: bool = False  # noqa: ANN401 (JSON)
) -> list[Message]:
    """Return the messages of an input. InvalidRequestError or ApiError 400 names the first invalid item.

    For a model that reads images, images are ImageParts.
    """
    conversation = _Conversation(reads_images)
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

    def __init__(self, reads_images: bool) -> None:
        self.messages: list[Message] = []
        self.reads_images = reads_images

    def add_message(self, role: str, text: Content) -> None:
        """Add a message; leading instructions of all kinds are one system message, and have no images."""
        role = _SYSTEM if role == "developer" else role
        last = self.messages[-1] if self.messages else None
        if role == _SYSTEM and last is not None and last["role"] == _SYSTEM and len(self.messages) == 1:
            last["content"] += f"\n\n{text}"
        elif role == "assistant":
            self._turn("content")["content"] = text
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

    def add_result(self, call_id: str, text: Content) -> None:
        """Append a message of the role `tool`, as chat templates take the result of a call."""
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
    reads_images = conversation.reads_images and role == "user"
    conversation.add_message(role, _content(f"{where}.content", item.get("content"), reads_images=reads_images))


def _add_reasoning(conversation: _Conversation, where: str, item: Mapping[str, Any]) -> None:
    """Add the reasoning of an earlier output, or its summary; encrypted reasoning of other servers has no text."""
    text = _text(f"{where}.content", item.get("content") or []) or _text(f"{where}.summary", item.get("summary") or [])
    if text:
        conversation.add_reasoning(text)


def _add_call(conversation: _Conversation, where: str, item: Mapping[str, Any]) -> None:
    call_id, arguments = (_string(where, item, field) for field in ("call_id", "arguments"))
    conversation.add_call(call_id, _name(where, item), arguments)


def _add_custom_call(conversation: _Conversation, where: str, item: Mapping[str, Any]) -> None:
    call_id, text = (_string(where, item, field) for field in ("call_id", "input"))
    conversation.add_call(call_id, _name(where, item), _json({CUSTOM_ARGUMENT: text}))


def _name(where: str, item: Mapping[str, Any]) -> str:
    name, namespace = _string(where, item, "name"), item.get("namespace")
    return qualified(namespace, name) if isinstance(namespace, str) else name


def _add_built_in_call(conversation: _Conversation, where: str, item: Mapping[str, Any]) -> None:
    name, field = _BUILT_IN[item["type"]]
    conversation.add_call(_call_id(where, item), name, _arguments(field, item.get(field)))


def _add_run_call(conversation: _Conversation, where: str, item: Mapping[str, Any]) -> None:
    """Add a call that a server ran, and its result; there may be none in the item."""
    name, field, result = _RUN[item["type"]]
    call_id, found = _call_id(where, item), item.get(result)
    conversation.add_call(call_id, name, _arguments(field, item.get(field)))
    conversation.add_result(call_id, str(item.get("status") or "completed") if found is None else _json(found))


def _add_mcp_call(conversation: _Conversation, where: str, item: Mapping[str, Any]) -> None:
    call_id, name, arguments = (_string(where, item, field) for field in ("id", "name", "arguments"))
    conversation.add_call(call_id, name, arguments)
    found = item.get("output") if item.get("error") is None else item["error"]
    conversation.add_result(call_id, found if isinstance(found, str) else _json(found))


def _add_result(conversation: _Conversation, where: str, item: Mapping[str, Any]) -> None:
    content = _content(f"{where}.output", item.get("output"), reads_images=conversation.reads_images)
    conversation.add_result(_string(where, item, "call_id"), content)


def _add_built_in_result(conversation: _Conversation, where: str, item: Mapping[str, Any]) -> None:
    """Add the result of a built-in tool: its text, or its JSON, which has the streams of a shell."""
    output = item.get("output")
    text = output if isinstance(output, str) else str(item.get("status") or "") if output is None else _json(output)
    conversation.add_result(_call_id(where, item), text)


def _add_found_tools(conversation: _Conversation, where: str, item: Mapping[str, Any]) -> None:
    """Add the result of a search for tools: their names. They are among the tools themselves (`added_tools`)."""
    found = [tool.get("name") for tool in item.get("tools") or () if isinstance(tool, dict)]
    conversation.add_result(_call_id(where, item), "\n".join(name for name in found if isinstance(name, str)))


def _add_nothing(conversation: _Conversation, where: str, item: Mapping[str, Any]) -> None:
    """Leave out an item that says nothing to the model: what servers note for themselves."""


_KINDS: Mapping[str, Callable[[_Conversation, str, Mapping[str, Any]], None]] = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_result,
    "custom_tool_call": _add_custom_call,
    "custom_tool_call_output": _add_result,
    **dict.fromkeys(_BUILT_IN, _add_built_in_call),
    **dict.fromkeys((f"{kind}_output" for kind in _BUILT_IN if kind != "tool_search_call"), _add_built_in_result),
    **dict.fromkeys(_RUN, _add_run_call),
    "mcp_call": _add_mcp_call,
    "tool_search_output": _add_found_tools,
    **dict.fromkeys(
        ("additional_tools", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"), _add_nothing
    ),
}


def _arguments(field: str, value: object) -> str:
    """Return arguments as JSON text: an object as it is, a text or a list under the name of its field."""
    return _json(value if isinstance(value, dict) else {field: value})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refuse_kind(where: str, kind: object) -> NoReturn:
    if kind == "item_reference":
        message = f"{where} is a reference to an item, but this server stores no items: send the item itself"
    else:
        message = f"{where}.type must be one of {', '.join(_KINDS)}, got {shown(kind)}"
    invalid(message, param="input", code="unsupported_parameter")


def _call_id(where: str, item: Mapping[str, Any]) -> str:
    """Return the id of a call; those of some built-in tools have it as their own."""
    return _string(where, item, "id" if item.get("call_id") is None else "call_id")


def _string(where: str, item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        refuse(f"{where}.{field}", value, "a string")
    return value


def _content(where: str, content: Any, *, reads_images: bool) -> Content:  # noqa: ANN401 (JSON)
    """Return content with its images as ImageParts; without any, its text."""
    if not reads_images or not isinstance(content, list) or not any(map(is_image, content)):
        return _text(where, content)
    return [
        image_url_part(f"{where}[{index}]", part) if is_image(part) else plain_part(_part_text(where, index, part))
        for index, part in enumerate(content)
    ]


def _text(where: str, content: Any) -> str:  # noqa: ANN401 (JSON)
    """Return the text of content: a string, or parts of text, which become lines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(where, content, "a string or a list of parts")
    return "\n".join([_part_text(where, index, part) for index, part in enumerate(content)])


def _part_text(where: str, index: int, part: Any) -> str:  # noqa: ANN401 (JSON)
    """Return the text of a part. InvalidRequestError or ApiError 400 for one that has none."""
    text = part_text(part)
    text = part_reasoning(part) if text is None else text
    if text is None:
        kind, place = part_type(part), f"{where}[{index}]"
        if kind in _TEXT_PARTS:
            refuse(f"{place}.{PART_FIELDS[kind]}", part.get(PART_FIELDS[kind]), "a string")
        message = f"{place}.type must be one of {', '.join(_TEXT_PARTS)}, got {shown(kind)}"
        invalid(message, param="input", code="unsupported_parameter")
    return text
