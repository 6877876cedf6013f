"""Grammars that force tool calls, for llguidance: from the rows that the calls are read by, and the tools' schemas.

A grammar of required calls is the calls alone. A triggered one is any text, in which each call that begins is
constrained. What a grammar allows, the parser of the same row reads as calls of these tools. Grammars that limit the
number of reasoning tokens alone are here, too.
"""

import html
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from quire.core.structured_outputs import compact_json
from quire.grammar_writing.schema_shapes import Budget, Document, Shape
from quire.grammar_writing.schemas import SchemaPart
from quire.grammar_writing.texts import before_answer, closed_json_text, literal_text
from quire.server.tools.grammar_rules import (
    ANY_TEXT,
    GrammarRules,
    GrammarSizeError,
    alternatives,
    enumerated_texts,
    has_regexes,
    text_body,
)
from quire.server.tools.literal_arguments import GemmaValues, arguments_text, python_arguments, types_of
from quire.server.tools.object_grammars import ObjectNotation
from quire.text.tool_formats.table import FALLBACK
from quire.text.tool_formats.tool_format import (
    KEY,
    ReasoningFormat,
    ToolFormat,
    json_value,
    marker_of,
    misread_texts,
    reads_json,
    split,
)

Schema = Mapping[str, Any]
NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
_TEXT = frozenset({"string"})
_ANY: frozenset[str] = frozenset()
_ALL_TYPES = ("null", "boolean", "number", "string", "array", "object")
_NO_NAME = "\n"  # names no parameter: its types are those of parameters that a schema does not name
_OTHER_KEY = r"[^<>\"{}&\s]{1,64}"
_ANALYSIS = "<|channel|>analysis<|message|>"
_PREAMBLE = "<|channel|>commentary<|message|>"
_FINAL = "<|channel|>final<|message|>"
_NO_LIST = rf"{ANY_TEXT} & ~/\s*\[\s*\w+\s*\((?s:.*)/"
_NO_OBJECT = rf'{ANY_TEXT} & ~/\s*\{{\s*"name"(?s:.*)/'
_NO_ARRAY = rf'{ANY_TEXT} & ~/\s*\[\s*\{{\s*"name"(?s:.*)/'
_ANY_KEY = r"[^{}\n]{1,40}"  # escaped, a character takes up to six
MAX_CALLS = 128  # bound per output


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
    tool, the place and the keyword, for a schema that the notation of the calls cannot hold.
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
        self._rules = GrammarRules(special)
        self._template = split(row.call)
        self._tools: list[_Tool] = []
        budget = Budget()
        for tool in tools:
            function = tool.get("function", tool)
            schema = function.get("parameters") or NO_PARAMETERS
            if is_triggered and not function.get("strict"):
                schema = {"type": "object"}
            self._tools.append(_Tool(function["name"], schema, Document(schema, budget)))

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
            return rules.text(f"{self._calls('', is_parallel)} | {rules.add(other, is_terminal=True)}")
        marker = marker_of(lead.lstrip())
        others = [text for pair in (reasoning.markers if reasoning else ()) for text in pair]
        free = rules.free_text([text for text in others if rules.is_special(text)])
        rest = self._calls(lead.lstrip().removeprefix(marker), is_parallel and bool(row.section[0]))
        unread = [text for text in self._other_markers() if not marker.startswith(text)]
        call = rules.add(f"{free} {rules.text_before(marker, unread)} {rest}")
        last = rules.add(f"{free} {rules.text_without([marker, *unread])}")
        return rules.text(f"{call}{{0,{MAX_CALLS}}} {last}" if is_parallel else f"{call} | {last}")

    def _other_markers(self) -> list[str]:
        """Return the texts that begin calls where these are not written so: text around calls has none of them."""
        templates = (self._row.call, *self._row.variants)
        return list(dict.fromkeys(filter(None, (marker_of(split(text)[0].lstrip()) for text in templates))))

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

    def _each(self, expression: Callable[["_Tool"], str]) -> str:
        return alternatives([self._rules.add(_named(expression, tool)) for tool in self._tools])

    def _json_call(self, tool: "_Tool", lead: str = "") -> str:
        """Return an expression for an object with the name and arguments of a call, and what closes it."""
        rules, row, name = self._rules, self._row, tool.name
        key, arguments = row.keys
        tail = self._template[-1] if self._template[1] == "call" else ""
        head = f"{compact_json(key)}: {compact_json(name)}, {compact_json(arguments)}: "
        before = rules.literal(f"{lead}{{{compact_json(name)}: " if row.has_name_as_key else f"{lead}{{{head}")
        if row.index_key:
            number = f'{rules.literal(f"{lead}{{{compact_json(row.index_key)}: ")} /"[0-9]{{1,3}}"/'
            before = f"{number} {rules.literal(', ' + head)}"
        return f"{before} {self._json(tool)} {rules.literal('}' + tail)}"

    def _json(self, tool: "_Tool") -> str:
        return self._rules.add(closed_json_text(tool.document.whole()))

    def _python_call(self, tool: "_Tool", lead: str = "") -> str:
        return f'{self._rules.literal(f"{lead}{tool.name}(")} {python_arguments(self._rules, tool.document)} ")"'

    def _named_call(self, tool: "_Tool") -> str:
        """Return an expression for a call from behind its first text on."""
        rules, row = self._rules, self._row
        parts = []
        for field, text in zip(self._template[1::2], self._template[2::2], strict=True):
            if field == "name":
                parts.append(rules.literal(html.escape(tool.name) if row.is_escaped else tool.name))
            elif field == "arguments" and row.notation == "gemma":
                parts.append(GemmaValues(rules, tool.document, row.quote).arguments())
            elif field == "arguments":
                parts.append(self._json(tool))
            elif field == "parameters":
                parts.append(self._parameters(tool))
            elif field == "index":
                parts.append("/[1-9][0-9]{0,2}/")
            elif field == ":index":
                parts.append('":" /[0-9]{1,3}/')
            else:
                parts.append(rules.literal(field.removeprefix("?")))
            parts += [rules.literal(text)] if text else []
        return " ".join(parts)

    def _parameters(self, tool: "_Tool") -> str:
        """Return an expression for tagged parameters."""
        values: dict[tuple[Any, ...], list[Shape]] = {}

        def pair(name: str, parts: list[SchemaPart], key: str | None) -> str | None:
            targets = [tool.document.target(part) for part in parts]
            identity = tuple(id(part.schema) for part in targets)
            if identity not in values:
                values[identity] = tool.document.shapes(targets)
            types = types_of(tool.schema, _NO_NAME if key is None else key)
            return self._parameter(name, tool.document, values[identity], types)

        def name(key: str) -> str:
            return self._rules.literal(html.escape(key) if self._row.is_escaped else key)

        key_pattern = _ANY_KEY if self._row.is_escaped else KEY
        return arguments_text(self._rules, tool.document, ObjectNotation(pair, name, "", key_pattern, _OTHER_KEY))

    def _parameter(self, name: str, document: Document, shapes: list[Shape], types: frozenset[str]) -> str | None:
        """Return an expression for one parameter; None if none of its values can be written.

        `types`: those by which its text is read, where it is not marked with its type.
        """
        is_marked = "{type}" in self._row.parameter
        if not is_marked and len(shapes) == len(_ALL_TYPES) and not any(shape.parts for shape in shapes):
            return self._tagged(name, _TEXT, self._text(""))  # whatever a text is read as fits
        text_types, json_types = (_TEXT, _ANY) if is_marked else (types, types)
        texts = [self._string(shape, text_types) for shape in shapes if shape.kind == "string"]
        options = [self._tagged(name, _TEXT, text) for text in texts if text is not None]
        others = [shape for shape in shapes if shape.kind != "string" and reads_json(shape.kind, json_types)]
        if others:
            value = self._rules.add(closed_json_text(document.alone(others)))
            end = self._rules.literal(split(self._row.parameter)[-1])
            options.append(self._tagged(name, frozenset(shape.kind for shape in others), f"{value} {end}"))
        return alternatives(options) if options else None

    def _string(self, shape: Shape, types: frozenset[str]) -> str | None:
        """Return an expression for raw text that is read as a string which fits a shape, and its end."""
        rules, end = self._rules, split(self._row.parameter)[-1]
        texts = enumerated_texts(shape)
        if texts is None:
            return self._text(text_body(rules, shape, None, misread_texts(types)))
        ends = (end.strip(), *self._other_ends())
        texts = [text for text in texts if not any(each in text for each in ends)]
        texts = [text for text in texts if json_value(text, types) == json.dumps(text, ensure_ascii=False)]
        if not texts:
            return None
        body = text_body(rules, shape, texts) if has_regexes(shape) else rules.one_of(texts)
        return f"{body} {rules.literal(end)}"

    def _text(self, body: str) -> str:
        """Return an expression for raw text by a terminal, or any, and its end."""
        rules, end = self._rules, split(self._row.parameter)[-1]
        if body and end.startswith("\n"):
            body = rules.add(f'{body} "\\n"', is_terminal=True)
        text = rules.text_before(end.strip(), self._other_ends(), body)
        return f"{text} {rules.literal(end[len(end.rstrip()) :])}" if end[-1].isspace() else text

    def _other_ends(self) -> list[str]:
        """Return the texts that end the value of a parameter beside its own end."""
        pieces = split(self._row.parameter)
        line = ["\n" + marker_of(pieces[0])] if pieces[-1].startswith("\n") else []
        return [marker_of(self._template[-1]), *line]

    def _tagged(self, name: str, types: frozenset[str], value: str) -> str:
        """Return an expression for one parameter, by the expressions of its name and of its value with its end."""
        rules, pieces = self._rules, split(self._row.parameter)
        parts = [rules.literal(pieces[0]), name]
        for field, text in zip(pieces[3:-2:2], pieces[4:-1:2], strict=True):
            assert field == "type", field
            parts.append(rules.literal(pieces[2] + self._type_name(types)))
            parts.append(rules.literal(text))
        if len(pieces) == 5:
            parts.append(rules.literal(pieces[2]))
        return " ".join([*parts, value])

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


