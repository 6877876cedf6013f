"""Grammars that force calls: what they allow, the parser of the same row reads as calls with valid arguments."""

import json
import re
from typing import Any

import jsonschema
import pytest

from quire.server.tools.call_grammar import forcing_grammar
from quire.server.tools.call_reader import Arguments, CallBegan, CallEnded, Content
from quire.text.tool_formats.table import REASONING_FORMATS, TOOL_FORMATS, find_format
from quire.text.tool_formats.tool_format import ToolFormat
from support.fuzz_seeds import fuzz
from support.grammar_walks import GrammarWalk
from support.outputs import ended_calls, parse, texts

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "unit": {"enum": ["c", "f"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
            "place": {"$ref": "#/$defs/place"},
            "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
        },
        "required": ["city", "place"],
        "additionalProperties": False,
        "$defs": {
            "place": {
                "type": "object",
                "properties": {
                    "lat": {"type": "integer", "minimum": 0, "maximum": 9},
                    "name": {"type": ["string", "null"], "maxLength": 4},
                },
                "required": ["lat"],
                "additionalProperties": False,
            }
        },
    },
    "now": {"type": "object", "maxProperties": 0},
    "echo": {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 8}, "how": {"enum": ["x", "y</b>"]}},
        "required": ["text"],
        "additionalProperties": False,
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": schema if name != "now" else None}}
    for name, schema in SCHEMAS.items()
]
TEXT = "Hello, a < b [1] {x}: "


def markers(row: ToolFormat) -> list[str]:
    """Return the parts of a format that real tokenizers have as special tokens."""
    pattern = r"<\|?[\w:]+\|?>|\[[A-Z_]{2,}\]|<｜[^｜]*｜>|｜DSML｜"
    found = {token for text in row.marker_texts for token in re.findall(pattern, text)}
    return sorted(found | {row.quote} if row.notation == "gemma" else found)


def fault(row: ToolFormat, output: str, is_parallel: bool) -> str:
    """Return what is wrong with the calls of a forced output; empty: nothing."""
    events = parse(row.name, [output], tools=TOOLS)
    calls = ended_calls(events)
    if len(calls) != sum(isinstance(event, CallBegan) for event in events):
        return "a call has no end"
    if not calls or (len(calls) > 1 and not is_parallel):
        return f"{len(calls)} calls"
    for name, arguments in calls:
        if not jsonschema.Draft202012Validator(SCHEMAS[name]).is_valid(json.loads(arguments)):
            return f"arguments {arguments}"
    return ""


def walk(row: ToolFormat, seed: int, is_special: bool) -> list[str]:
    """Draw outputs from the grammars of a row, and parse them; return their faults. Those that do not end have none."""
    walks = GrammarWalk(markers(row) if is_special else ())
    is_parallel = bool(seed % 2)
    faults = []
    grammar = forcing_grammar(row, TOOLS, is_parallel=is_parallel, special=walks.special)
    forced = walks.draw(grammar, seed)
    if forced is not None:
        faults.append((fault(row, forced, is_parallel), forced))
        if not row.has_channels:
            content = texts(parse(row.name, [forced], tools=TOOLS), Content)
            faults.append((f"content {content!r}" if content else "", forced))
    grammar = forcing_grammar(row, TOOLS, is_parallel=is_parallel, special=walks.special, is_triggered=True)
    triggered = walks.draw(grammar, seed, beginning(row, walks.special, seed), max_tokens=600)
    if triggered is not None:
        faults.append((fault(row, triggered, is_parallel), triggered))
    return [f"{what} in {output!r}" for what, output in faults if what]


