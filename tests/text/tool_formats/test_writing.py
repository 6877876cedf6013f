"""Calls that are written in a format are read as the same calls."""

import json
from typing import Any

import pytest

from quire.text.tool_formats.table import TOOL_FORMATS
from quire.text.tool_formats.tool_format import ToolFormat
from quire.text.tool_formats.writing import call_writer, written_calls
from support.outputs import ended_calls, parse

ARGUMENTS: dict[str, Any] = {
    "city": 'Ulm <b>"a" \\ \'b\'</b>', "days": 3, "ratio": -0.5, "exact": True, "unit": None,
    "names": ["a", "b c"], "more": {"deep": {"x": [1, {"y": "é"}]}},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "ratio": {"type": "number"},
        "exact": {"type": "boolean"}, "unit": {"type": "null"}, "names": {"type": "array"}, "more": {"type": "object"},
    }}}}
    for name in ("get_weather", "now")
]  # fmt: skip


@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.name)
@pytest.mark.parametrize("num_calls", [1, 2])
def test_written_calls_are_read(row: ToolFormat, num_calls: int) -> None:
    calls: list[tuple[str, Any]] = [("get_weather", ARGUMENTS), ("now", {})][:num_calls]
    text = written_calls(row, calls)
    read = ended_calls(parse(row.name, [text], tools=TOOLS))
    assert [(name, json.loads(arguments)) for name, arguments in read] == calls, text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"city": "Ulm"}}\n</tool_call>'),
        ("lfm2", '<|tool_call_start|>[f(city="Ulm")]<|tool_call_end|>'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=city>\nUlm\n</parameter>\n</function>\n</tool_call>"),
        ("mistral_v3", '[TOOL_CALLS] [{"name": "f", "arguments": {"city": "Ulm"}}]'),
        ("llama3_json", '{"name": "f", "parameters": {"city": "Ulm"}}'),
        ("gemma4", '<|tool_call>call:f{city:<|"|>Ulm<|"|>}<tool_call|>'),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
         '{"city": "Ulm"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
        ("apertus", '<|tools_prefix|>[{"f": {"city": "Ulm"}}]<|tools_suffix|>'),
    ],
)  # fmt: skip
def test_calls_have_the_form_of_the_model(name: str, text: str) -> None:
    assert call_writer(name)([("f", {"city": "Ulm"})]) == text


@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.name)
def test_arguments_that_are_no_object_do_not_fail(row: ToolFormat) -> None:
    for arguments in ('{"city": "U', [1], 5):
        assert "f" in written_calls(row, [("f", arguments)])
