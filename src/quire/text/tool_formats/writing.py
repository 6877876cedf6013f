"""Calls as the text in which the models of a format write them, for conversations that go on after a call.

The text is what the grammars of `quire.server.tools` allow and what its parsers read.
"""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from quire.text.fitted_messages import WriteCalls
from quire.text.tool_formats.table import find_format
from quire.text.tool_formats.tool_format import TYPE_NAMES, ToolFormat, split

Call = tuple[str, Any]

_PYTHON_NAMES = {True: "True", False: "False", None: "None"}


def call_writer(name: str) -> WriteCalls:
    """Return what writes calls in the format of this name. ValueError for a name that is unknown."""
    row = find_format(name)
    assert row is not None, "a name of a format, not `none`"
    return partial(written_calls, row)


def recognized_writer(chat_templates: Iterable[str]) -> WriteCalls | None:
    """Return what writes calls in the format of the models with such templates; None if none is recognized."""
    row = find_format("auto", "\n".join(chat_templates))
    return None if row is None else partial(written_calls, row)


def written_calls(row: ToolFormat, calls: Sequence[Call]) -> str:
    """Return calls, names and arguments, as a model writes them; arguments that are no object are JSON values."""
    first, field, *_ = template = split(row.call)
    if field in ("calls", "list"):
        write = _python_call if field == "list" else partial(_json_call, row)
        texts = [write(name, arguments, index) for index, (name, arguments) in enumerate(calls)]
        text = f"{first}[{row.separator.join(texts)}]{template[-1]}"
    else:
        texts = [_one_call(row, name, arguments, index) for index, (name, arguments) in enumerate(calls)]
        text = row.separator.join(texts)
    return f"{row.section[0]}{text}{row.section[1]}".strip()


def _one_call(row: ToolFormat, name: str, arguments: Any, index: int) -> str:  # noqa: ANN401 (JSON)
    """Return the text of a call that stands by itself."""
    before, *rest = split(row.call)
    written = [before]
    for field, text in zip(rest[::2], rest[1::2], strict=True):
        written += [_field(row, field, name, arguments, index), text]
    return "".join(written)


def _field(row: ToolFormat, field: str, name: str, arguments: Any, index: int) -> str:  # noqa: ANN401
    if field == "name":
        return html.escape(name) if row.is_escaped else name
    if field == "call":
        return _json_call(row, name, arguments, index)
    if field == "arguments" and row.notation == "gemma":
        return _gemma_value(arguments, row.quote)
    if field == "parameters" and isinstance(arguments, Mapping):
        return "".join(_parameter(row, key, value) for key, value in arguments.items())
    if field in ("arguments", "parameters"):
        return _json(arguments)
    return {"index": str(index + 1), ":index": f":{index}"}.get(field, field.removeprefix("?"))


def _json_call(row: ToolFormat, name: str, arguments: Any, index: int) -> str:  # noqa: ANN401
    if row.has_name_as_key:
        return _json({name: arguments})
    numbered = {row.index_key: str(index)} if row.index_key else {}
    name_key, arguments_key = row.keys
    return _json(numbered | {name_key: name, arguments_key: arguments})


def _parameter(row: ToolFormat, key: str, value: Any) -> str:  # noqa: ANN401
    is_text = isinstance(value, str)
    fields = {
        "key": html.escape(key) if row.is_escaped else key,
        "type": ("false", "true")[is_text] if 'string="' in row.parameter else _type_name(value),
        "value": value if is_text else _json(value),
    }
    return "".join(fields[piece] if place % 2 else piece for place, piece in enumerate(split(row.parameter)))


def _type_name(value: object) -> str:
    name = TYPE_NAMES[type(value)]
    return "number" if name == "integer" else name


def _python_call(name: str, arguments: Any, _index: int) -> str:  # noqa: ANN401
    if not isinstance(arguments, Mapping):
        return f"{name}({_json(arguments)})"
    return f"{name}({', '.join(f'{key}={_python_value(value)}' for key, value in arguments.items())})"


def _python_value(value: Any) -> str:  # noqa: ANN401
    """Return a JSON value as a literal of Python."""
    if value is None or isinstance(value, bool):
        return _PYTHON_NAMES[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_python_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_json(key)}: {_python_value(each)}' for key, each in value.items())}}}"
    return _json(value)


def _gemma_value(value: Any, quote: str) -> str:  # noqa: ANN401
    """Return a JSON value in Gemma's notation: keys without quotes, texts in quotes of its own."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(_gemma_value(each, quote) for each in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_gemma_value(each, quote)}' for key, each in value.items())}}}"
    return _json(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