class _Tool(NamedTuple):
    """A tool that may be called: the schema of its arguments as given, and made plain."""

    name: str
    schema: Schema
    document: Document


def _named(expression: Callable[[_Tool], str], tool: _Tool) -> str:
    """Return the expression of a tool's calls. ValueError with the tool's name."""
    try:
        return expression(tool)
    except GrammarSizeError:
        raise
    except ValueError as error:
        raise ValueError(f"{tool.name} {error}") from error


def bounded_reasoning(end: int, start: int | None, max_tokens: int) -> str:
    """Return the grammar of any output with at most `max_tokens` tokens of reasoning before the token `end`.

    `start`: token that begins reasoning; an output with another first token has none. None: the output begins with
    reasoning. An output may end during reasoning, before the limit.
    """
    other, rest = f"<[^{end}]>", "<[*]>*"
    whole = f"<[{end}]> {rest}"
    if max_tokens > 0:
        ended = f"{other}{{0,{max_tokens - 1}}}" if max_tokens > 1 else '""'
        whole = f"{ended} | {other}{{0,{max_tokens}}} {whole}"
    if start is None:
        return f"start: {whole}\n"
    return f'start: "" | <[^{start}]> {rest} | <[{start}]> reasoning\nreasoning: {whole}\n'


def marker_id(text: str, special: Mapping[str, int]) -> int | None:
    """Return the id of a marker that is one special token, whatever spaces are around it; None for other markers."""
    return special.get(text.strip())
