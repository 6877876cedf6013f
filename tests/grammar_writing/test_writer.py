"""Grammars of structured outputs and tools: the texts that they accept."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from quire.core.errors import InvalidRequestError
from quire.core.structured_outputs import StructuredOutputsParams
from quire.grammar_writing.texts import after_reasoning, either, marker_text
from quire.grammar_writing.writer import check_tool_schemas, grammar_of

BYTES = LLTokenizer("byte")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def accepts(grammar: str, text: str) -> bool:
    """Return whether the whole text fits the grammar."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar(**constraint: object) -> str:
    return grammar_of(StructuredOutputsParams(**constraint))


WAYS = [PERSON, json.dumps(PERSON), json.dumps(PERSON, indent=4)]


@pytest.mark.parametrize("given", WAYS, ids=["dict", "text", "indented"])
def test_one_schema_has_one_grammar_however_it_is_written(given: object) -> None:
    assert grammar(json=given) == grammar(json=PERSON)
    assert accepts(grammar(json=given), '{"name":"Ada","age":36}')
    assert not accepts(grammar(json=given), '{"name":"Ada"}')


def test_properties_keep_their_order() -> None:
    assert not accepts(grammar(json=PERSON), '{"age":36,"name":"Ada"}')


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"name": "Ada", "age": 36}', True),
        ('{\n    "name": "Ada",\n    "age": 36\n}', True),
        ('{\n\n"name": "Ada", "age": 36}', False),
        ('{   "name": "Ada", "age": 36}', False),
        ('{\n' + 17 * " " + '"name": "Ada", "age": 36}', False),
    ],
)
def test_whitespace_is_bounded(text: str, fits: bool) -> None:
    assert accepts(grammar(json=PERSON), text) is fits


def test_whitespace_can_be_set_and_forbidden() -> None:
    compact, one = grammar(json=PERSON, disable_any_whitespace=True), grammar(json=PERSON, whitespace_pattern="[_]")
    assert accepts(compact, '{"name":"Ada","age":36}')
    assert not accepts(compact, '{"name": "Ada","age":36}')
    assert accepts(one, '{"name":_"Ada","age":36}')
    assert not accepts(one, '{"name": "Ada","age":36}')


def test_options_of_the_schema_win() -> None:
    schema = PERSON | {"x-guidance": {"whitespace_pattern": "[_]"}}
    assert accepts(grammar(json=schema), '{"name":_"Ada","age":36}')


def test_unnamed_properties_can_be_forbidden() -> None:
    inner = {"type": "object", "properties": {"properties": {"type": "object", "properties": {}}}}
    schema = {"type": "object", "properties": {"a": inner, "b": {"additionalProperties": True, "properties": {}}}}
    closed = grammar(json=schema, disable_additional_properties=True)
    assert accepts(closed, '{"a":{"properties":{}},"b":{"c":1}}')
    for text in ('{"c":1}', '{"a":{"c":1}}', '{"a":{"properties":{"c":1}}}'):
        assert accepts(grammar(json=schema), text)
        assert not accepts(closed, text)


def test_true_is_any_json_and_json_object_any_object() -> None:
    assert accepts(grammar(json="true"), "[1]")
    assert accepts(grammar(json_object=True), '{"a": [1, {}]}')
    assert not accepts(grammar(json_object=True), "[1]")


@pytest.mark.parametrize("choices", [["yes", "no"], ["a", "ab", "é", 'x\n"y'], ["\\", "/"]])
def test_a_choice_is_one_of_the_texts(choices: list[str]) -> None:
    text = grammar(choice=choices)
    assert all(accepts(text, choice) for choice in choices)
    assert not any(accepts(text, other) for other in ("", "maybe", choices[0] + choices[1]))


REGEXES = [
    (r"a+", ["a", "aaa"], ["", "b", "ab"]),
    (r"^\d{3}-\d{4}$", ["555-1234"], ["555-123", "٣٣٣-٣٣٣٣"]),
    (r"[\d/_]+", ["1/2_"], ["٣", "a"]),
    (r"[^\d]x", ["ax"], ["1x"]),
    (r"[[a]+", ["[a"], ["b"]),
    (r"[]a]", ["]", "a"], ["b"]),
    (r"[^]a]", ["b"], ["]", "a"]),
    (r"[[:alpha:]_]+", ["ab_"], ["1"]),
    (r"a/b\/c", ["a/b/c"], ["a"]),
    (r"\[\d\]", ["[1]"], ["1"]),
    ("a\nb", ["a\nb"], ["ab"]),
    (r"(yes|no) [^\]]", ["no a"], ["no ]"]),
]


@pytest.mark.parametrize(("pattern", "fitting", "others"), REGEXES)
def test_a_regex_is_matched_from_beginning_to_end(pattern: str, fitting: list[str], others: list[str]) -> None:
    text = grammar(regex=pattern)
    assert all(accepts(text, each) for each in fitting)
    assert not any(accepts(text, each) for each in others)


GRAMMARS = {
    "lark": 'start: "a" b\nb: /[0-9]+/\n',
    "gbnf": 'root ::= "a" b\nb ::= [0-9]+\n',
    "llguidance": '{"grammars":[{"lark_grammar":"start: /a[0-9]+/"}]}',
}


