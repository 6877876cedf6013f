"""Grammar texts: the constraints of structured outputs in the grammar language of llguidance.

A text is Lark with llguidance's extensions (`%json`, `/regex/`, rule attributes), or JSON of the form
`{"grammars": [{"name": str, "lark_grammar": str}, ...]}`, where the first grammar is the start and the others are
referenced by `@name`. Pure text functions: nothing is compiled here.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any

from quire.core.structured_outputs import compact_json
from quire.grammar_writing.disjoint_schemas import without_disjoint_one_of
from quire.grammar_writing.plain_schemas import plain_schema
from quire.grammar_writing.scalars import with_written_numbers
from quire.grammar_writing.schemas import rewritten_below

NO_TOKENS: Mapping[str, int] = MappingProxyType({})
NO_FORCING = '%llguidance {"no_forcing": true}\n'

_ESCAPES_BUT_CODES = 'nrbtf\\"'  # JSON's escapes but characters by their numbers

# At most one line break with its indentation, or two blanks: small models would write blanks until max_tokens.
WHITESPACE_PATTERN = r"\n[ \t]{0,16}|[ \t]{0,2}"


def json_text(schema: Any, whitespace: str | None = WHITESPACE_PATTERN) -> str:  # noqa: ANN401 (JSON)
    """Return an expression for JSON that a schema accepts. `whitespace`: regex of what may stand between two lexemes.

    None: nothing. What constrains nothing is dropped (`plain_schemas`). `oneOf` becomes `anyOf` where its branches
    exclude each other. `x-guidance` of the schema, llguidance's own options, wins over all.
    """
    return _json_text(without_named_patterns(without_disjoint_one_of(plain_schema(schema))), whitespace)


def closed_json_text(schema: Any) -> str:  # noqa: ANN401 (JSON)
    """Return an expression for the JSON of a schema that is plain, without properties that its objects do not name.

    Where schemas of one object are combined, or a `oneOf` stays one, objects stay open: closed, they might exclude each
    other where they do not.
    """
    return _json_text(schema if _is_combined(schema) else closed_objects(schema), WHITESPACE_PATTERN)


def _json_text(schema: Any, whitespace: str | None) -> str:  # noqa: ANN401 (JSON)
    options: dict[str, Any] = {"whitespace_flexible": False}
    if whitespace is not None:
        options = {"whitespace_pattern": whitespace}
    schema = {} if schema is True else schema
    if isinstance(schema, dict):
        if _has_open_objects(schema):  # a name with escaped letters would be that of a named property, once more
            options["json_allowed_escapes"] = _ESCAPES_BUT_CODES
        given = schema.get("x-guidance")
        schema = schema | {"x-guidance": options | given if isinstance(given, dict) else options}
    return f"%json {compact_json(with_written_numbers(schema))}"


def _has_open_objects(schema: object) -> bool:
    """Return whether a schema anywhere names properties of an object that may have others."""
    if isinstance(schema, list):
        return any(map(_has_open_objects, schema))
    if not isinstance(schema, dict):
        return False
    is_open = "properties" in schema and schema.get("additionalProperties") is not False
    return is_open or any(map(_has_open_objects, schema.values()))


def _is_combined(schema: object) -> bool:
    """Return whether a schema anywhere has several schemas of one object that may name different properties."""
    if isinstance(schema, list):
        return any(map(_is_combined, schema))
    if not isinstance(schema, dict):
        return False
    num_naming = int(bool(schema.keys() & _OBJECTS)) + ("$ref" in schema)
    all_of, any_of = schema.get("allOf"), schema.get("anyOf")
    num_naming += sum(map(_may_name, all_of)) if isinstance(all_of, list) else 0
    num_naming += any(map(_may_name, any_of)) if isinstance(any_of, list) else 0
    return num_naming > 1 or "oneOf" in schema or any(map(_is_combined, schema.values()))


def _may_name(branch: object) -> bool:
    """Return whether a branch of a schema may name properties."""
    return isinstance(branch, dict) and bool(branch.keys() & {*_OBJECTS, "$ref", "allOf", "anyOf", "oneOf"})


def schema_fault(reason: str) -> str:
    """Return what llguidance says against a schema, in the words of JSON schema."""
    text = reason.rpartition("failed to compile JSON schema: ")[2]
    if text.startswith("oneOf constraints are not supported."):
        text = f"unsupported keyword: oneOf with branches that may both fit; write anyOf{text.partition('anyOf')[2]}"
    return text.replace("Unimplemented keys:", "unsupported keywords:")


def literal_text(text: str) -> str:
    """Return an expression for one string."""
    return json.dumps(text, ensure_ascii=False)


def choice_text(choices: Sequence[str]) -> str:
    """Return the grammar of one of several strings: a single terminal, so that common beginnings cost nothing."""
    return f"start: CHOICE\nCHOICE: {' | '.join(map(literal_text, choices))}\n"


def regex_text(pattern: str, *, is_of_schema: bool = False) -> str:
    r"""Return an expression for the texts that a regex in Python's syntax matches from beginning to end.

    `\d` is 0 to 9, and `[` in a set of characters is itself, unless it begins a class such as `[:alpha:]`.
    `is_of_schema`: `\w` has the ASCII letters, digits and underscore alone, as in JSON Schema.
    """
    return f"/{''.join(_regex_parts(pattern, _WORDS if is_of_schema else {}))}/"


def _regex_parts(pattern: str, words: Mapping[bool, Mapping[str, str]]) -> Iterable[str]:
    """Yield the pattern in pieces, with Python's meaning and without what would end it early."""
    is_in_set, position = False, 0
    while position < len(pattern):
        piece = pattern[position : position + (2 if pattern[position] == "\\" else 1)]
        position += len(piece)
        if piece == "[" and not is_in_set:
            is_in_set = True
            head = next(h for h in ("^]", "]", "^", "") if pattern.startswith(h, position))  # `]` here ends nothing
            position += len(head)
            yield piece + head.replace("]", "\\]")
        elif piece == "[":
            end = pattern.find(":]", position) if pattern.startswith(":", position) else -1
            yield "\\[" if end < 0 else pattern[position - 1 : end + 2]
            position = position if end < 0 else end + 2
        else:
            is_in_set = is_in_set and piece != "]"
            word = words.get(is_in_set, {}).get(piece)
            yield word or _DIGITS[is_in_set].get(piece) or _ESCAPED.get(piece, piece)


