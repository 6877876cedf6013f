"""Calls and reasoning as the models of a format write them, one recording each."""

import json

import pytest

from quire.server.tools.call_reader import Content, Reasoning
from quire.text.tool_formats.table import REASONING_FORMATS, TOOL_FORMATS, UNSUPPORTED, find_format
from quire.text.tool_formats.tool_format import ReasoningFormat
from support.outputs import ended_calls, parse, texts

# Two calls, f(a="x y", b=[1]) and g(), with text before them where the format allows text.
RECORDINGS = {
    "apertus": '<|tools_prefix|>[{"f": {"a": "x y", "b": [1]}}, {"g": {}}]<|tools_suffix|>',
    "cohere_command3": (
        '<|START_RESPONSE|>Hm.<|END_RESPONSE|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "'
        'parameters": {"a": "x y", "b": [1]}},\n    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n'
        "]<|END_ACTION|>"
    ),
    "cohere_command4": (
        '<|START_TEXT|>Hm.<|END_TEXT|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": '
        '{"a": "x y", "b": [1]}}, {"tool_call_id": "1", "tool_name": "g", "parameters": {}}]<|END_ACTION|>'
    ),
    "dots": (
        'Hm.<dots_function_call><invoke name="f"><parameter name="a">x y</parameter><parameter name="b">[1]</'
        'parameter></invoke><invoke name="g"></invoke></dots_function_call>'
    ),
    "functiongemma": (
        "Hm.<start_function_call>call:f{a:<escape>x y<escape>,b:[1]}<end_function_call><start_function_call>c"
        "all:g{}<end_function_call>"
    ),
    "gigachat3": (
        'Hm.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"a": "x y", "b": [1]}}<|fu'
        'nction_call|>{"name": "g", "arguments": {}}'
    ),
    "hy_v3": (
        "Hm.<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>x y</arg_value>\n<arg_key>b</a"
        "rg_key>\n<arg_value>[1]</arg_value>\n</tool_call>\n<tool_call>g<tool_sep></tool_call></tool_calls>"
    ),
    "hy_v4": (
        "Hm.<tool_calls><tool_call>f<arg_key>a</arg_key><arg_value>x y</arg_value><arg_key>b</arg_key><arg_va"
        "lue>[1]</arg_value></tool_call><tool_call>g</tool_call></tool_calls>"
    ),
    "longcat": (
        'Hm.<longcat_tool_call>{"name": "f", "arguments": {"a": "x y", "b": [1]}}</longcat_tool_call>\n<longca'
        't_tool_call>{"name": "g", "arguments": {}}</longcat_tool_call>'
    ),
    "step3": (
        'Hm.<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f"><steptml:para'
        'meter name="a">x y</steptml:parameter><steptml:parameter name="b">[1]</steptml:parameter></steptml:i'
        'nvoke><｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜><steptml:invoke name="g"></steptml:invoke><｜to'
        "ol_call_end｜><｜tool_calls_end｜>"
    ),
    "xlam": '[{"name": "f", "arguments": {"a": "x y", "b": [1]}}, {"name": "g", "arguments": {}}]',
    "plamo3": "Hm.<|plamo:begin_tool_requests:plamo|>"
    + "".join(
        f"<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
        f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{arguments}"
        "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
        for name, arguments in (("f", '{"a": "x y", "b": [1]}'), ("g", "{}"))
    )
    + "<|plamo:end_tool_requests:plamo|>",
}
F_AND_G = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "g"}},
]


@pytest.mark.parametrize("name", RECORDINGS)
def test_recorded_calls_are_read_in_any_pieces(name: str) -> None:
    output = RECORDINGS[name]
    events = parse(name, [output], tools=F_AND_G)
    calls = [(function, json.loads(arguments)) for function, arguments in ended_calls(events)]
    assert calls == [("f", {"a": "x y", "b": [1]}), ("g", {})]
    assert texts(events, Content) == ("Hm." if "Hm." in output else "")
    assert parse(name, output, tools=F_AND_G) == events


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("minimax_m3", "<mm:think>Why?</mm:think>So."),
        ("plamo3", "<|plamo:begin_think:plamo|>Why?<|plamo:end_think:plamo|>So."),
        ("cohere_command4", "<|START_THINKING|>Why?<|END_THINKING|>So."),
        ("hunyuan_a13b", "<think>\nWhy?\n</think>\n<answer>\nSo.\n</answer>"),
        ("granite", "Here is my thought process: Why? Here is my response: So."),
        ("granite", "Here's my thought process:\nWhy?\n\nHere's my response:\nSo."),
    ],
)
def test_recorded_reasoning_is_read_in_any_pieces(name: str, output: str) -> None:
    events = parse("none", [output], name)
    assert texts(events, Reasoning).strip() == "Why?"
    assert texts(events, Content) == "So."
    assert parse("none", output, name) == events


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("gemma4", "<|tool_call>:f{b:2.5}<tool_call|>"),
        ("xlam", 'Hm.[TOOL_CALLS][{"name": "f", "arguments": {"b": 2.5}}]'),
        ("glm47", "<tool_call>f<arg_key>b</arg_key><arg_value>2.5</arg_value></tool_call>"),
    ],
)
def test_variants_of_calls_and_of_types_are_read(name: str, output: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"b": {"type": "float"}}}}}
    ((function, arguments),) = ended_calls(parse(name, [output], tools=[tool]))
    assert (function, json.loads(arguments)) == ("f", {"b": 2.5})


def test_unsupported_name_has_the_reason() -> None:
    with pytest.raises(ValueError, match="tool-call-parser 'minimax_m3' is not supported: arguments as nested XML"):
        find_format("minimax_m3")
    for name in UNSUPPORTED:
        rows = [row for row in (*TOOL_FORMATS, *REASONING_FORMATS) if name in (row.name, *row.aliases)]
        assert all(isinstance(row, ReasoningFormat) for row in rows)
