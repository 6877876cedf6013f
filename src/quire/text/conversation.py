"""Messages of a conversation in OpenAI's form, checked, and one form of each content.

A content is a text, a list of text parts, or, beside calls, missing. A tool's message has its function's name, and
reasoning is found under each of the names that templates read. OpenAI's older `function_call`, and messages of the role
`function`, are calls of tools and their results. `quire.text.fitted_messages` turns such messages into those of one
chat template.

Parts of contents have types that are text or reasoning, under the names that several APIs have for them: OpenAI's chats
have `text` and `refusal`, its Responses `input_text` and `output_text`, Anthropic's Messages and Mistral's chats
`thinking`. Bridges between APIs keep the names of their own. A part may also be a text by itself.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from quire.core.checks import shown
from quire.core.errors import InvalidRequestError
from quire.core.structured_outputs import check_json_bytes
from quire.text.image_marks import ImageMarks
from quire.text.tools import ToolLimits

# The field with the text, by the type of a part.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING = {"thinking": "thinking", "reasoning": "text", "reasoning_text": "text", "summary_text": "text"}
_OTHER_MEDIA = (
    "image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file", "input_file", "document",
)  # fmt: skip
_WITHOUT_TEXT = "redacted_thinking"     # reasoning that its server has encrypted

IMAGE_TYPES = ("image_url", "input_image")    # a chat's and that of Responses; both have an `image_url`
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


def is_image(part: object) -> bool:
    """Return whether a part is an image of a client's."""
    return isinstance(part, dict) and part.get("type") in IMAGE_TYPES and part.get("image_url") is not None


def part_type(part: object) -> object:
    """Return the type of a part, for errors."""
    return part.get("type") if isinstance(part, dict) else type(part).__name__


def part_problem(where: str, part: object) -> str:
    """Return the error of a part that is no text: a field that is no string, or the type."""
    kind = part_type(part)
    field = _TEXTS.get(kind) if isinstance(kind, str) else None
    if isinstance(part, dict) and field is not None:
        return f"{where}.{field} must be a string, got {shown(part.get(field))}"
    if kind in _OTHER_MEDIA:
        return f"{where}: images, audio and files are not served, only text; got the type {shown(kind)}"
    return f"{where} must be a text or a part of text ({', '.join(TEXT_TYPES)}), got the type {shown(kind)}"


def _text(part: object, fields: Mapping[str, str]) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    field = fields.get(kind) if isinstance(kind, str) else None
    text = part.get(field) if isinstance(part, dict) and field is not None else None
    return text if isinstance(text, str) else None


_REASONING_NAMES = ("reasoning", "reasoning_content", "thinking")  # vLLM's, DeepSeek's and Qwen's, gpt-oss's

_SPEAKERS = ("user", "system", "developer")  # their contents are never null or []; an assistant may have calls alone
_LISTENED_TO = (*_SPEAKERS, "tool")  # messages of these roles have no reasoning

Message = Mapping[str, Any]


def checked_conversation(
    messages: object, limits: ToolLimits, marks: ImageMarks | None = None
) -> list[dict[str, Any]]:
    """Return copies of the messages, checked. InvalidRequestError names an invalid one.

    `marks`: of the parts that are images; None for a model that reads text alone.
    """
    if not isinstance(messages, list | tuple) or not messages:
        refuse("messages must be a list of at least one message")
    calls = _Calls(limits)
    return [_checked(f"messages[{index}]", message, calls, marks) for index, message in enumerate(messages)]


