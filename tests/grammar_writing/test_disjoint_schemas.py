"""`oneOf` becomes `anyOf` where its branches exclude each other, and nowhere else."""

import json
import random
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field

from quire.grammar_writing.disjoint_schemas import MAX_COMPARISONS, has_one_of, without_disjoint_one_of


def tagged(tag: object, name: str = "kind", **others: object) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"const": tag}, **others}, "required": [name]}


DISJOINT: dict[str, list[Any]] = {
    "types": [{"type": "string"}, {"type": ["integer", "null"]}, {"type": "array"}],
    "constants": [{"const": 1}, {"const": "1"}, {"const": True}],
    "enumerations": [{"enum": ["a", 1]}, {"enum": ["b", 2.5]}],
    "an enumeration and a type": [{"enum": ["a"]}, {"type": "integer"}],
    "tags": [tagged("a"), tagged("b", more={"type": "integer"})],
    "tags of other types": [tagged(1), tagged("1")],
    "tags in several values": [
        {"type": "object", "properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"]}, tagged("c", "k")
    ],
    "a tag and its absence": [
        tagged("a"), {"type": "object", "properties": {"other": {}}, "additionalProperties": False}
    ],
    "tags in an object": [tagged("x", "t", of=tagged("a")) | {"required": ["of"]}, tagged("x", "t", of=tagged("b"))],
    "types of a property": [
        {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]},
        {"type": "object", "properties": {"k": {"type": "array"}}},
    ],
    "numbers": [{"type": "number", "maximum": 3}, {"type": "integer", "exclusiveMinimum": 3}],
    "lengths": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}],
    "counts": [{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}],
    "items": [
        {"type": "array", "items": {"type": "string"}, "minItems": 1}, {"type": "array", "items": {"type": "null"}}
    ],
    "alternatives": [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": "boolean"}, {"enum": [1, 2]}],
    "a part of all": [{"allOf": [{"type": "object"}, tagged("a")]}, tagged("b")],
    "nothing": [False, {}],
    "one": [{}],
}  # fmt: skip

OVERLAPPING: dict[str, list[Any]] = {
    "anything": [{}, {}],
    "an integer is a number": [{"type": "integer"}, {"type": "number"}],
    "equal numbers": [{"const": 1}, {"enum": [2, 1.0]}],
    "equal tags": [tagged("a"), tagged("b"), tagged("a")],
    "tags that may be missing": [{"type": "object", "properties": {"k": {"const": v}}} for v in "ab"],
    "tags of objects alone": [{"properties": {"k": {"const": v}}, "required": ["k"]} for v in "ab"],
    "a tag that a pattern allows": [
        tagged("a"), {"type": "object", "patternProperties": {"^k": {}}, "additionalProperties": False}
    ],
    "required properties": [{"type": "object", "required": [key]} for key in "ab"],
    "items that may be missing": [{"type": "array", "items": {"type": kind}} for kind in ("string", "null")],
    "bounds that meet": [{"type": "number", "maximum": 3}, {"type": "number", "minimum": 3}],
    "patterns": [{"type": "string", "pattern": "^a$"}, {"type": "string", "pattern": "^b$"}],
    "equal objects": [{"const": {"a": 1}}, {"const": {"a": 1.0}}],
    "unknown references": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
    "a circle": [{"$ref": "#"}, {"type": "string"}],
}  # fmt: skip


@pytest.mark.parametrize("branches", DISJOINT.values(), ids=DISJOINT)
def test_disjoint_branches_become_alternatives(branches: list[Any]) -> None:
    assert without_disjoint_one_of({"oneOf": branches}) == {"anyOf": branches}


@pytest.mark.parametrize("branches", OVERLAPPING.values(), ids=OVERLAPPING)
def test_branches_that_may_overlap_stay(branches: list[Any]) -> None:
    assert without_disjoint_one_of({"oneOf": branches}) == {"oneOf": branches}


def test_branches_are_read_with_their_siblings() -> None:
    """`type` beside of `oneOf` holds for all branches."""
    branches = [{"properties": {"k": {"const": v}}, "required": ["k"]} for v in "ab"]
    schema = {"type": "object", "oneOf": branches, "anyOf": [{"required": ["x"]}, {"required": ["y"]}]}
    kept = {"type": "object", "anyOf": schema["anyOf"], "allOf": [{"anyOf": branches}]}
    assert without_disjoint_one_of(schema) == kept


