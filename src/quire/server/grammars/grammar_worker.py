"""The grammar process: `python -m quire.server.grammars.grammar_worker FD`, a sandbox.

Grammars, schemas and regexes are programs for a parser, and some take hours or gigabytes. A constraint that passes here
has been compiled, and the first masks were computed, over the 256 bytes as a vocabulary.
"""

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire.core import logs
from quire.core.errors import InvalidRequestError
from quire.core.frames import frame
from quire.core.structured_outputs import (
    GRAMMAR_LIMITS,
    StructuredOutputsParams,
    check_json_bytes,
    check_schema,
    has_text,
    structured_outputs_from,
)
from quire.grammar_writing.texts import NO_FORCING, schema_fault
from quire.grammar_writing.writer import grammar_of, place_of_fault
from quire.server.grammars.grammar_checker import (
    CHECK_LIMIT_S,
    Checked,
    CheckGrammar,
    ConstraintRefused,
    GrammarLimits,
    LimitsLoaded,
    LoadLimits,
    decode_command,
)
from quire.server.limits.sandbox_worker import serve_jobs

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d{1,9})(?:,(\d{0,9}))?\}|[()]|.", re.DOTALL)
LIMITS = LLParserLimits(**GRAMMAR_LIMITS)
_STEPS = 8                  # tokens by which a grammar is tried: limits of a step strike early
_MAX_REASON_CHARS = 500
_TERMINAL = re.compile(r"^(R[0-9]+): (.*)$", re.MULTILINE)  # a terminal of a grammar that the server made
_NAME = re.compile(r"\bR[0-9]+\b")


def regex_length(pattern: str) -> int:
    """Return how many characters a pattern has, those of a repeated part counted as often as it may be repeated.

    `{n,}` counts n times, `*` and `+` once. Linear in the pattern.
    """
    totals, last = [0], 0               # open groups; the part that a repetition would repeat
    for token in _TOKEN.finditer(pattern):
        text = token[0]
        if text == "(":
            totals.append(0)
        elif text == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif token[1] is not None:
            repeated = last * max(1, int(token[1]), int(token[2] or 0))
            totals[-1] += repeated - last
            last = repeated
        else:
            last = 1
            totals[-1] += 1
    return sum(totals)


class GrammarJobs:
    """The limits, once they are loaded, and the answers to commands."""

    def __init__(self) -> None:
        self._limits: GrammarLimits | None = None
        self._bytes = LLTokenizer("byte")

    def answer(self, body: bytes) -> bytes:
        """Return the frame of the reply to a command."""
        command = decode_command(body)
        if isinstance(command, LoadLimits):
            self._limits = command.limits
            return frame(LimitsLoaded())
        assert self._limits is not None, "the first command must be LoadLimits"
        try:
            return frame(Checked(self._checked(command, self._limits)))
        except InvalidRequestError as error:
            return frame(_refusal(error, command.names))

    def _checked(self, command: CheckGrammar, limits: GrammarLimits) -> str:
        """Return the grammar of a constraint, "" for one of the server. InvalidRequestError names its field."""
        if command.is_own:
            if reason := self._fault(command.fields["grammar"]):
                raise InvalidRequestError(f"grammar cannot be enforced: {_in_short(reason)}", param="grammar")
            return ""
        for name in ("json", "structural_tag"):
            text = command.fields.get(name)
            if isinstance(text, str) and len(text) <= limits.schema.max_schema_bytes:
                command.fields[name] = _decoded(name, text)
        _check_limits(command.fields, limits)
        params = structured_outputs_from(command.fields)
        grammar = grammar_of(params)
        if params.grammar is not None:
            if "no_forcing" in grammar or grammar.lstrip().startswith("{"):
                raise InvalidRequestError("grammar must be Lark or GBNF, without no_forcing", param="grammar")
            grammar = NO_FORCING + grammar  # a forced text of a client's grammar may be of any length
        if reason := self._fault(grammar):
            [field] = [name for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
                       if getattr(params, name)]  # fmt: skip
            place = _place(params, reason, self._fault) if field == "json" else ""
            raise InvalidRequestError(f"{field} cannot be a grammar{place}: {_in_short(reason)}", param=field)
        return grammar

    def _fault(self, grammar: str) -> str:
        """Return what is wrong with a grammar; empty: nothing."""
        is_error, notes = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
        if is_error:
            return str(notes[0])
        if any("special_token" in note for note in notes):
            return ""           # tokens of the model, which this process does not have
        matcher = LLMatcher(self._bytes, grammar, log_level=0, limits=LIMITS)
        for _ in range(_STEPS):
            if matcher.is_error() or matcher.is_stopped():
                break
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            matcher.compute_ff_bytes()
            if not matcher.is_error() and not matcher.is_accepting():
                matcher.consume_token((mask & -mask).bit_length() - 1)
        if matcher.is_error():
            return str(matcher.get_error())
        if not has_text(matcher):
            return "it allows no text"
        return self._empty_terminal(grammar)

    def _empty_terminal(self, grammar: str) -> str:
        """Return what is wrong with an intersection that no text fits, up to which an output could lead; or nothing."""
        terminals = dict(_TERMINAL.findall(grammar))
        for name, expression in terminals.items():
            if " & " in expression:
                used = {below: terminals[below] for below in _NAME.findall(expression) if below in terminals}
                rules = "".join(f"{below}: {terminals[below]}\n" for below in {**used, name: ""})
                matcher = LLMatcher(self._bytes, f"start: {name}\n{rules}", log_level=0, limits=LIMITS)
                if not has_text(matcher):
                    return f"no text fits all of {expression[:_MAX_REASON_CHARS]}"
        return ""


