"""Schemas of many writers in every notation: refused by name, or what their grammars allow is read as a valid value."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import jsonschema

from quire.core.errors import InvalidRequestError
from quire.core.structured_outputs import StructuredOutputsParams
from quire.grammar_writing.writer import check_tool_schemas, grammar_of
from quire.server.grammars.grammar_worker import GrammarJobs
from quire.server.tools.call_grammar import forcing_grammar
from quire.text.tool_formats.table import find_format
from support.grammar_walks import GrammarWalk
from support.outputs import ended_calls, parse

DATA = Path(__file__).parents[2] / "../shared/data/json_schema"
NOTATIONS = ("json", "hermes", "qwen3_coder", "glm45", "minimax_m2", "deepseek_v32", "kimi_k3", "gemma4", "pythonic")
CLOSING = b'"]}<)\n'  # drawn often: texts end early
MAX_TOKENS = 500


def data_schemas(name: str) -> list[tuple[str, Any]]:
    """Return the schemas of a file of ../shared/data with their names; none without it."""
    path = DATA / f"{name}.jsonl.gz"
    if not path.exists():
        return []
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    return [(row.get("name") or f"{row['file']}: {row['description']}", row["schema"]) for row in rows]


def as_arguments(schema: Any) -> dict[str, Any]:  # noqa: ANN401 (JSON)
    """Return a schema of arguments: the given one if it is of objects, else one of an object with it as a property."""
    if isinstance(schema, dict) and schema.get("type") == "object":
        return schema
    inside = _moved(schema, "#/$defs/whole")
    return {
        "type": "object", "properties": {"a": {"$ref": "#/$defs/whole"}}, "required": ["a"],
        "additionalProperties": False, "$defs": {"whole": inside},
    }  # fmt: skip


def _moved(schema: Any, place: str) -> Any:  # noqa: ANN401 (JSON)
    """Return a schema with its references to places in itself as they are when it is at another place."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    if isinstance(reference := moved.get("$ref"), str) and re.fullmatch(r"#(/.*)?", reference):
        moved["$ref"] = place + reference[1:]
    return moved


def fault_of(walks: GrammarWalk, notation: str, schema: Any, seeds: range) -> str:  # noqa: ANN401 (JSON)
    """Return what is wrong in a notation; "refused: ..." if the schema is refused, "" if nothing is.

    Outputs that do not end have no fault.
    """
    try:
        if notation == "json":
            grammar, tools = grammar_of(StructuredOutputsParams(json=schema)), []
        else:
            schema = as_arguments(schema)
            tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
            check_tool_schemas([schema], [0])
            grammar = forcing_grammar(find_format(notation), tools, is_parallel=False)
        if wrong := GrammarJobs()._fault(grammar):
            return f"refused: {wrong}"
    except (InvalidRequestError, ValueError, AssertionError) as error:
        return f"refused: {error}"
    for seed in seeds:
        try:
            text = walks.draw(grammar, seed, max_tokens=MAX_TOKENS, closing=CLOSING)
        except AssertionError as error:
            return str(error)
        if text is not None and (wrong := _misfit(notation, schema, tools, text)):
            return wrong
    return ""


def _misfit(notation: str, schema: Any, tools: list[dict[str, Any]], text: str) -> str:  # noqa: ANN401 (JSON)
    """Return what is wrong with an output; empty: nothing."""
    if notation != "json":
        calls = ended_calls(parse(notation, [text], tools=tools))
        if len(calls) != 1:
            return f"{text!r} is {len(calls)} calls"
        arguments = calls[0][1]
    else:
        arguments = text
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        error = next(validator(schema).iter_errors(json.loads(arguments)), None)
    except ValueError as wrong:
        return f"{text!r} is read as {arguments!r}: {wrong}"
    return "" if error is None else f"{text!r} is read as {arguments}: {error.message}"
