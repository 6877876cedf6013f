"""Schemas in every notation: refused by name, or all that their grammars allow is read as a value that fits them.

Schemas of pydantic, of zod, of people, of the JSON Schema test suite and of SchemaStore. `make test` takes each schema
in one notation and with one walk, `make matrix` all.
"""

import json
from typing import Any

import pytest

from quire.grammar_writing.scalars import FORMATS
from quire.grammar_writing.texts import json_text, regex_text
from quire.server.tools.call_grammar import forcing_grammar
from quire.server.tools.grammar_rules import MAX_GRAMMAR_BYTES
from quire.text.tool_formats.table import find_format
from support.grammar_walks import GrammarWalk
from support.schema_walks import NOTATIONS, data_schemas, fault_of
from support.written_schemas import pydantic_schemas, schemas_by_hand, zod_schemas

SOURCES = {
    "pydantic": pydantic_schemas,
    "zod": zod_schemas,
    "by hand": schemas_by_hand,
    "test suite": lambda: data_schemas("test_suite_draft2020_12"),
    "SchemaStore": lambda: data_schemas("schemastore_sample"),
}
MAX_REFUSED = {"pydantic": 0.06, "zod": 0.05, "by hand": 0.25, "test suite": 0.52, "SchemaStore": 0.42}


def check(source: str, num_seeds: int, *, is_whole: bool) -> None:
    """Walk over the grammars of a source's schemas: in all notations, or in one for each."""
    schemas, walks = SOURCES[source](), GrammarWalk()
    if not schemas:
        pytest.skip("../shared/data is not here")
    faults, num_refused, num_tried = [], 0, 0
    for number, (name, schema) in enumerate(schemas):
        for notation in NOTATIONS if is_whole else [NOTATIONS[number % len(NOTATIONS)]]:
            fault = fault_of(walks, notation, schema, range(number, number + num_seeds))
            num_tried += 1
            num_refused += fault.startswith("refused: ")
            if fault and not fault.startswith("refused: "):
                faults.append(f"{name} in {notation}: {fault}")
    assert not faults
    assert num_refused <= MAX_REFUSED[source] * num_tried


@pytest.mark.parametrize("source", SOURCES)
def test_what_a_grammar_allows_fits_its_schema(source: str) -> None:
    check(source, num_seeds=1, is_whole=False)


@pytest.mark.matrix
@pytest.mark.parametrize("source", SOURCES)
def test_what_any_grammar_allows_fits_its_schema(source: str) -> None:
    check(source, num_seeds=4, is_whole=True)


@pytest.mark.parametrize("notation", ["qwen3_coder", "glm45", "kimi_k3", "gemma4", "pythonic"])
@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "array", "uniqueItems": True}, "at /properties/a: unsupported keyword: uniqueItems"),
        ({"anyOf": [{"type": "null"}, {"not": {}}]}, "at /properties/a/anyOf/1: unsupported keyword: not"),
        ({"$ref": "#/$defs/b"}, r"at /properties/a: \$ref '#/\$defs/b' names no part of the schema"),
        ({"type": "text"}, "at /properties/a: unknown type 'text'"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "at /properties/a: unsupported keyword: oneOf"),
    ],
)
def test_keyword_that_a_notation_cannot_hold_is_named_with_its_place(
    notation: str, part: dict[str, Any], place: str
) -> None:
    schema = {"type": "object", "properties": {"a": part}}
    with pytest.raises(ValueError, match=f"^f {place}"):
        forcing_grammar(find_format(notation), [{"type": "function", "function": {"name": "f", "parameters": schema}}])


@pytest.mark.parametrize("notation", ["qwen3_coder", "hermes", "gemma4", "pythonic", "kimi_k3"])
def test_grammar_of_calls_is_bounded(notation: str) -> None:
    """A definition of 100 kB that 1,000 properties refer to, with keywords of their own, and a tree of references."""
    large = {"enum": [f"{'x' * 100}{number}" for number in range(900)]}
    wide = {f"p{number}": {"$ref": "#/$defs/d", "minLength": number} for number in range(1000)}
    deep = {f"d{number}": {"anyOf": [{"$ref": f"#/$defs/d{number + 1}"}] * 9} for number in range(30)} | {"d30": {}}
    for properties, definitions in ((wide, {"d": large}), ({"a": {"$ref": "#/$defs/d0"}}, deep)):
        schema = {"type": "object", "properties": properties, "$defs": definitions}
        tools = [{"type": "function", "function": {"name": f"f{number}", "parameters": schema}} for number in range(4)]
        num_bytes, refusal = 0, "more than"
        try:
            num_bytes = len(forcing_grammar(find_format(notation), tools))
        except ValueError as error:
            refusal = str(error)
        assert num_bytes <= MAX_GRAMMAR_BYTES
        assert "more than" in refusal


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_those_of_json(name: str) -> None:
    walks, in_json = GrammarWalk(), f"start: {json_text({'type': 'string', 'format': name})}\n"
    texts = [walks.draw(f"start: {regex_text(FORMATS[name])}\n", seed, max_tokens=80) for seed in range(6)]
    found = [text for text in texts if text is not None]
    assert found
    assert [text for text in found if not walks.accepts(in_json, json.dumps(text))] == []