def _decoded(field: str, text: str) -> Any:  # noqa: ANN401 (JSON)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field} must be JSON: {error}", param=field) from error


def _check_limits(fields: dict[str, Any], limits: GrammarLimits) -> None:
    """Raise InvalidRequestError for the first field past its limit."""
    for name, most, flag in (
        ("grammar", limits.max_grammar_bytes, "max_grammar_bytes"),
        ("regex", limits.max_regex_bytes, "max_regex_bytes"),
        ("whitespace_pattern", limits.max_regex_bytes, "max_regex_bytes"),
        ("choice", limits.schema.max_schema_bytes, "max_schema_bytes"),
    ):
        if fields.get(name) is not None:
            check_json_bytes(name, fields[name], most, flag)
    choices = fields.get("choice")
    if isinstance(choices, list) and len(choices) > limits.max_choice_texts:
        message = f"choice must have at most {limits.max_choice_texts} texts (max_choice_texts), got {len(choices)}"
        raise InvalidRequestError(message, param="choice")
    for name in ("json", "structural_tag"):
        if fields.get(name) is not None:
            check_schema(name, fields[name], limits.schema)
    for name in ("json", "regex", "whitespace_pattern", "structural_tag"):
        for pattern in _patterns(fields.get(name), is_pattern=name in ("regex", "whitespace_pattern")):
            length = regex_length(pattern)
            if length > limits.max_regex_length:
                longest = f"at most {limits.max_regex_length} characters with repetitions written out"
                message = f"{name} must have regexes of {longest} (max_regex_length), got {length}"
                raise InvalidRequestError(message, param=name)


def _patterns(value: object, *, is_pattern: bool = False) -> Iterator[str]:
    """Yield the regexes of JSON: texts named `pattern`, and the names below `patternProperties`."""
    if isinstance(value, str) and is_pattern:
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _patterns(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key == "patternProperties" and isinstance(each, dict):
                yield from each
            yield from _patterns(each, is_pattern=key == "pattern")


def _place(params: StructuredOutputsParams, reason: str, fault: Any) -> str:  # noqa: ANN401 (a method)
    """Return where a schema cannot be a grammar, as ` at /properties/a`; empty: nowhere in particular."""
    place = place_of_fault(json.loads(str(params.json)), reason, fault)
    return f" at {place}" if place else ""


def _in_short(reason: str) -> str:
    """Return a fault without the text and the state of the parser that llguidance adds."""
    text = schema_fault(reason).partition("\n<state>")[0]
    text = re.sub(r"^ *\d+ \|.*$|^ *\^+ *$", "", text, flags=re.MULTILINE)  # lines that show the place
    lines = [line for line in text.splitlines() if line.strip()]
    text = " ".join(line.strip() for line in lines)
    if text.startswith("NoExtension"):
        text = "it allows no text"
    return text[:_MAX_REASON_CHARS] or reason[:_MAX_REASON_CHARS]


def _refusal(error: InvalidRequestError, names: dict[str, str]) -> ConstraintRefused:
    """Return the message with the name under which the client sent the field."""
    field, message = error.param or "", str(error)
    name = names.get(field, field or next(iter(names.values()), "structured_outputs"))
    if field and message.startswith(f"{field} "):
        message = name + message.removeprefix(field)
    return ConstraintRefused(message.encode(errors="replace").decode(), name)


if __name__ == "__main__":
    logs.set_up("grammars", logging.WARNING)  # the server logs the same
    serve_jobs(GrammarJobs().answer, CHECK_LIMIT_S)
