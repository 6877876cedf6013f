"""StructuredOutputsParams: one constraint, within bounds, and the texts that its grammar accepts."""

import json
import logging
import re
from dataclasses import fields
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

import quire
from quire.core import structured_outputs as module
from quire.core.errors import InvalidRequestError
from quire.core.grammar_text import WHITESPACE_PATTERN, after_reasoning, either, marker_text
from quire.core.sampling_params import SamplingParams
from quire.core.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

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
    return StructuredOutputsParams(**constraint).to_grammar()


def refusal(**constraint: object) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputsParams(**constraint)
    assert len(str(caught.value)) < 400
    return caught.value


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


@pytest.mark.parametrize(
    "wrong", [{}, {"json": {}, "regex": "a"}, {"json_object": False}, {"choice": ["a"], "grammar": "b"}]
)
def test_there_is_exactly_one_constraint(wrong: dict[str, Any]) -> None:
    assert "exactly one of json, regex, choice" in str(refusal(**wrong))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("json", value) for value in ("", "{", "[]", "1", [], 5, {"a": {1}}, {"a": float("nan")}, "[1e999]")),
        *(("json", value) for value in ("[" * 100_000, '{"a":' * 300 + "1" + "}" * 300, '{"a":"\\ud800"}')),
        *(("regex", value) for value in ("", 5, "\ud800", "a" * (module.MAX_REGEX_BYTES + 1))),
        *(("choice", value) for value in ([], "ab", [""], [1], ["a"] * (module.MAX_CHOICES + 1), ["a" * 2**19] * 3)),
        *(("grammar", value) for value in ("", 5, "\ud800", "é" * (module.MAX_GRAMMAR_BYTES // 2 + 1))),
        ("json_object", "yes"),
    ],
    ids=lambda value: str(value)[:12] if isinstance(value, str | int) else type(value).__name__,
)
def test_a_wrong_constraint_is_refused_by_name(field: str, value: object) -> None:
    assert refusal(**{field: value}).param == field


@pytest.mark.parametrize(
    "option", [{"whitespace_pattern": 5}, {"disable_any_whitespace": 1}, {"whitespace_pattern": "a" * 1025}]
)
def test_a_wrong_option_is_refused_by_name(option: dict[str, Any]) -> None:
    assert refusal(json={}, **option).param == next(iter(option))


def test_a_schema_is_bounded_in_bytes() -> None:
    error = refusal(json={"description": "a" * module.MAX_SCHEMA_BYTES})
    assert str(error) == f"json must be at most {2**20} bytes, got {2**20 + len(json.dumps({'description': ''})) - 1}"


def test_gbnf_that_cannot_be_converted_is_refused_with_the_place() -> None:
    params = StructuredOutputsParams(grammar='root ::= "a" (')
    with pytest.raises(InvalidRequestError, match=r"cannot be converted from GBNF: .* at line 1"):
        params.to_grammar()


def test_sampling_params_take_a_mapping_of_the_fields() -> None:
    params = SamplingParams(structured_outputs={"choice": ["a"]})  # type: ignore[arg-type]
    assert params.structured_outputs == StructuredOutputsParams(choice=["a"])
    with pytest.raises(InvalidRequestError, match=r"no field 'Json'; its fields are json, regex"):
        SamplingParams(structured_outputs={"Json": {}})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="StructuredOutputsParams or a mapping"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]


def test_the_earlier_names_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        guided = GuidedDecodingParams(json=PERSON, backend="xgrammar")
    assert [record.getMessage() for record in caplog.records] == [
        "GuidedDecodingParams is an earlier name of StructuredOutputsParams",
        "guided decoding: backend 'xgrammar' was asked for; grammars are llguidance's",
    ]
    params = SamplingParams(guided_decoding=guided)
    assert params == SamplingParams(structured_outputs=StructuredOutputsParams(json=PERSON))
    with pytest.raises(InvalidRequestError, match="guided_decoding must be left out"):
        SamplingParams(guided_decoding=guided, structured_outputs=guided)


def test_parameters_are_equal_hashable_and_come_back_from_bytes() -> None:
    params = StructuredOutputsParams(json={"enum": ["é", 1.5]}, whitespace_pattern="[ ]?")
    assert hash(params) == hash(StructuredOutputsParams(json='{"enum": ["\\u00e9", 1.5]}', whitespace_pattern="[ ]?"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=StructuredOutputsParams) == params
    assert repr(params).startswith("StructuredOutputsParams(json='{\"enum\":[\"é\",1.5]}'")


def test_the_package_exports_them() -> None:
    assert quire.StructuredOutputsParams is StructuredOutputsParams
    assert quire.GuidedDecodingParams is GuidedDecodingParams
    assert re.search(r"\{0,", WHITESPACE_PATTERN)
    assert [field.name for field in fields(StructuredOutputsParams)][:6] == list(module.CONSTRAINTS)


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
    matcher = LLMatcher(LLTokenizer("byte"), params.to_grammar())

    def fits(text: str) -> bool:
        return matcher.deep_copy().try_consume_tokens(list(text.encode())) == len(text)

    assert fits('{"a":{"score":10,"tags":[],"x-y":true}}')
    assert not fits('{"a":{"score":11')
    assert not fits('{"a":{"score":"x"')
    del schema["patternProperties"]["^x-"]  # type: ignore[attr-defined]
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    matcher = LLMatcher(LLTokenizer("byte"), params.to_grammar())
    assert fits('{"score":20,"tags":["s"]}')
    assert not fits('{"score":20,"tags":["s"],')
