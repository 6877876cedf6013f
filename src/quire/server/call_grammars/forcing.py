"""Grammars that force tool calls, for llguidance: from the rows that the calls are read by, and the tools' schemas.

A grammar of required calls is the calls alone. A triggered one is any text, in which each call that begins is
constrained. What a grammar allows, the parser of the same row reads as calls of these tools.
"""

import html
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from quire.core.structured_outputs import compact_json
from quire.grammar_writing.texts import before_answer, closed_json_text, literal_text
from quire.server.call_grammars.literals import (
    NO_PARAMETERS,
    GemmaValues,
    Schema,
    choices,
    is_open,
    joined,
    properties,
    python_arguments,
    string_body,
    string_parts,
)
from quire.server.call_grammars.reasoning import bounded_reasoning, marker_id
from quire.server.call_grammars.rules import ANY_TEXT, Rules, alternatives
from quire.server.tool_formats.argument_types import types_of
from quire.server.tool_formats.rows import ReasoningFormat, ToolFormat
from quire.server.tool_formats.syntax import KEY, marker_of, split
from quire.server.tool_formats.table import FALLBACK

__all__ = ["bounded_reasoning", "forcing_grammar", "marker_id"]

_TEXT = frozenset({"string"})
_ANALYSIS = "<|channel|>analysis<|message|>"
_PREAMBLE = "<|channel|>commentary<|message|>"
_FINAL = "<|channel|>final<|message|>"
_NO_LIST = rf"{ANY_TEXT} & ~/\s*\[\s*\w+\s*\((?s:.*)/"
_NO_OBJECT = rf'{ANY_TEXT} & ~/\s*\{{\s*"name"(?s:.*)/'
_NO_ARRAY = rf'{ANY_TEXT} & ~/\s*\[\s*\{{\s*"name"(?s:.*)/'
_ANY_KEY = r"[^\n]{1,40}"  # escaped, a character takes up to six
MAX_CALLS = 128  # of one output


def forcing_grammar(
    row: ToolFormat | None,
    tools: Sequence[Mapping[str, Any]],
    *,
    is_triggered: bool = False,
    is_parallel: bool = True,
    special: Mapping[str, int] | None = None,
    reasoning: ReasoningFormat | None = None,
    answer: str | None = None,
) -> str:
    """Return the grammar of calls of the tools, in llguidance's Lark; of the fallback format without a row.

    `tools`: OpenAI's tool objects, those that may be called. `is_triggered`: text and no call at all are allowed; the
    arguments of tools that are not `strict` are then any object. `is_parallel`: several calls. `special`: ids of the
    tokenizer's special tokens, by their texts. `reasoning`: its markers, if special, may be in the text around calls.
    `answer`: grammar of the final message in place of a call, for formats with channels. ValueError, which names the
    property, for a tool that requires one that the format cannot write.
    """
    grammar = _CallGrammar(row or FALLBACK, tools, is_triggered, special or {})
    if answer is None:
        return grammar.text(is_parallel, reasoning)
    return before_answer(grammar.messages, answer)


