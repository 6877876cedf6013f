"""Writer of grammars: from the parameters of a request, or the schema of a tool, to the text that is compiled.

Imported only for requests that ask for a grammar.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from quire.core.errors import InvalidRequestError
from quire.core.structured_outputs import GRAMMAR_LIMITS, StructuredOutputsParams
from quire.grammar_writing.disjoint_schemas import without_disjoint_one_of
from quire.grammar_writing.schema_shapes import Document
from quire.grammar_writing.schemas import SCHEMAS_BY_NAME, SchemaError, escaped_name
from quire.grammar_writing.structural_tags import structural_tag_grammar
from quire.grammar_writing.texts import (
    WHITESPACE_PATTERN,
    choice_text,
    closed_json_text,
    closed_objects,
    json_text,
    lark_from,
    regex_text,
    schema_fault,
)

_MAX_REASON_CHARS = 300


def grammar_of(params: StructuredOutputsParams) -> str:
    """Return the grammar of a constraint. InvalidRequestError for what cannot be converted, with its place.

    Constraints that allow the same texts may have different grammars; `StructuredOutputsParams(grammar=...)` of a
    grammar has that one.
    """
    if params.grammar is not None:
        try:
            return lark_from(params.grammar)
        except ValueError as error:
            raise InvalidRequestError(str(error), param="grammar") from error
    if params.regex is not None:
        return f"start: {regex_text(params.regex)}\n"
    if params.choice is not None:
        return choice_text(params.choice)
    whitespace = WHITESPACE_PATTERN if params.whitespace_pattern is None else params.whitespace_pattern
    between = None if params.disable_any_whitespace else whitespace
    if params.structural_tag is not None:
        return structural_tag_grammar(json.loads(str(params.structural_tag)), between)
    schema = {"type": "object"} if params.json is None else json.loads(str(params.json))
    if params.disable_additional_properties:
        schema = closed_objects(without_disjoint_one_of(schema))
    try:
        return f"start: {json_text(schema, between)}\n"
    except SchemaError as error:
        raise InvalidRequestError(f"json cannot be a grammar {error}", param="json") from error


def check_tool_schemas(schemas: Sequence[Mapping[str, Any]], indices: Iterable[int]) -> None:
    """Raise InvalidRequestError for a tool, of those with these indices, with a schema that no grammar can express.

    `schemas`: of the parameters of all tools. Takes the time and the memory of compiling them, which only a process
    bounds.
    """
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 (a compiled library, only for tools that are forced)

    def fault(grammar: str) -> str:
        return str(LLMatcher.validate_grammar(grammar, None, limits=LLParserLimits(**GRAMMAR_LIMITS)))

    for index in indices:
        try:
            schema = Document(schemas[index]).whole()
            reason = fault(f"start: {closed_json_text(schema)}\n")
            place = place_of_fault(schema, reason, fault) if reason else ""
            at = f"at {place}: " if place else ""
        except SchemaError as error:
            at, reason = "", str(error)
        if reason:
            told = " ".join(schema_fault(reason.partition("\n   1 |")[0]).split())[:_MAX_REASON_CHARS]
            message = f"tools[{index}].function.parameters cannot be enforced: {at}{told}"
            raise InvalidRequestError(message, param="tools")


_MAX_TRIES = 256        # subschemas that are compiled by themselves
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "contains", "propertyNames")


def place_of_fault(schema: Any, reason: str, fault: Callable[[str], str]) -> str:  # noqa: ANN401 (JSON)
    """Return the place as a JSON pointer; empty: the schema itself. `fault` returns what is wrong with a grammar."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema}
    place, current, num_tries = "", schema, 0
    while True:
        for step, below in _subschemas(current):
            num_tries += 1
            if num_tries > _MAX_TRIES:
                return place
            alone = below | shared if isinstance(below, dict) else below
            if _kind(fault(f"start: {json_text(alone)}\n")) == _kind(reason):
                place, current = place + step, below
                break
        else:
            return place


def _kind(reason: str) -> str:
    """Return the part of a fault that is the same wherever it is."""
    return schema_fault(reason).partition("\n")[0]


def _subschemas(schema: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 (JSON)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            yield from ((f"/{key}/{escaped_name(name)}", each) for name, each in value.items())
        elif key in _LISTS and isinstance(value, list):
            yield from ((f"/{key}/{number}", each) for number, each in enumerate(value))
        elif key in _SINGLE and isinstance(value, dict):
            yield f"/{key}", value
