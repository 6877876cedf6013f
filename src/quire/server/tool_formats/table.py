"""Tables of the formats of tool calls and of reasoning. Parser, grammars and documentation are made from the rows."""

from collections.abc import Sequence
from typing import TypeVar

from quire.server.tool_formats.rows import ReasoningFormat, ToolFormat

TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        "hermes",
        "Qwen 2.5 and 3, Hermes 2 and 3, and others with tool calls of ChatML",
        call="\n<tool_call>\n{call}\n</tool_call>",
        aliases=("qwen3", "qwen25"),
        fingerprints=(("<tool_call>", "</tool_call>"),),
        model_types=("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    ),
)

REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(
        "qwen3",
        "Qwen 3, and others that write `<think>` themselves",
        markers=(("<think>", "</think>"),),
        fingerprints=(("<think>", "</think>"),),
        model_types=("qwen3", "qwen3_moe"),
    ),
)
FALLBACK = TOOL_FORMATS[0]  # for calls that are forced where a template has no known format


Row = TypeVar("Row", bound=ToolFormat | ReasoningFormat)


def find_format(name: str, chat_template: str | None = None, model_type: str | None = None) -> ToolFormat | None:
    """Return the format of this name, or for "auto" the first one with a fingerprint of the template or the model type.

    Return None for "none", and for "auto" if none fits. Raise ValueError, with the names that exist, for other names.
    """
    return _find(TOOL_FORMATS, "tool-call-parser", name, chat_template, model_type)


def find_reasoning(
    name: str, chat_template: str | None = None, model_type: str | None = None
) -> ReasoningFormat | None:
    """Return the reasoning format of this name, or for "auto" the one that fits, as `find_format` does."""
    return _find(REASONING_FORMATS, "reasoning-parser", name, chat_template, model_type)


def _find(rows: Sequence[Row], option: str, name: str, chat_template: str | None, model_type: str | None) -> Row | None:
    if name == "none":
        return None
    if name != "auto":
        for row in rows:
            if name in (row.name, *row.aliases):
                return row
        names = ", ".join(sorted({known for row in rows for known in (row.name, *row.aliases)}))
        raise ValueError(f"{option} {name!r} is unknown; choose auto, none, {names}")
    if not chat_template:
        return next((row for row in rows if model_type in row.model_types), None)
    for row in rows:
        if any(all(text in chat_template for text in texts) for texts in row.fingerprints):
            return row
    return None