def paired(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each result right behind its call, as models were trained on them.

    Messages between a call and its results follow the results.
    """
    turns: list[list[dict[str, Any]]] = []                 # messages, each with the results of its calls
    callers: dict[object, list[dict[str, Any]]] = {}       # keyed by the ids of calls
    for message in messages:
        id_ = _hashable(message.get("tool_call_id"))
        if message["role"] == "tool" and id_ is not None and id_ in callers:
            callers[id_].append(message)
            continue
        turns.append([message])
        callers |= {_hashable(call.get("id")): turns[-1] for call in message.get("tool_calls", ())}
    return [message for turn in turns for message in turn]


def refuse(message: str, cause: BaseException | None = None) -> NoReturn:
    """Raise InvalidRequestError for the field `messages`."""
    raise InvalidRequestError(message, param="messages") from cause


class _Calls:
    """Calls of a conversation so far, for the messages of their results."""

    def __init__(self, limits: ToolLimits) -> None:
        self._limits = limits
        self._names: dict[object, str] = {}        # keyed by the ids of calls
        self._older_ids: dict[object, str] = {}    # keyed by names: the last `function_call` of each function
        self._num_older = 0

    def checked(self, where: str, calls: object) -> list[dict[str, Any]]:
        """Return the value of `tool_calls`, checked."""
        if not isinstance(calls, list | tuple):
            refuse(f"{where} must be a list, got {type(calls).__name__}")
        return [self._call(f"{where}[{index}]", call) for index, call in enumerate(calls)]

    def _call(self, where: str, call: object) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict):
            refuse(f"{where} must be an object with a function that is an object")
        function = self._function(f"{where}.function", function)
        self._names[_hashable(call.get("id"))] = function["name"]
        return {"type": "function"} | call | {"function": function}

    def older(self, where: str, function: object) -> list[dict[str, Any]]:
        """Return the value of `function_call`, checked, as calls. Ids are numbers: prompts keep their prefixes."""
        if not isinstance(function, dict):
            refuse(f"{where} must be an object, got {type(function).__name__}")
        function, id_ = self._function(where, function), f"function_call_{self._num_older}"
        self._num_older += 1
        self._older_ids[function["name"]] = id_
        return [{"type": "function", "id": id_, "function": function}]

    def _function(self, where: str, function: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(function.get("name"), str):
            refuse(f"{where} must have a name that is a string")
        place, arguments, limit = f"{where}.arguments", function.get("arguments"), self._limits.max_argument_bytes
        check_json_bytes(place, arguments, limit, "max_argument_bytes", "messages")
        return function | {"arguments": arguments}

    def with_call(self, where: str, result: dict[str, Any]) -> dict[str, Any]:
        """Return the message of a result with the id of its call, and the name of its function."""
        if result["role"] == "function":
            if not isinstance(result.get("name"), str):
                refuse(f"{where} must have a name that is a string")
            id_ = self._older_ids.get(result["name"])
            return result | {"role": "tool"} | ({} if id_ is None else {"tool_call_id": id_})
        name = self._names.get(_hashable(result.get("tool_call_id")))
        return result if name is None else result | {"name": result.get("name", name)}


def _checked(where: str, message: object, calls: _Calls, marks: ImageMarks | None) -> dict[str, Any]:
    if not isinstance(message, dict):
        refuse(f"{where} must be an object, got {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        refuse(f"{where} must have a role that is a string")
    checked = {name: value for name, value in message.items() if value is not None}  # clients send null for nothing
    given, older = checked.pop("tool_calls", None), checked.pop("function_call", None)
    if given and older is not None:
        refuse(f"{where} must have tool_calls or function_call, not both")
    if given:
        checked["tool_calls"] = calls.checked(f"{where}.tool_calls", given)
    elif older is not None:
        checked["tool_calls"] = calls.older(f"{where}.function_call", older)
    elif checked["role"] in _SPEAKERS and message.get("content", "") in (None, []):
        given = "null" if message["content"] is None else "[]"
        refuse(f"{where}.content must be a string or a list of at least one part, got {given}")
    if checked["role"] in ("tool", "function"):
        checked = calls.with_call(where, checked)
    content = message.get("content")
    if checked["role"] not in _LISTENED_TO:
        content, thought = split_reasoning(content)
        if thought and not any(isinstance(checked.get(name), str) for name in _REASONING_NAMES):
            checked[_REASONING_NAMES[0]] = thought
    if content is not None or "tool_calls" not in checked:
        checked["content"] = _content(where, content, marks)
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


def _content(where: str, content: object, marks: ImageMarks | None = None) -> str | list[dict[str, Any]]:
    """Return the content of a message: a text, or parts, images as they are and texts with nothing else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        refuse(f"{where}.content must be a string, a list of parts or null, got {type(content).__name__}")
    parts = []
    for index, part in enumerate(content):
        if marks is not None and marks.is_part(part):
            parts.append(part)
            continue
        text = part_text(part)
        if text is None:
            refuse(part_problem(f"{where}.content[{index}]", part))
        parts.append(plain_part(text))
    return parts


def split_reasoning(content: object) -> tuple[object, str]:
    """Return a content without its parts of reasoning, and their text."""
    if not isinstance(content, list | tuple):
        return content, ""
    thoughts = [part_reasoning(part) for part in content]
    rest = [part for part, thought in zip(content, thoughts, strict=True) if thought is None]
    return rest, "\n".join(filter(None, thoughts))


def _hashable(value: object) -> object:
    return value if isinstance(value, str) else None