def beginning(row: ToolFormat, special: dict[str, int], seed: int) -> list[str | int]:
    """Return text, and what a call begins with, as tokens."""
    if row.is_bare:
        starts = {"{call}": '{"name": "', "{calls}": '[{"name": "', "{list}": ("[echo(", "[now(")[seed % 2]}
        return [starts[row.call]]
    start = "<|channel|>commentary to=functions." if row.has_channels else f"{TEXT}{first_marker(row)}"
    pieces = re.split("|".join(f"({re.escape(text)})" for text in special) or r"(?!)", start)
    return [special.get(piece, piece) for piece in pieces if piece]


def first_marker(row: ToolFormat) -> str:
    return re.match(r"\S*", re.split(r"\{", row.section[0] or row.call)[0].lstrip())[0]  # type: ignore[index]


@pytest.mark.parametrize("is_special", [False, True], ids=["text", "special tokens"])
@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.name)
def test_forced_outputs_are_calls_with_valid_arguments(row: ToolFormat, is_special: bool) -> None:
    assert not [fault for seed in (0, 1) for fault in walk(row, seed, is_special)]


@pytest.mark.fuzz
@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.name)
def test_many_forced_outputs_are_calls_with_valid_arguments(row: ToolFormat) -> None:
    def run(seed: int) -> None:
        assert not walk(row, seed, bool(seed % 3))

    fuzz(run, 50_000)


@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.name)
def test_triggered_grammar_allows_any_text(row: ToolFormat) -> None:
    walks = GrammarWalk()
    grammar = forcing_grammar(row, TOOLS, is_triggered=True)
    start = "<|channel|>final<|message|>" if row.has_channels else ""
    for text in (TEXT, "", '{"a": 1}', "A list: [1, 2].", "é <tool_c"):
        assert walks.accepts(grammar, start + text), text


def test_tools_that_are_not_strict_take_any_object_when_triggered() -> None:
    tools = [{"type": "function", "function": {"name": "echo", "parameters": SCHEMAS["echo"]}}]
    output = '<tool_call>\n{"name": "echo", "arguments": {"other": [1]}}\n</tool_call>'
    walks = GrammarWalk()
    assert walks.accepts(forcing_grammar(find_format("hermes"), tools, is_triggered=True), output)
    assert not walks.accepts(forcing_grammar(find_format("hermes"), tools), output)


@pytest.mark.parametrize(
    ("name", "call", "arguments"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>', {"a": [1]}),
        ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>[1]</arg_value></tool_call>", {"a": [1]}),
        ("pythonic", '[f(a=1, b={"c": "x"})]', {"a": 1, "b": {"c": "x"}}),
        ("gemma4", '<|tool_call>call:f{a:[1,<|"|>x<|"|>],b:{c:true}}<tool_call|>', {"a": [1, "x"], "b": {"c": True}}),
    ],
)
def test_tool_without_named_properties_takes_any(name: str, call: str, arguments: dict[str, object]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for is_triggered in (False, True):
        assert GrammarWalk().accepts(forcing_grammar(find_format(name), tools, is_triggered=is_triggered), call)
    assert [json.loads(text) for _, text in ended_calls(parse(name, [call], tools=tools))] == [arguments]


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        ("^a+$", ("a", "aaa"), ("ba", "ab", "")),
        ("^a", ("ab",), ("ba",)),
        ("a$", ("ba",), ("ab",)),
        ("b", ("abc",), ("ac",)),
        (r"^(a|b)\$", ("a$", "b$c"), ("a",)),
        ("^[$|]$", ("$", "|"), ("a",)),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "gemma4"])
def test_patterns_of_text_have_anchors(
    name: str, pattern: str, fits: tuple[str, ...], does_not: tuple[str, ...]
) -> None:
    call = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
        "glm47": "<tool_call>f<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>",
        "gemma4": '<|tool_call>call:f{{a:<|"|>{}<|"|>}}<tool_call|>',
    }[name]
    grammar = forcing_grammar(find_format(name), [tool_of("a", {"type": "string", "pattern": pattern})])
    walks = GrammarWalk()
    assert all(walks.accepts(grammar, call.format(value)) for value in fits)
    assert not any(walks.accepts(grammar, call.format(value)) for value in does_not)