_ESCAPED = {"/": "\\/", "\n": "\\n", "\r": "\\r", "\\\n": "\\n"}
_DIGITS = {False: {"\\d": "[0-9]", "\\D": "[^0-9]"}, True: {"\\d": "0-9", "\\D": "[^0-9]"}}
_WORDS = {False: {"\\w": "[A-Za-z0-9_]"}, True: {"\\w": "A-Za-z0-9_"}}  # ECMA-262's; a grammar's `\W` is narrower


def closed_objects(schema: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return a schema of objects without properties but those named, unless `additionalProperties` says otherwise.

    Objects are the subschemas with `properties` or `patternProperties`.
    """
    closed = rewritten_below(schema, closed_objects)
    if isinstance(closed, dict) and "additionalProperties" not in closed:
        return closed | ({"additionalProperties": False} if closed.keys() & _OBJECTS else {})
    return closed


_OBJECTS = {"properties", "patternProperties"}
_NAME_PATTERN = re.compile(r"\^([\w -]+)\$")


def without_named_patterns(schema: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return a schema in which patterns of properties that match one named property, `^name$`, are merged into it.

    The property must then match both schemas. Otherwise the grammar would allow a comma after the last property, for a
    further property of the pattern, and no property could follow.
    """
    result = rewritten_below(schema, without_named_patterns)
    if not isinstance(result, dict):
        return result
    named, patterns = result.get("properties"), result.get("patternProperties")
    if not isinstance(named, dict) or not isinstance(patterns, dict):
        return result
    for pattern, both in list(patterns.items()):
        fits = _NAME_PATTERN.fullmatch(pattern)
        if fits is not None and fits[1] in named:
            named[fits[1]] = {"allOf": [named[fits[1]], both]}
            del patterns[pattern]
    if not patterns:
        del result["patternProperties"]
    return result


_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_LARK_START = re.compile(r"^[ \t]*(start[ \t]*:(?!:)|%llguidance)", re.MULTILINE)


def lark_from(grammar: str) -> str:
    """Return a grammar in Lark, in GBNF (`root ::= ...`), or in llguidance's JSON as text for llguidance.

    ValueError, with the place, for GBNF that cannot be converted.
    """
    if grammar.lstrip().startswith("{") or not _GBNF_RULE.search(grammar) or _LARK_START.search(grammar):
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415 (a compiled library, only for these grammars)

    try:
        return any_to_lark(grammar)
    except Exception as error:  # (its errors derive from Exception alone)
        raise ValueError(f"the grammar cannot be converted from GBNF: {error}") from error


def after_reasoning(
    grammar: str, end_marker: str, *, start_marker: str | None = None, special: Mapping[str, int] = NO_TOKENS,
    max_tokens: int | None = None,
) -> str:  # fmt: skip
    """Return the grammar of any text up to and including `end_marker`, at most two line breaks, then `grammar`.

    With `start_marker` the text begins with that, and all of it may be left out. `special`: ids of the tokenizer's
    special tokens, by their texts. `max_tokens`: most tokens of the text, if `end_marker` is a special token.
    ValueError for a grammar in JSON that has no list of grammars.
    """
    parts, answer = _referable(grammar, "answer", set())
    end = marker_text(end_marker, special)
    before = "" if start_marker is None else f"{marker_text(start_marker, special)} "
    start = f"{before}reasoning GAP @{answer}" + ("" if start_marker is None else f" | @{answer}")
    if end == literal_text(end_marker):
        reasoning = f"reasoning[suffix={end}]: /(?s:.*)/"
    elif max_tokens is None:
        reasoning = f"reasoning: TEXT {end}\nTEXT: /(?s:.*)/"
    elif max_tokens == 0:
        reasoning = f"reasoning: {end}"
    else:
        reasoning = f"reasoning: text {end}\ntext[max_tokens={max_tokens}]: /(?s:.*)/"
    first = f"start: {start}\n{reasoning}\nGAP: /\\n{{0,2}}/\n"
    return compact_json({"grammars": [{"lark_grammar": first}, *parts]})


def either(first: str, second: str) -> str:
    """Return the grammar of the texts of two grammars. No text of one may begin as a free text of the other does.

    ValueError for JSON as `after_reasoning`, and for grammars that have the same names.
    """
    parts, name = _referable(first, "first", {part.get("name") for part in _grammars(second)})
    others, other_name = _referable(second, "second", {part.get("name") for part in parts})
    shared = {part.get("name") for part in parts} & {part.get("name") for part in others}
    if shared:
        raise ValueError(f"two grammars have the same names: {', '.join(map(str, shared))}")
    return compact_json({"grammars": [{"lark_grammar": f"start: @{name} | @{other_name}\n"}, *parts, *others]})


def without_forcing(grammar: str) -> str:
    """Return a grammar of the same texts, of which masks allow each spelling. ValueError as `after_reasoning`."""
    parts = _grammars(grammar)
    first = parts[0].get("lark_grammar")
    if not isinstance(first, str) or "no_forcing" in first:
        return grammar
    parts[0] = parts[0] | {"lark_grammar": NO_FORCING + first}
    return parts[0]["lark_grammar"] if len(parts) == 1 else compact_json({"grammars": parts})


def before_answer(write: Callable[[str], str], answer: str) -> str:
    """Return the grammar that `write` returns when it is given the reference to another grammar, with that one.

    ValueError for JSON as `after_reasoning`.
    """
    parts, name = _referable(answer, "answer", set())
    return compact_json({"grammars": [{"lark_grammar": write(f"@{name}")}, *parts]})


def marker_text(text: str, special: Mapping[str, int] = NO_TOKENS) -> str:
    """Return an expression for a text that may contain special tokens: as text, those would be other tokens."""
    longest_first = sorted(special, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if special else [text]
    return " ".join(f"<[{special[piece]}]>" if piece in special else literal_text(piece) for piece in pieces if piece)


def _referable(grammar: str, name: str, taken: set[Any]) -> tuple[list[dict[str, Any]], str]:
    """Return the grammars of a text, of which the first has a name by which others refer to it, and that name."""
    parts = _grammars(grammar)
    taken = taken | {part.get("name") for part in parts}
    free = next(numbered for number in count() if (numbered := f"{name}_{number}") not in taken)
    parts[0] = parts[0] | {"name": free}
    return parts, free


def _grammars(text: str) -> list[dict[str, Any]]:
    """Return the list of a text's grammars, the first of which is its start. ValueError for other JSON."""
    if not text.lstrip().startswith("{"):
        return [{"lark_grammar": text}]
    grammars = json.loads(text).get("grammars")
    if not isinstance(grammars, list) or not grammars or not all(isinstance(each, dict) for each in grammars):
        raise ValueError('a grammar in JSON must be an object with "grammars", a list of objects')
    return grammars
