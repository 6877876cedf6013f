"""Blocks of the Messages API that are text to a model that reads text alone, and those that say nothing to it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.conversation import part_text, plain_part

Json = Mapping[str, Any]

CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")     # the last two: that a server ran
RESULT = "tool_result"                                      # a client's result; types of servers' results end with it
# Marks of Anthropic's servers in turns that they wrote.
SILENT = ("fallback", "mcp_tool_listing")
_SOURCES = {"text": "data", "content": "content"}           # kinds of text documents, and the field of the text


def block_text(block: object) -> str | None:
    """Return the text that a block is; None for a block of another kind: images, PDFs, files."""
    if not isinstance(block, dict) or (text := part_text(block)) is not None:
        return part_text(block)
    match block.get("type"):
        case "tool_reference":
            name = block.get("tool_name")
            return name if isinstance(name, str) else None
        case "compaction":
            return _string(block.get("content"))
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


def _string(value: object) -> str | None:
    return "" if value is None else value if isinstance(value, str) else None
