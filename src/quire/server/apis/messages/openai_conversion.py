"""Conversion of the Messages API's conversation to that of all chats: blocks become messages and tool calls.

A message may have results of tools and text: each run of texts becomes one message, each result another, right behind
its call. Blocks of documents and of servers' tools are text to a model that reads text alone, or say nothing to it.
Turns of one role that follow each other are one turn, as in Anthropic's API: templates demand that roles alternate.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.checks import check_optional_int, shown
from quire.server.apis.messages.messages_bodies import ConversationBody, InputMessage
from quire.server.errors import invalid, unsupported
from quire.server.images.image_inputs import ImagePart, image_block_part
from quire.text.conversation import paired, part_reasoning, part_text, plain_part
from quire.text.tools import without_nulls

log = logging.getLogger(__name__)

Json = dict[str, Any]

# A line that one coding agent puts in front of its system text. It differs from call to call, and no cached prefix
# would be found behind it.
_BILLING = "x-anthropic-billing-header:"
_ROLES = ("user", "assistant", "system")
_THINKING = ("enabled", "adaptive", "between_tools")
_KEEP_ALL = ("all", {"type": "all"})
_FAILED = "Error:"
_SEARCH = "tool_search_tool"    # prefix of the types of tools with which Anthropic's servers search for others
_MAX_NAMES_LOGGED = 8
_CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")     # the last two: that a server ran
_RESULT = "tool_result"                                      # a client's result; types of servers' results end with it
# Marks of Anthropic's servers in turns that they wrote.
_SILENT = ("fallback", "mcp_tool_listing")
_SOURCES = {"text": "data", "content": "content"}           # kinds of text documents, and the field of the text


def text_blocks(where: str, content: object) -> list[Json]:
    """Return the text blocks of a content that may be one text."""
    if isinstance(content, str):
        return [_text_part(content)]
    texts = [_text(f"{where}[{index}]", block) for index, block in enumerate(_list(where, content))]
    return [_text_part(text) for text in texts]


def system_blocks(system: object) -> list[Json]:
    """Return the text blocks of the system prompt, but for a billing header."""
    if system is None:
        return []
    return [block for block in text_blocks("system", system) if not block["text"].startswith(_BILLING)]


def openai_messages(
    system: Sequence[Json], messages: Sequence[InputMessage], deferred: Mapping[str, str], *,
    reads_images: bool = False,
) -> list[Json]:  # fmt: skip
    """Return the conversation in OpenAI's form. ApiError 400 names an invalid block.

    The first reference to a `deferred` tool is its definition. For a model that reads images, blocks of images are
    ImageParts.
    """
    blocks = _Blocks(dict(deferred), reads_images)
    turns = [{"role": "system", "content": list(system)}] if system else []
    last_of_user = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role not in _ROLES:
            invalid(f"{where}.role must be one of {', '.join(_ROLES)}, got {shown(message.role)}", param="messages")
        if _is_over(message, index, last_of_user):
            continue
        turns += _turns(f"{where}.content", message, blocks)
    converted: list[Json] = []
    for turn in paired(turns):
        if converted and turn["role"] != "tool" and converted[-1]["role"] == turn["role"]:
            _join(converted[-1], turn)
        else:
            converted.append(turn)
    return converted


def _is_over(message: InputMessage, index: int, last_of_user: int) -> bool:
    """Return whether a message of the system says nothing (any more): it changes the effort, or was for one turn."""
    if message.role != "system":
        return False
    if message.content is None and message.output_config is not None:
        return True
    return message.clear_at == "next_user_message" and index < last_of_user


def continues(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether an answer continues the last message, which is the start of an assistant's text."""
    return bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]


