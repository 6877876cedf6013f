"""Structural tags: the texts that their grammars accept, and what is refused by its place."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from quire.core.errors import InvalidRequestError
from quire.core.structured_outputs import StructuredOutputsParams
from quire.grammar_writing.structural_tags import MAX_TAGS
from quire.grammar_writing.writer import grammar_of

BYTES = LLTokenizer("byte")
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TAG = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": NUMBER}, "end": "</f>"}
WORD = TAG | {"begin": "<w>", "content": {"type": "regex", "pattern": "[a-z]+"}, "end": "</w>"}
THOUGHT = TAG | {"begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
ONE, TWO = '<f>{"n": 1}</f>', "<w>ab</w>"
OLD = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": NUMBER, "end": "</f>"}], "triggers": ["<f"]}


def accepts(given: dict[str, Any] | str, text: str) -> bool:
    """Return whether the whole text fits the structural tag."""
    matcher = LLMatcher(BYTES, grammar_of(StructuredOutputsParams(structural_tag=given)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def form(kind: str, **fields: object) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": kind} | fields}


ANY, END = {"type": "any_text"}, {"type": "const_string", "value": "END"}
WORDS = {"type": "regex", "pattern": "[a-z]*"}
JSON = {"type": "json_schema", "json_schema": NUMBER}
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
NUMBERS = {
    "type": "tags_with_separator", "separator": ",", "tags": [{"begin": "a", "content": INTEGER, "end": ""}],
}  # fmt: skip
TRIGGERED = {"triggers": ["<f", "<w"], "tags": [TAG, WORD]}
SEPARATED = {"tags": [TAG, WORD], "separator": ", "}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (form("const_string", value="a/b"), ["a/b"], ["a", "a/b/"]),
    (form("json_schema", json_schema=NUMBER), ['{"n": 1}', '{"n":1}'], ["{}", '{"n": "1"}']),
    (form("any_text"), ["", "<f>\n"], []),
    (form("sequence", elements=[TAG, WORD]), [ONE + TWO], [ONE, TWO + ONE]),
    (form("or", elements=[TAG, WORD]), [ONE, TWO], [ONE + TWO, ""]),
    (form("sequence", elements=[THOUGHT, TAG]), [f"<t>so <f></t>{ONE}", f"<t></t>{ONE}"], [ONE, "<t>so</t>"]),
    (form("triggered_tags", **TRIGGERED), ["", "a < b", ONE, f"a{ONE}b{TWO}c"], ["<f>{}</f>", "a<w>1</w>", "<f>"]),
    (form("triggered_tags", **TRIGGERED, at_least_one=True), [f"a{ONE}b"], ["", "a"]),
    (form("triggered_tags", **TRIGGERED, stop_after_first=True), ["a", f"a{ONE}"], [f"{ONE}{TWO}", f"{ONE}b"]),
    (form("tags_with_separator", **SEPARATED), ["", ONE, f"{ONE}, {TWO}"], [f"{ONE}{TWO}", f"{ONE}, "]),
    (form("tags_with_separator", **SEPARATED, at_least_one=True, stop_after_first=True), [ONE], ["", f"{ONE}, {TWO}"]),
    (form("tag", begin="(", content={"type": "triggered_tags"} | TRIGGERED, end=")"), [f"(a{ONE}b)"], [f"(a{ONE}b"]),
    (OLD, ["a", f"a{ONE}b"], ["a<f>1</f>"]),
    (form("sequence", elements=[ANY, END]), ["END", "aEND", "aENDbEND"], ["a", "ENDa"]),
    (form("sequence", elements=[ANY, TAG, END]), [f"a{ONE}END"], [ONE, f"a{ONE}bEND"]),
    (form("sequence", elements=[form("or", elements=[ANY, TAG])["format"], END]), ["aEND", f"{ONE}END"], ["a"]),
    (form("sequence", elements=[WORDS, {"type": "regex", "pattern": "o+"}, TAG]), [f"foo{ONE}"], [f"fob{ONE}", "foo"]),
    (form("sequence", elements=[{"type": "regex", "pattern": "[a-z]+: "}, JSON, END]), ['a: {"n": 1}END'], ["a: END"]),
    (form("sequence", elements=[form("triggered_tags", **TRIGGERED)["format"], END]),
     [f"a{ONE}bEND", "END"], [f"a{ONE}b", f"END{ONE}"]),
    (form("sequence", elements=[form("triggered_tags", **TRIGGERED, stop_after_first=True)["format"], END]),
     [f"a{ONE}END", "aEND"], [f"{ONE}bEND"]),
    (form("tag", begin="<a>", content=WORDS | {"pattern": "[a-z</>]*"}, end="</a>"), ["<a></b></a>"], ["<a>b"]),
    (form("any_text", excludes=["bad", "/"], max_chars=5), ["", "ba d"], ["a bad", "a/b", "abcdef"]),
    (form("triggered_tags", **TRIGGERED, excludes=["bad"]), [f"a{ONE}b"], [f"a{ONE}bad", f"bad{ONE}"]),
    (form("triggered_tags", **TRIGGERED), [ONE * MAX_TAGS + "a < b"], [ONE * (MAX_TAGS + 1)]),
    (form("json_schema", json_schema=NUMBER, style="json"), ['{"n": 1}'], ["{}"]),
]


@pytest.mark.parametrize(("given", "right", "wrong"), CASES)
def test_texts_have_the_form(given: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not accepts(given, text)] == []
    assert [text for text in wrong if accepts(given, text)] == []
    assert accepts(json.dumps(given), right[0])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"type": "structural_tag"}, "structural_tag.format must be an object with a type, got None"),
        (form("poem"), "structural_tag.format.type must be one of const_string, "),
        (form("sequence", elements=[]), "format.elements must be a list that is not empty, got a list of 0"),
        (form("or", elements=[TAG, {"type": "regex"}]), "structural_tag.format.elements[1].pattern must be a string"),
        (form("triggered_tags", triggers=["<g"], tags=[TAG]), "tags[0].begin must be a text that starts with one of"),
        (form("triggered_tags", triggers=[1], tags=[TAG]), "triggers[0] must be a string that is not empty, got 1"),
        (form("sequence", elements=[{"type": "any_text"}] * 1024), "at most 1024 formats"),
        (form("sequence", elements=[ANY, JSON]), "elements[0] must end with a constant text, or nothing may follow"),
        (form("sequence", elements=[form("regex", pattern=".*: ")["format"], JSON]), "elements[0] must end with a"),
        (form("sequence", elements=[ANY, form("triggered_tags", **TRIGGERED)["format"]]), "elements[0] must end with"),
        (form("sequence", elements=[INTEGER, {"type": "const_string", "value": "0"}]), "must not go on with a number"),
        (form("tags_with_separator", tags=[THOUGHT | {"end": ""}], separator=","), "content must end with a constant"),
        (form("any_text", excludes=[""]), "format.excludes[0] must be a string that is not empty"),
        (form("any_text", max_chars="2"), "format.max_chars must be a number of characters, got '2'"),
        (form("any_text", nosuchoption=3), "structural_tag.format.nosuchoption is not supported"),
        (form("json_schema", json_schema={}, any_order=True), "structural_tag.format.any_order is not supported"),
        (form("json_schema", json_schema={}, style="qwen_xml"), "structural_tag.format.style must be json"),
        (form("json_schema", json_schema={"minProperties": 2}), "json_schema cannot be a grammar at /: unsupported"),
        (form("triggered_tags", **TRIGGERED, at_least_one=1), "format.at_least_one must be true or false, got 1"),
        (form("sequence", elements=[TAG | {"style": "x"}]), "structural_tag.format.elements[0].style is not supported"),
        (form("any_text") | {"formats": []}, "structural_tag.formats is not supported"),
        (OLD | {"structures": [{"begin": "<f>"}]}, "structural_tag.structures[0].end must be a string"),
        (OLD | {"structures": [5]}, "structural_tag.structures[0].begin must be a string"),
        (
            OLD | {"structures": [{"begin": "<f>", "end": "</f>", "max_chars": 1}]},
            "structural_tag.structures[0].max_chars is not supported",
        ),
        ({"type": "tag", "format": INTEGER}, "structural_tag.type must be structural_tag, got 'tag'"),
        (
            form("sequence", elements=[NUMBERS, {"type": "const_string", "value": "5"}]),
            "must not go on with a number in front of it",
        ),
        (form("tags_with_separator", tags=NUMBERS["tags"], separator="5"), "must not go on with a number in front"),
        (form("triggered_tags", triggers=["a"], tags=NUMBERS["tags"]), "tags[0].end must not be empty behind a number"),
    ],
)
def test_what_is_not_known_is_refused_by_its_place(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        grammar_of(StructuredOutputsParams(structural_tag=given))
    assert refused.value.param == "structural_tag"
    assert reason in str(refused.value)
