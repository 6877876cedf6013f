"""The incremental parser: events of outputs in any pieces."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.tools.call_reader import MAX_KEPT, Arguments, CallBegan, CallEnded, Content, Reasoning
from quire.server.tools.output_parser import OutputParser
from quire.text.tool_formats.table import TOOL_FORMATS, find_format, find_reasoning
from quire.text.tool_formats.tool_format import ToolFormat
from support.outputs import parse, texts

HERMES_OUTPUT = (
    "<think>\nTwo calls.\n</think>\n\nLet me see: a < b.\n<tool_call>\n"
    '{"name": "echo", "arguments": {"text": "</tool_call> \\" }"}}\n</tool_call>\n<tool_call>'
    '{"arguments": {}, "name": "now"}</tool_call> Done. <tool_call> is a tag, </tool_call> too.'
)


def test_hermes_output_becomes_events() -> None:
    assert parse("hermes", [HERMES_OUTPUT], "qwen3") == [
        Reasoning("Two calls."),
        Content("Let me see: a < b."),
        CallBegan(0, "echo"),
        Arguments(0, '{"text": "</tool_call> \\" }"}'),
        CallEnded(0),
        CallBegan(1, "now"),
        Arguments(1, "{}"),
        CallEnded(1),
        Content(" Done. <tool_call> is a tag, </tool_call> too."),
    ]


@settings(max_examples=50)
@given(st.lists(st.integers(0, len(HERMES_OUTPUT)), max_size=20))
def test_pieces_do_not_change_events(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(HERMES_OUTPUT)]
    pieces = [HERMES_OUTPUT[start:stop] for start, stop in itertools.pairwise(places)]
    assert parse("hermes", pieces, "qwen3") == parse("hermes", [HERMES_OUTPUT], "qwen3")


def test_text_is_held_back_only_while_it_may_become_a_marker() -> None:
    parser = OutputParser(find_format("hermes"))
    assert parser.feed("a <tool_") == [Content("a")]
    assert parser.feed("box>") == [Content(" <tool_box>")]
    assert parser.feed("<tool_call>{") == []
    assert parser.feed('"name": "f"') == [CallBegan(0, "f")]
    assert parser.feed(', "arguments": {"a": 1') == [Arguments(0, '{"a": 1')]


def test_cut_output_has_no_end_of_its_call() -> None:
    cut = parse("hermes", ['<tool_call>{"name": "f", "arguments": {"a": "b'])
    assert cut == [CallBegan(0, "f"), Arguments(0, '{"a": "b')]
    assert parse("hermes", ["Yes.\n<tool_call>\n"]) == [Content("Yes.")]


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"tool-call-parser 'hermse' is unknown; choose auto, none, .*hermes"):
        find_format("hermse")


TOOLS = [
    {"type": "function", "function": {"name": "echo", "parameters": {"properties": {"text": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "now"}},
]


def fragments(row: ToolFormat) -> st.SearchStrategy[str]:
    """Return texts made of what outputs of a format are made of, in any order."""
    templates = (row.call, row.parameter, *row.variants, *row.section, *row.drops)
    literals = {piece for template in templates for piece in re.split(r"\{[^}]*\}|(?<=>)(?=<)|\s+", template) if piece}
    names = ["echo", "now", "text", "name", "arguments", "to=functions.echo", "<|end|>", "<think>", "</think>"]
    symbols = [*'"{}[]()<>|:,=\\ \n', "'", '": "', '{"', "1", "true", "None", "é", "</", "<|"]
    pieces = st.sampled_from([*sorted(literals), *names, *symbols])
    return st.lists(pieces | st.sampled_from(sorted(literals)), max_size=40).map("".join)


@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.name)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_output_in_any_pieces_gives_the_same_events(row: ToolFormat, data: st.DataObject) -> None:
    output = data.draw(fragments(row))
    reasoning = data.draw(st.sampled_from(["none", "qwen3", "mistral"]))
    in_reasoning = data.draw(st.booleans())
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=12))), len(output)]
    pieces = [output[start:stop] for start, stop in itertools.pairwise(cuts)]
    whole = parse(row.name, [output], reasoning, in_reasoning, TOOLS)
    assert parse(row.name, pieces, reasoning, in_reasoning, TOOLS) == whole
    assert parse(row.name, output, reasoning, in_reasoning, TOOLS) == whole


@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.name)
def test_plain_text_is_content(row: ToolFormat) -> None:
    text = 'A list [1, 2], an object {"a": 1}, tags <b>x</b> <| and\n\nsome more. '
    assert texts(parse(row.name, text, tools=TOOLS), Content) == text


@pytest.mark.parametrize(
    ("name", "prompt", "starts"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", "<|im_start|>user\nWrite <think> here<|im_end|>\n<|im_start|>assistant\n", False),
        ("deepseek_r1", "<｜Assistant｜>", True),
        ("deepseek_r1", "<｜Assistant｜><think>\n", True),
        ("deepseek_r1", "<｜Assistant｜></think>", False),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("kimi_k3", '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>', True),
        ("openai_gptoss", "<|start|>assistant", False),
    ],
)
def test_end_of_the_prompt_says_if_the_output_starts_in_reasoning(name: str, prompt: str, starts: bool) -> None:
    row = find_reasoning(name)
    assert row is not None
    assert row.starts(prompt) is starts


def test_start_marker_is_no_reasoning_where_reasoning_is_open_already() -> None:
    for pieces in (["<think>\nHm.</think>Yes."], "<think>\nHm.</think>Yes."):
        assert parse("hermes", pieces, "deepseek_r1", in_reasoning=True) == [Reasoning("Hm."), Content("Yes.")]


HOSTILE = ["<", " ", "\n", "<tool_call>", '<tool_call>{"a": [', '<tool_call>{"id": "x", ', "</", '{"', "[", "\\"]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3_json", "pythonic", "gpt_oss"])
def test_little_is_held_back_of_any_output(name: str) -> None:
    """So the work for a token is bounded, and that for an output is proportional to its length."""
    for unit in HOSTILE:
        parser = OutputParser(find_format(name), TOOLS)
        most = 0
        for _ in range(80_000 // 400):
            parser.feed(unit * (400 // len(unit)))
            most = max(most, parser.num_held)
        assert most <= MAX_KEPT + 1_000, unit


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"text": "a\nb\tc\\\nd"}', '{"text": "a\\nb\\tc\\nd"}'),  # control characters, one behind a backslash
        ('"{\\"text\\": \\"a\\"}"', '{"text": "a"}'),  # JSON in a string
        ("null", "{}"),
        ("{ }", "{ }"),
    ],
)
def test_arguments_become_a_json_object(arguments: str, expected: str) -> None:
    for output in (f'{{"name": "echo", "arguments": {arguments}}}', f'{{"arguments": {arguments}, "name": "echo"}}'):
        for pieces in ([f"<tool_call>{output}</tool_call>"], f"<tool_call>{output}</tool_call>"):
            assert parse("hermes", pieces) == [CallBegan(0, "echo"), Arguments(0, expected), CallEnded(0)]


def test_call_without_arguments_has_an_empty_object() -> None:
    assert parse("hermes", ['<tool_call>{"name": "now"}</tool_call>'])[1:] == [Arguments(0, "{}"), CallEnded(0)]
    assert parse("glm47", ["<tool_call>now</tool_call>"])[1:] == [Arguments(0, "{}"), CallEnded(0)]


def test_call_with_invalid_json_does_not_end_and_the_next_one_is_read() -> None:
    good = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    events = parse("hermes", ['<tool_call>{"name": "echo", "arguments": {"text": `a`}}</tool_call>', good, "Done."])
    assert events[0] == CallBegan(0, "echo")
    assert CallEnded(0) not in events
    assert events[-4:] == [CallBegan(1, "now"), Arguments(1, "{}"), CallEnded(1), Content("Done.")]


def test_parameters_have_the_types_of_the_schema() -> None:
    text, nothing = {"type": "string"}, {"type": "null"}
    properties = {"s": text, "i": {"type": "integer"}, "n": {"anyOf": [nothing, text]}, "r": {"$ref": "#/$defs/r"}}
    parameters = {"properties": properties, "$defs": {"r": {"type": "array"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    values = {"s": "1", "i": "2", "n": "null", "r": "[3]", "other": "4"}
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    events = parse("qwen3_coder", f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>", tools=tools)
    assert events[1] == Arguments(0, '{"s": "1", "i": 2, "n": null, "r": [3], "other": 4}')
    events = parse("qwen3_coder", [f"<function=f>{written.replace('2', 'two')}{written}</function>"], tools=tools)
    first_of_each_key = '{"s": "1", "i": "two", "n": null, "r": [3], "other": 4}'
    assert events[1] == Arguments(0, first_of_each_key)


def test_calls_in_reasoning_are_calls_unless_the_format_forbids_it() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    events = [CallBegan(0, "now"), Arguments(0, "{}"), CallEnded(0)]
    assert parse("hermes", [f"Hm. {call} So"], "qwen3", True) == [Reasoning("Hm."), *events, Reasoning(" So")]
    assert parse("hermes", [f"Hm. {call} So"], "mistral", True) == [Reasoning(f"Hm. {call} So")]


def test_reasoning_marker_inside_of_content_is_content() -> None:
    assert parse("hermes", ["Write <think> and </think>."], "qwen3") == [Content("Write <think> and </think>.")]


def test_bare_calls_are_calls_of_known_tools_alone() -> None:
    known, unknown = '{"name": "now", "parameters": {}}', '{"name": "Paris", "parameters": {}}'
    assert parse("llama3_json", [known], tools=TOOLS)[0] == CallBegan(0, "now")
    assert parse("llama3_json", [unknown], tools=TOOLS) == [Content(unknown)]
    assert parse("pythonic", ["[Paris()]"], tools=TOOLS) == [Content("[Paris()]")]
    assert parse("llama3_json", [f"So: {known}"], tools=TOOLS) == [Content(f"So: {known}")]