def _turns(where: str, message: InputMessage, blocks: "_Blocks") -> Iterator[Json]:
    """Yield the messages of OpenAI's form that one message becomes.

    Each run of texts, reasoning and calls is one, and each result of a tool, also of one that a server ran.
    """
    content = [message.content] if isinstance(message.content, str) else _list(where, message.content)
    turn: Json = {}
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        kind = _type(place, block)
        if kind is not None and kind.endswith(_RESULT):
            if turn:
                yield turn
                turn = {}
            yield _tool_message(place, block, blocks)
            continue
        turn = turn or {"role": message.role, "content": []}
        if message.role == "assistant" and (thought := part_reasoning(block)) is not None:
            turn["reasoning_content"] = "\n".join(filter(None, (turn.get("reasoning_content"), thought)))
        elif message.role == "assistant" and kind in _CALLS:
            turn.setdefault("tool_calls", []).append(_call(place, block))
        elif kind not in _SILENT:
            turn["content"].append(blocks.part(place, block))
    if turn:
        yield turn


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Contents of blocks: definitions of tools that are not shown yet, and whether images may be among them."""

    definitions: dict[str, str]
    reads_images: bool

    def parts(self, where: str, content: object) -> list[Any]:
        """Return the parts of a content that may be one text."""
        if isinstance(content, str):
            return [_text_part(content)]
        return [self.part(f"{where}[{index}]", block) for index, block in enumerate(_list(where, content))]

    def part(self, where: str, block: object) -> Any:  # noqa: ANN401 (JSON, or an ImagePart)
        """Return the part that a block is: a text or an image."""
        if self.reads_images and isinstance(block, dict) and block.get("type") == "image":
            return image_block_part(where, block)
        return _text_part(_text(where, block))


def _call(where: str, block: Mapping[str, Any]) -> Json:
    name, id_, given = _string(where, block, "name"), _string(where, block, "id"), block.get("input")
    if not isinstance(given, dict):
        invalid(f"{where}.input must be an object, got {shown(given)}", param="messages")
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": given}}


def _tool_message(where: str, block: Mapping[str, Any], blocks: _Blocks) -> Json:
    """Return the message of a result; that of a call that failed says so first, since templates have no other place."""
    content = with_definitions(block.get("content"), blocks.definitions)
    if block["type"] != _RESULT:
        texts = [_text_part(server_result_text(content))]
    else:
        texts = [] if content is None else blocks.parts(f"{where}.content", content)
    is_error = block.get("is_error")
    if not isinstance(is_error, bool | None):
        invalid(f"{where}.is_error must be true or false, got {shown(is_error)}", param="messages")
    if is_error:
        first = texts.pop(0)["text"] if texts and not isinstance(texts[0], ImagePart) else ""
        texts.insert(0, _text_part(f"{_FAILED} {first}".rstrip()))
    return {"role": "tool", "tool_call_id": _string(where, block, "tool_use_id"), "content": texts}


def _join(turn: Json, other: Mapping[str, Any]) -> None:
    """Add what the same role says next."""
    turn["content"] += other["content"]
    if "tool_calls" in other:
        turn["tool_calls"] = turn.get("tool_calls", []) + other["tool_calls"]
    if "reasoning_content" in other:
        earlier = turn.get("reasoning_content")
        turn["reasoning_content"] = "\n".join(filter(None, (earlier, other["reasoning_content"])))


def _text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def _list(where: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        invalid(f"{where} must be a string or a list of blocks, got {shown(value)}", param=where.partition("[")[0])
    return value


def _type(where: str, block: object) -> str | None:
    """Return the type of a block; None for a plain text."""
    if isinstance(block, str):
        return None
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        invalid(f"{where} must be an object with a type that is a string", param=where.partition("[")[0])
    return kind


def _text(where: str, block: object) -> str:
    """Return the text of a block. ApiError 400 names the type of a block that is no text."""
    kind, text = _type(where, block), block_text(block)
    if text is None and kind == "text" and isinstance(block, dict):
        invalid(f"{where}.text must be a string, got {shown(block.get('text'))}", param=where.partition("[")[0])
    if text is None:
        unsupported(f"{where}.type", kind)
    return text


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
        if _is_function(tool):
            converted.append(_openai_tool(tool))
        else:
            left_out.append(shown(tool["type"]))
    if left_out:
        names = ", ".join(left_out[:_MAX_NAMES_LOGGED])
        log.warning("%d tools of a request are no functions of its client and are left out: %s", len(left_out), names)
    return converted


def deferred_tools(tools: Any) -> dict[str, str]:  # noqa: ANN401 (JSON that `openai_tools` has checked)
    """Return the definitions of the tools that a search of the client's is to find, by their names.

    None is deferred if Anthropic's servers are to search, which this one cannot, or if no tool would remain.
    """
    functions = [tool for tool in tools or () if _is_function(tool)]
    deferred = [tool for tool in functions if tool.get("defer_loading") is True]
    if len(deferred) == len(functions) or any(str(tool.get("type")).startswith(_SEARCH) for tool in tools):
        return {}
    found = without_nulls([_openai_tool(tool) for tool in deferred])
    return {tool["function"]["name"]: json.dumps(tool, ensure_ascii=False) for tool in found}


def _is_function(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") in (None, "custom")


def _openai_tool(tool: Mapping[str, Any]) -> Json:
    function = {"name": tool.get("name"), "description": tool.get("description"), "strict": tool.get("strict")}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


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
    """Return the effort of reasoning that a body asks for: none, a level, or None for the model's own habit.

    The last message of the system with an effort wins over the body's.
    """
    effort = None if body.output_config is None else body.output_config.effort
    for message in body.messages:
        if message.role == "system" and message.output_config is not None:
            effort = message.output_config.effort or effort
    if body.thinking is None:
        return effort
    kind = body.thinking.get("type")
    if kind == "disabled":
        return "none"
    if kind not in _THINKING:
        expected = ", ".join((*_THINKING, "disabled"))
        invalid(f"thinking.type must be one of {expected}, got {shown(kind)}", param="thinking")
    return effort or "medium"


def shows_thinking(body: ConversationBody) -> bool:
    """Return whether the answer has the text of the reasoning."""
    return body.thinking is None or body.thinking.get("display") != "omitted"


def thinking_budget(body: ConversationBody) -> int | None:
    """Return the limit on reasoning tokens of a body; None without one."""
    if body.thinking is None or body.thinking.get("type") != "enabled":
        return None
    return check_optional_int("thinking.budget_tokens", body.thinking.get("budget_tokens"), 1)


def check_context_edits(body: ConversationBody) -> None:
    """Warn of edits of the context that would remove something: all of the conversation is kept.

    They save tokens of Anthropic's servers; what a conversation has too much is a matter of its client's. ApiError 400
    for what are no edits.
    """
    edits = (body.context_management or {}).get("edits") or []
    if not isinstance(edits, list) or not all(isinstance(edit, dict) and "type" in edit for edit in edits):
        expected = "a list of objects, each with a type"
        invalid(f"context_management.edits must be {expected}, got {shown(edits)}", param="context_management")
    left_out = [shown(edit["type"]) for edit in edits if edit.get("keep") not in _KEEP_ALL]
    if left_out:
        names = ", ".join(left_out[:_MAX_NAMES_LOGGED])
        log.warning("%d edits of context_management are left out, all is kept: %s", len(left_out), names)


def block_text(block: object) -> str | None:
    """Return the text that a block is; None for a block of another kind: images, PDFs, files."""
    if not isinstance(block, dict) or (text := part_text(block)) is not None:
        return part_text(block)
    match block.get("type"):
        case "tool_reference":
            name = block.get("tool_name")
            return name if isinstance(name, str) else None
        case "compaction":
            return _text_of(block.get("content"))
        case "search_result":
            return _joined(block.get("title"), block.get("source"), _content_text(block.get("content")))
        case "document":
            source = block.get("source")
            field = _SOURCES.get(str(source.get("type"))) if isinstance(source, dict) else None
            text = _content_text(source.get(field)) if isinstance(source, dict) and field is not None else None
            return _joined(block.get("title"), block.get("context"), text)
    return None


def server_result_text(content: object) -> str:
    """Return the text of the result of a tool that a server ran: its texts, or its JSON without encrypted parts."""
    found = content.get("tool_references", content) if isinstance(content, dict) else content
    text = _content_text(found)
    return json.dumps(_readable(content), ensure_ascii=False) if text is None else text


def with_definitions(value: object, definitions: dict[str, str]) -> object:
    """Return blocks with the definition of a tool in place of the first reference to it, and remove that definition.

    `definitions` are texts by the names of tools. The tools themselves bound what is added.
    """
    if not definitions:
        return value
    if isinstance(value, list):
        return [with_definitions(item, definitions) for item in value]
    if not isinstance(value, dict):
        return value
    name = value.get("tool_name") if value.get("type") == "tool_reference" else None
    if isinstance(name, str) and name in definitions:
        return plain_part(definitions.pop(name))
    return {key: with_definitions(item, definitions) for key, item in value.items()}


def _readable(value: object) -> object:
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items() if not str(key).startswith("encrypted")}
    return value


def _content_text(content: object) -> str | None:
    """Return the text of a content that is one text, or blocks that are all text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return None
    texts = [block_text(block) for block in content]
    return None if None in texts else "\n".join(filter(None, texts))


def _joined(*lines_and_text: object) -> str | None:
    """Return lines of a heading, those that are given, and the text below; None without a text."""
    *heading, text = lines_and_text
    if not isinstance(text, str):
        return None
    return "\n".join([*(line for line in heading if isinstance(line, str) and line), text])


def _text_of(value: object) -> str | None:
    return "" if value is None else value if isinstance(value, str) else None
