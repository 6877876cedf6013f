"""Parts of contents: the types that are text or reasoning, under the names that several APIs have for them.

Bridges between APIs, and histories that were written by another one, keep the names of their own: OpenAI's chats have
`text` and `refusal`, its Responses `input_text` and `output_text`, Anthropic's Messages and Mistral's chats `thinking`.
A part may also be a text by itself.
"""

from collections.abc import Mapping

from quire.core.checks import shown

# The field with the text, by the type of a part.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING = {"thinking": "thinking", "reasoning": "text", "reasoning_text": "text", "summary_text": "text"}
_WITHOUT_TEXT = "redacted_thinking"     # reasoning that its server has encrypted

TEXT_TYPES = tuple(_TEXTS)
PART_FIELDS: Mapping[str, str] = _TEXTS | _REASONING


def plain_part(text: str) -> dict[str, str]:
    """Return the part that is a text, under the name that chat templates read."""
    return {"type": "text", "text": text}


def part_text(part: object) -> str | None:
    """Return the text of a part; None for a part of another type."""
    return part if isinstance(part, str) else _text(part, _TEXTS)


def part_reasoning(part: object) -> str | None:
    """Return the reasoning of a part, empty for an encrypted one; None for a part of another type.

    Mistral's thinking is a list of parts of text.
    """
    if isinstance(part, dict) and part.get("type") == _WITHOUT_TEXT:
        return ""
    nested = part.get("thinking") if isinstance(part, dict) and part.get("type") == "thinking" else None
    if isinstance(nested, list | tuple):
        texts = [part_text(each) for each in nested]
        return None if None in texts else "\n".join(text or "" for text in texts)
    return _text(part, _REASONING)


def part_type(part: object) -> object:
    """Return the type of a part, for errors."""
    return part.get("type") if isinstance(part, dict) else type(part).__name__


def part_problem(where: str, part: object) -> str:
    """Return the error of a part that is no text: a field that is no string, or the type."""
    kind = part_type(part)
    field = _TEXTS.get(kind) if isinstance(kind, str) else None
    if isinstance(part, dict) and field is not None:
        return f"{where}.{field} must be a string, got {shown(part.get(field))}"
    return f"{where} must be a text or a part of text ({', '.join(TEXT_TYPES)}), got the type {shown(kind)}"


def _text(part: object, fields: Mapping[str, str]) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    field = fields.get(kind) if isinstance(kind, str) else None
    text = part.get(field) if isinstance(part, dict) and field is not None else None
    return text if isinstance(text, str) else None