class _CallGrammar:
    def __init__(
        self, row: ToolFormat, tools: Sequence[Mapping[str, Any]], is_triggered: bool, special: Mapping[str, int]
    ) -> None:
        self._row = row
        self._is_triggered = is_triggered
        self._rules = Rules(special)
        self._template = split(row.call)
        self._tools: list[tuple[str, Schema]] = []
        for tool in tools:
            function = tool.get("function", tool)
            schema = function.get("parameters") or NO_PARAMETERS
            if is_triggered and not function.get("strict"):
                schema = {"type": "object"}
            self._tools.append((function["name"], schema))

    def text(self, is_parallel: bool, reasoning: ReasoningFormat | None) -> str:
        """Return the whole grammar."""
        rules, row = self._rules, self._row
        if row.has_channels:
            return self.messages(ANY_TEXT if self._is_triggered else "")
        lead = row.section[0] or self._template[0]
        if not self._is_triggered:
            return rules.text(self._calls(lead.lstrip(), is_parallel))
        if row.is_bare:
            other = {"list": _NO_LIST, "calls": _NO_ARRAY}.get(self._template[1], _NO_OBJECT)
            return rules.text(f"{self._calls('', is_parallel)} | {rules.add(other)}")
        marker = marker_of(lead.lstrip())
        others = [text for pair in (reasoning.markers if reasoning else ()) for text in pair]
        free = rules.free_text([text for text in others if rules.is_special(text)])
        rest = self._calls(lead.lstrip().removeprefix(marker), is_parallel and bool(row.section[0]))
        call = rules.add(f"{free} {rules.text_before(marker)} {rest}")
        last = rules.add(f"{free} {ANY_TEXT}")
        return rules.text(f"{call}{{0,{MAX_CALLS}}} {last}" if is_parallel else f"{call} | {last}")

    def _calls(self, lead: str, is_parallel: bool) -> str:
        """Return an expression for one call or several; `lead` is written in front of the first one."""
        rules, row, template = self._rules, self._row, self._template
        more = f"{{0,{MAX_CALLS - 1}}}" if is_parallel else ""
        field = template[1]
        if field in ("calls", "list"):
            write = self._json_call if field == "calls" else self._python_call
            calls = rules.add(self._each(partial(write, lead=lead + "[")))  # one lexeme: free text must not begin so
            if more:
                calls += f" ({literal_text(row.separator)} {rules.add(self._each(write))}){more}"
            return f"{calls} {rules.literal(']' + template[-1])}"
        call = rules.add(self._each(self._json_call if field == "call" else self._named_call))
        if not row.section[0]:
            return f"{rules.literal(lead)} {call}" + (
                f" ({rules.literal(row.separator + template[0])} {call}){more}" if more else ""
            )
        between = rules.literal(row.separator + template[0])
        calls = f"{rules.literal(lead + template[0])} {call}" + (f" ({between} {call}){more}" if more else "")
        return f"{calls} {rules.literal(row.section[1])}"

    def _each(self, expression: Callable[[str, Schema], str]) -> str:
        return alternatives([self._rules.add(_named(expression, name, schema)) for name, schema in self._tools])

    def _json_call(self, name: str, schema: Schema, lead: str = "") -> str:
        """Return an expression for an object with the name and arguments of a call, and what closes it."""
        rules, row = self._rules, self._row
        key, arguments = row.keys
        tail = self._template[-1] if self._template[1] == "call" else ""
        head = f"{compact_json(key)}: {compact_json(name)}, {compact_json(arguments)}: "
        before = rules.literal(f"{lead}{{{compact_json(name)}: " if row.has_name_as_key else f"{lead}{{{head}")
        if row.index_key:
            number = f'{rules.literal(f"{lead}{{{compact_json(row.index_key)}: ")} /"[0-9]{{1,3}}"/'
            before = f"{number} {rules.literal(', ' + head)}"
        return f"{before} {closed_json_text(schema)} {rules.literal('}' + tail)}"

    def _python_call(self, name: str, schema: Schema, lead: str = "") -> str:
        return f'{self._rules.literal(f"{lead}{name}(")} {python_arguments(self._rules, schema)} ")"'

    def _named_call(self, name: str, schema: Schema) -> str:
        """Return an expression for a call from behind its first text on."""
        rules, row = self._rules, self._row
        parts = []
        for field, text in zip(self._template[1::2], self._template[2::2], strict=True):
            if field == "name":
                parts.append(rules.literal(html.escape(name) if row.is_escaped else name))
            elif field == "arguments":
                is_gemma = row.notation == "gemma"
                values = GemmaValues(rules, schema, row.quote)
                parts.append(values.object_text(schema) if is_gemma else closed_json_text(schema))
            elif field == "parameters":
                parts.append(self._parameters(schema))
            elif field == "index":
                parts.append("/[1-9][0-9]{0,2}/")
            elif field == ":index":
                parts.append('":" /[0-9]{1,3}/')
            else:
                parts.append(rules.literal(field.removeprefix("?")))
            parts += [rules.literal(text)] if text else []
        return " ".join(parts)

    def _parameters(self, schema: Schema) -> str:
        """Return an expression for tagged parameters."""
        parts = [
            (self._rules.add(self._parameter(key, part, types_of(schema, key))), is_required)
            for key, part, is_required in properties(schema, _ANY_KEY if self._row.is_escaped else KEY)
        ]
        if is_open(schema):
            keys = self._rules.add("/[A-Za-z_][A-Za-z0-9_]{0,63}/")
            return f"{self._tagged(keys, {}, _TEXT)}{{0,{MAX_CALLS}}}"
        return joined(self._rules, parts, "")

    def _parameter(self, key: str, part: dict[str, Any], types: frozenset[str]) -> str:
        written = self._rules.literal(html.escape(key) if self._row.is_escaped else key)
        options = []
        if "string" in types or not types:
            options += [self._tagged(written, each, _TEXT) for each in string_parts(part)] or [
                self._tagged(written, {}, _TEXT)
            ]
        if types - _TEXT:
            options.append(self._tagged(written, _without_strings(part), types - _TEXT))
        return alternatives(options)

    def _tagged(self, key: str, part: Mapping[str, Any], types: frozenset[str]) -> str:
        """Return an expression for one parameter: raw text if the types are that of strings, else JSON."""
        rules, pieces = self._rules, split(self._row.parameter)
        is_text = types == _TEXT
        parts = [rules.literal(pieces[0]), key]
        for field, text in zip(pieces[3:-2:2], pieces[4:-1:2], strict=True):
            assert field == "type", field
            parts.append(rules.literal(pieces[2] + self._type_name(types)))
            parts.append(rules.literal(text))
        if len(pieces) == 5:
            parts.append(rules.literal(pieces[2]))
        end = pieces[-1]
        if not is_text:
            return " ".join([*parts, closed_json_text(part), rules.literal(end)])
        if (values := choices(part)) is not None:
            texts = [value for value in values if isinstance(value, str)]
            return " ".join([*parts, rules.one_of(texts), rules.literal(end)])
        close = end.strip()
        line = end.startswith("\n")
        body = string_body(part, "[^\\n]" if line else "(?s:.)")
        if body != ANY_TEXT and line:
            body = body[:-1] + "\\n?/"
        without = [marker_of(self._template[-1]), *(["\n" + marker_of(pieces[0])] if line else [])]
        text = rules.text_before(close, without, body)
        return " ".join([*parts, text, *([rules.literal(end[len(end.rstrip()) :])] if end[-1].isspace() else [])])

    def _type_name(self, types: frozenset[str]) -> str:
        if 'string="' in self._row.parameter:
            return "true" if types == _TEXT else "false"
        return "number" if types <= {"integer", "number"} else min(types)

    def messages(self, final: str) -> str:
        """Return the grammar of Harmony's messages: reasoning and preambles, then a call, or `final` as the answer."""
        rules = self._rules
        heads = alternatives([rules.add(rules.literal(head)) for head in (_ANALYSIS, _PREAMBLE)])
        message = rules.add(f"{heads} {rules.text_before('<|end|>')} {rules.literal('<|start|>assistant')}")
        ends = []
        if self._tools:
            ends.append(rules.add(f"{rules.literal(self._template[0])} {self._each(self._named_call)}"))
        if final:
            ends.append(f"{rules.literal(_FINAL)} {final}")
        return rules.text(f"{message}{{0,{MAX_CALLS}}} {alternatives(ends)}")


def _named(expression: Callable[[str, Schema], str], name: str, schema: Schema) -> str:
    """Return the expression of a tool's calls. ValueError with the tool's name."""
    try:
        return expression(name, schema)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


def _without_strings(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of the values of another one that are no strings."""
    result = dict(part)
    if isinstance(part.get("type"), list):
        result["type"] = [name for name in part["type"] if name != "string"]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(branches := part.get(keyword), list):
            result[keyword] = [each for each in branches if types_of({**part, "properties": {"": each}}, "") != _TEXT]
    if isinstance(part.get("enum"), list):
        result["enum"] = [value for value in part["enum"] if not isinstance(value, str)]
    return result
