"""StructuredOutputsParams: one constraint, within bounds."""

import json
import logging
from dataclasses import fields
from typing import Any

import msgspec
import pytest

import quire
from quire.core import structured_outputs as module
from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import SamplingParams
from quire.core.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def refusal(**constraint: object) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputsParams(**constraint)
    assert len(str(caught.value)) < 400
    return caught.value


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
    assert [field.name for field in fields(StructuredOutputsParams)][:6] == list(module.CONSTRAINTS)
