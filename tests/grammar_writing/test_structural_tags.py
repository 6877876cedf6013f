"""Structural tags: the texts that their grammars accept, and what is refused by its place."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from quire.core.errors import InvalidRequestError
from quire.core.structured_outputs import StructuredOutputsParams
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
        (OLD | {"structures": [{"begin": "<f>"}]}, "structural_tag.structures[0].end must be a string"),
        (OLD | {"structures": [5]}, "structural_tag.structures[0].begin must be a string"),
    ],
)
def test_what_is_not_known_is_refused_by_its_place(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        grammar_of(StructuredOutputsParams(structural_tag=given))
    assert refused.value.param == "structural_tag"
    assert reason in str(refused.value)
