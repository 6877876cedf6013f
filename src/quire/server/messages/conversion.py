"""Conversion of the Messages API's conversation to that of all chats: blocks become messages and tool calls.

A message of the user may have results of tools and text: each run of texts becomes one message, each result another.
Turns of one role that follow each other are one turn, as in Anthropic's API: templates demand that roles alternate.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.core.checks import check_optional_int, shown
from quire.server.errors import invalid, unsupported
from quire.server.messages.bodies import ConversationBody, InputMessage

log = logging.getLogger(__name__)

Json = dict[str, Any]

# A line that one coding agent puts in front of its system text. It differs from call to call, and no cached prefix
# would be found behind it.
_BILLING = "x-anthropic-billing-header:"
_ROLES = ("user", "assistant", "system")
_MAX_NAMES_LOGGED = 8


def text_blocks(where: str, content: object) -> list[Json]:
    """Return the text blocks of a content that may be one text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    blocks = [_block(f"{where}[{index}]", block) for index, block in enumerate(_list(where, content))]
    for index, block in enumerate(blocks):
        if block["type"] != "text":
            unsupported(f"{where}[{index}].type", block["type"])
    return blocks


def system_blocks(system: object) -> list[Json]:
    """Return the text blocks of the system prompt, but for a billing header."""
    if system is None:
        return []
    return [block for block in text_blocks("system", system) if not block["text"].startswith(_BILLING)]


def openai_messages(system: Sequence[Json], messages: Sequence[InputMessage]) -> list[Json]:
    """Return the conversation in OpenAI's form. ApiError 400 names an invalid block."""
    converted: list[Json] = []
    if system:
        converted.append({"role": "system", "content": [_text_part(block) for block in system]})
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role not in _ROLES:
            invalid(f"{where}.role must be one of {', '.join(_ROLES)}, got {shown(message.role)}", param="messages")
        for turn in _turns(f"{where}.content", message):
            if converted and turn["role"] != "tool" and converted[-1]["role"] == turn["role"]:
                _join(converted[-1], turn)
            else:
                converted.append(turn)
    return converted


def continues(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether an answer continues the last message, which is the start of an assistant's text."""
    return messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]


def _turns(where: str, message: InputMessage) -> Iterator[Json]:
    """Yield the messages of OpenAI's form that one message becomes."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": [{"type": "text", "text": message.content}]}
        return
    blocks = [_block(f"{where}[{index}]", block) for index, block in enumerate(_list(where, message.content))]
    if message.role == "assistant":
        yield _assistant(where, blocks)
        return
    texts: list[Json] = []
    for index, block in enumerate(blocks):
        match block["type"]:
            case "text":
                texts.append(_text_part(block))
            case "tool_result":
                if texts:
                    yield {"role": message.role, "content": texts}
                    texts = []
                yield _tool_message(f"{where}[{index}]", block)
            case other:
                unsupported(f"{where}[{index}].type", other)
    if texts:
        yield {"role": message.role, "content": texts}


def _assistant(where: str, blocks: Sequence[Json]) -> Json:
    texts, reasoning, calls = list[Json](), list[str](), list[Json]()
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        match block["type"]:
            case "text":
                texts.append(_text_part(block))
            case "thinking":
                reasoning.append(_string(place, block, "thinking"))
            case "redacted_thinking":
                continue
            case "tool_use":
                name, id_, given = _string(place, block, "name"), _string(place, block, "id"), block.get("input")
                if not isinstance(given, dict):
                    invalid(f"{place}.input must be an object, got {shown(given)}", param="messages")
                calls.append({"id": id_, "type": "function", "function": {"name": name, "arguments": given}})
            case other:
                unsupported(f"{place}.type", other)
    turn: Json = {"role": "assistant", "content": texts}
    if reasoning:
        turn["reasoning_content"] = "\n".join(reasoning)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _tool_message(where: str, block: Mapping[str, Any]) -> Json:
    content = block.get("content")
    texts = [] if content is None else [_text_part(part) for part in text_blocks(f"{where}.content", content)]
    return {"role": "tool", "tool_call_id": _string(where, block, "tool_use_id"), "content": texts}


def _join(turn: Json, other: Mapping[str, Any]) -> None:
    """Add what the same role says next."""
    turn["content"] += other["content"]
    if "tool_calls" in other:
        turn["tool_calls"] = turn.get("tool_calls", []) + other["tool_calls"]
    if "reasoning_content" in other:
        earlier = turn.get("reasoning_content")
        turn["reasoning_content"] = "\n".join(filter(None, (earlier, other["reasoning_content"])))


def _text_part(block: Mapping[str, Any]) -> Json:
    return {"type": "text", "text": block["text"]}


def _list(where: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        invalid(f"{where} must be a string or a list of blocks, got {shown(value)}", param=where.partition("[")[0])
    return value


def _block(where: str, block: object) -> Json:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        invalid(f"{where} must be an object with a type that is a string", param=where.partition("[")[0])
    if block["type"] == "text" and not isinstance(block.get("text"), str):
        invalid(f"{where}.text must be a string, got {shown(block.get('text'))}", param=where.partition("[")[0])
    return block


def _string(where: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        invalid(f"{where}.{name} must be a string, got {shown(value)}", param="messages")
    return value


# --- tools ------------------------------------------------------------------------------------------------------------


def openai_tools(tools: object) -> list[Json]:
    """Return the tools in OpenAI's form. Those that no client's function stands behind are left out."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        invalid(f"tools must be a list, got {shown(tools)}", param="tools")
    converted, left_out = list[Json](), list[str]()
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            invalid(f"tools[{index}] must be an object, got {shown(tool)}", param="tools")
        if tool.get("type") not in (None, "custom"):
            left_out.append(shown(tool["type"]))
            continue
        function = {"name": tool.get("name"), "description": tool.get("description"), "strict": tool.get("strict")}
        converted.append({"type": "function", "function": function | {"parameters": tool.get("input_schema")}})
    if left_out:
        names = ", ".join(left_out[:_MAX_NAMES_LOGGED])
        log.warning("%d tools of a request are no functions of its client and are left out: %s", len(left_out), names)
    return converted


def openai_tool_choice(choice: Mapping[str, Any] | None) -> tuple[str | Json | None, bool]:
    """Return the choice in OpenAI's form, and whether calls may be parallel."""
    if choice is None:
        return None, True
    kind = choice.get("type")
    is_parallel = not choice.get("disable_parallel_tool_use")
    if kind in ("auto", "none"):
        return kind, is_parallel
    if kind == "any":
        return "required", is_parallel
    if kind != "tool":
        invalid(f"tool_choice.type must be one of auto, any, tool, none, got {shown(kind)}", param="tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}, is_parallel


def thinking_effort(body: ConversationBody) -> str | None:
    """Return the effort of reasoning that a body asks for: none, a level, or None for the model's own habit."""
    effort = None if body.output_config is None else body.output_config.effort
    if body.thinking is None:
        return effort
    kind = body.thinking.get("type")
    if kind == "disabled":
        return "none"
    if kind not in ("enabled", "adaptive"):
        invalid(f"thinking.type must be one of enabled, adaptive, disabled, got {shown(kind)}", param="thinking")
    return effort or "medium"


def thinking_budget(body: ConversationBody) -> int | None:
    """Return the limit on reasoning tokens of a body; None without one."""
    if body.thinking is None or body.thinking.get("type") != "enabled":
        return None
    return check_optional_int("thinking.budget_tokens", body.thinking.get("budget_tokens"), 1)