def test_names_and_values_are_no_keywords() -> None:
    schema = {"properties": {"oneOf": {"const": {"oneOf": [{"const": 1}, {"const": 2}]}}}, "enum": [{"oneOf": []}]}
    assert without_disjoint_one_of(schema) == schema


def test_unions_of_pydantic() -> None:
    class Cat(BaseModel):
        kind: Literal["cat"]
        next: "Pet | None" = None

    class Dog(BaseModel):
        kind: Literal["dog", "puppy"]

    class Pet(BaseModel):
        of: Annotated[Cat | Dog, Field(discriminator="kind")]

    schema = Pet.model_json_schema()
    assert has_one_of(schema)
    assert not has_one_of(without_disjoint_one_of(schema))


def test_proofs_take_bounded_work() -> None:
    many = [tagged(number) for number in range(1000)]
    assert "anyOf" in without_disjoint_one_of({"oneOf": many})  # told apart by their tag, in linear time
    lengths = [{"type": "string", "minLength": 2 * n, "maxLength": 2 * n + 1} for n in range(80)]
    assert "anyOf" in without_disjoint_one_of({"oneOf": lengths})
    assert len(lengths) ** 2 / 2 < MAX_COMPARISONS < 1000**2 / 2
    lengths = [{"type": "string", "minLength": 2 * n, "maxLength": 2 * n + 1} for n in range(1000)]
    circle = {"type": "object", "properties": {key: {"$ref": "#/$defs/c"} for key in "abcd"}, "required": [*"abcd"]}
    assert "oneOf" in without_disjoint_one_of({"oneOf": lengths})   # it has given up
    circles = {"$defs": {"c": circle}, "oneOf": [{"$ref": "#/$defs/c"}, circle]}
    assert without_disjoint_one_of(circles) == circles     # without a bound, it would never end


@pytest.mark.parametrize("seed", range(8))
def test_no_value_fits_two_branches(seed: int) -> None:
    """Values fit the rewritten schema exactly if they fit the given one."""
    rng = random.Random(seed)
    values = [random_value(rng, 2) for _ in range(60)]
    num_rewritten = 0
    for _ in range(60):
        schema = {"oneOf": [random_schema(rng, 2) for _ in range(2)]}
        rewritten = without_disjoint_one_of(schema)
        num_rewritten += "anyOf" in rewritten
        before, after = (jsonschema.Draft202012Validator(each) for each in (schema, rewritten))
        for value in values:
            assert before.is_valid(value) == after.is_valid(value), json.dumps([schema, value])
    assert num_rewritten > 10


def random_value(rng: random.Random, depth: int) -> Any:  # noqa: ANN401
    kinds = [None, True, False, 0, 1, 1.0, 1.5, 2, "", "a", "bb"]
    if depth and rng.random() < 0.6:
        below = [random_value(rng, depth - 1) for _ in range(rng.randrange(3))]
        return below if rng.random() < 0.4 else {rng.choice("ab"): each for each in below}
    return rng.choice(kinds)


def random_schema(rng: random.Random, depth: int) -> Any:  # noqa: ANN401, PLR0911
    kind = rng.choice(["const", "enum", "type", "number", "string", "array", "object", "object", "any", "all", "tags"])
    match kind if depth else rng.choice(["const", "enum", "type"]):
        case "const":
            return {"const": random_value(rng, 1)}
        case "enum":
            return {"enum": [random_value(rng, 1) for _ in range(rng.randrange(1, 3))]}
        case "type":
            return {"type": rng.choice(["string", "integer", "number", "null", "boolean", "array", "object"])}
        case "number":
            bound = rng.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
            return {"type": rng.choice(["integer", "number"]), bound: rng.choice([0, 1, 1.5])}
        case "string":
            return {"type": "string", rng.choice(["minLength", "maxLength"]): rng.randrange(3)}
        case "array":
            return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": rng.randrange(2)}
        case "any" | "all":
            return {f"{kind}Of": [random_schema(rng, depth - 1) for _ in range(2)]}
        case "tags":
            return tagged(rng.choice([0, 1, "a"]), "a", b=random_schema(rng, depth - 1))
    schema = {"type": "object", "properties": {key: random_schema(rng, depth - 1) for key in "ab"[: rng.randrange(3)]}}
    schema["required"] = [key for key in "ab" if rng.random() < 0.4]
    return schema | ({"additionalProperties": False} if rng.random() < 0.4 else {})