@pytest.mark.parametrize("text", GRAMMARS.values(), ids=GRAMMARS)
def test_a_grammar_is_lark_or_gbnf(text: str) -> None:
    assert accepts(grammar(grammar=text), "a12")
    assert not accepts(grammar(grammar=text), "12")


CONSTRAINTS = [
    {"json": PERSON}, {"json": {"description": "a ::= b"}}, {"choice": ["x\na ::= b"]},
    {"regex": "a"}, {"choice": ["a"]}, {"grammar": 'root ::= "a"'},
]


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_the_grammar_of_a_grammar_is_that_grammar(constraint: dict[str, Any]) -> None:
    text = grammar(**constraint)
    assert grammar(grammar=text) == text


AFTER_REASONING = {
    grammar(json=PERSON): '{"name":"Ada","age":36}',
    grammar(choice=["{", "a"]): "a",
    after_reasoning(grammar(json=PERSON), "!"): '!{"name":"Ada","age":36}',
}


@pytest.mark.parametrize("text", AFTER_REASONING, ids=["json", "choice", "reasoned"])
def test_reasoning_comes_before_the_grammar(text: str) -> None:
    reasoned, answer = after_reasoning(text, "</think>"), AFTER_REASONING[text]
    assert accepts(reasoned, 'Well, {"name": 1} </thin </think>' + answer)
    assert not accepts(reasoned, answer)
    assert not accepts(reasoned, "Well</think>" + answer + answer)


def test_reasoning_needs_a_list_of_grammars() -> None:
    for text in ("{}", '{"grammars": []}', '{"grammars": [1]}', "{"):
        with pytest.raises(ValueError, match=r"grammar|Expecting"):
            after_reasoning(text, "</think>")


def test_a_special_token_can_end_the_reasoning() -> None:
    reasoned = after_reasoning(grammar(regex="a"), "<|end|>", special={"<|end|>": 7, "end": 8})
    assert "TEXT <[7]>" in reasoned
    matcher = LLMatcher(BYTES, reasoned, log_level=0)
    assert matcher.try_consume_tokens([*b"Well", 7, *b"\n\na"]) == 8
    assert matcher.is_accepting()


def test_reasoning_with_a_start_marker_may_be_left_out() -> None:
    reasoned = after_reasoning(grammar(json=PERSON), "</think>", start_marker="<think>")
    answer = '{"name":"Ada","age":36}'
    assert accepts(reasoned, answer)
    assert accepts(reasoned, f"<think>Well</think>\n\n{answer}")
    assert not accepts(reasoned, f"Well</think>{answer}")


def test_marker_has_special_tokens_by_their_ids() -> None:
    assert marker_text("<|a|>\nb", {"<|a|>": 5, "<|": 6}) == '<[5]> "\\nb"'
    assert marker_text("<b>") == '"<b>"'


def test_one_of_two_grammars() -> None:
    first, second = grammar(json=PERSON), after_reasoning(grammar(choice=["a"]), "!", start_marker="?")
    for text in (either(first, second), either(second, first), either(second, either(first, first))):
        assert accepts(text, '{"name":"Ada","age":36}')
        assert accepts(text, "?Well!a")
        assert not accepts(text, "Well!a")
    with pytest.raises(ValueError, match="same names: answer_0"):
        either(second, second)


def test_gbnf_that_cannot_be_converted_is_refused_with_the_place() -> None:
    params = StructuredOutputsParams(grammar='root ::= "a" (')
    with pytest.raises(InvalidRequestError, match=r"cannot be converted from GBNF: .* at line 1"):
        grammar_of(params)


def test_pattern_of_a_named_property_leaves_no_dead_end() -> None:
    """Behind the last property no comma is allowed, for nothing could follow it; both schemas hold for the property."""
    schema = {
        "type": "object",
        "properties": {"score": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["score", "tags"],
        "additionalProperties": False,
        "patternProperties": {"^score$": {"enum": [10, 20, "x"]}, "^x-": {"type": "boolean"}},
    }
    params = StructuredOutputsParams(json={"properties": {"a": schema}}, disable_any_whitespace=True)
    matcher = LLMatcher(LLTokenizer("byte"), grammar_of(params))

    def fits(text: str) -> bool:
        return matcher.deep_copy().try_consume_tokens(list(text.encode())) == len(text)

    assert fits('{"a":{"score":10,"tags":[],"x-y":true}}')
    assert not fits('{"a":{"score":11')
    assert not fits('{"a":{"score":"x"')
    del schema["patternProperties"]["^x-"]  # type: ignore[attr-defined]
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    matcher = LLMatcher(LLTokenizer("byte"), grammar_of(params))
    assert fits('{"score":20,"tags":["s"]}')
    assert not fits('{"score":20,"tags":["s"],')



@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "http://x/y"}, "at /: $ref 'http://x/y' names no part of the schema"),
        ({"properties": {"a": {"pattern": "(?=a)"}}}, "look-around"),
        ({"properties": {}, "unevaluatedProperties": False}, "unevaluatedProperties"),
    ],
)
def test_schema_that_no_grammar_expresses_is_refused(schema: dict[str, Any], reason: str) -> None:
    schemas = [PERSON, {"type": "object"} | schema]
    check_tool_schemas(schemas, [0])
    with pytest.raises(InvalidRequestError, match=r"^tools\[1\]\.function\.parameters cannot be enforced: ") as caught:
        check_tool_schemas(schemas, [0, 1])
    assert caught.value.param == "tools"
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