def test_enumerations_of_text_may_be_long() -> None:
    tool = tool_of("a", {"enum": [f"city {number}" for number in range(3000)]})
    grammar, walks = forcing_grammar(find_format("glm47"), [tool]), GrammarWalk()
    for value, fits in (("city 0", True), ("city 2999", True), ("city 3000", False)):
        call = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
        assert walks.accepts(grammar, call) is fits


@pytest.mark.parametrize(
    ("name", "key"), [("qwen3_coder", "a<b"), ("kimi_k3", "a\nb"), ("pythonic", "a-b"), ("gemma4", "a:b")]
)
def test_required_property_that_cannot_be_written_is_named(name: str, key: str) -> None:
    row, tool = find_format(name), tool_of(key, {"type": "string"})
    with pytest.raises(ValueError, match=f"f requires the property {re.escape(repr(key))}, which cannot be written"):
        forcing_grammar(row, [tool])
    del tool["function"]["parameters"]["required"]
    walks = GrammarWalk()
    output = walks.draw(forcing_grammar(row, [tool], is_parallel=False), 1)
    assert output is not None
    assert ended_calls(parse(name, [output], tools=[tool])) == [("f", "{}")]
    assert forcing_grammar(find_format("hermes"), [tool_of(key, {"type": "string"})])


def tool_of(key: str, part: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: part}, "required": [key], "additionalProperties": False}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def test_one_call_is_the_end_without_parallel_calls() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    walks = GrammarWalk()
    for is_triggered in (False, True):
        one = forcing_grammar(None, TOOLS, is_triggered=is_triggered, is_parallel=False)
        several = forcing_grammar(None, TOOLS, is_triggered=is_triggered)
        assert walks.accepts(one, call)
        assert not walks.accepts(one, f"{call}\n{call}")
        assert walks.accepts(several, f"{call}\n{call}")


def test_unknown_tools_cannot_be_called() -> None:
    call = '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'
    assert not GrammarWalk().accepts(forcing_grammar(None, TOOLS), call)


def test_special_reasoning_markers_may_be_in_the_text_around_calls() -> None:
    walks = GrammarWalk(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    grammar = forcing_grammar(
        find_format("hermes"), TOOLS, is_triggered=True, special=walks.special, reasoning=REASONING_FORMATS[-1]
    )
    special = walks.special
    prefix = [special["<think>"], "Hm.", special["</think>"], "\n\n", special["<tool_call>"], '\n{"name": "now"']
    output = walks.draw(grammar, 1, prefix)
    assert output is not None
    events = parse("hermes", [output], "qwen3")
    assert events[1:3] == [CallBegan(0, "now"), Arguments(0, events[2].text)]  # type: ignore[union-attr]
    assert CallEnded(0) in events


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("qwen3_coder", "a <function=echo>\n<parameter=other>\n1\n</parameter>\n</function>"),
        ("gemma4", "a <|tool_call>:echo{other:1}<tool_call|>"),
        ("granite", 'a <tool_call>[{"name": "echo", "arguments": {"other": 1}}]'),
        ("deepseek_v32", 'a <｜DSML｜invoke name="echo">\n</｜DSML｜invoke>'),
    ],
)
def test_strict_calls_are_written_in_one_way(name: str, output: str) -> None:
    """Other ways are read, too: a call in one of them would not be held to its schema."""
    assert ended_calls(parse(name, [output], tools=TOOLS))
    assert not GrammarWalk().accepts(forcing_grammar(find_format(name), TOOLS, is_triggered=True), output)


def test_text_behind_the_last_call_of_an_output_has_no_further_call() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    grammar, walks = forcing_grammar(find_format("hermes"), TOOLS, is_triggered=True), GrammarWalk()
    assert walks.accepts(grammar, f"{call}\n" * 128 + "a < b")
    assert not walks.accepts(grammar, f"{call}\n" * 129)
