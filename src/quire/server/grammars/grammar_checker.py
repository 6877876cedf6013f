"""Checker of the grammars that fields of bodies ask for, in a process with limits, which starts with the first one."""

import signal
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields as dataclass_fields
from typing import Any

import msgspec

from quire.core.checks import refuse, shown
from quire.core.errors import InvalidRequestError
from quire.core.frames import frame
from quire.core.structured_outputs import CONSTRAINTS, SchemaLimits, StructuredOutputsParams
from quire.server.errors import overloaded
from quire.server.limits.sandbox import JobLimitError, SandboxEndedError, SandboxKind, SandboxLane
from quire.server.options import ServerOptions

CHECK_LIMIT_S = 2.0                 # a schema of 100 properties takes 10 ms
MAX_REPLY_BYTES = 8 << 20


class GrammarLimits(msgspec.Struct, array_like=True, frozen=True):
    """Bounds of one constraint, each a flag of the server."""

    schema: SchemaLimits
    max_grammar_bytes: int
    max_regex_bytes: int
    max_regex_length: int
    max_choice_texts: int


class LoadLimits(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """The first message."""

    limits: GrammarLimits


class CheckGrammar(msgspec.Struct, tag="check", array_like=True, frozen=True):
    """Fields of StructuredOutputsParams as a client sent them, and the names under which it sent them.

    `is_own`: the one field is a grammar that the server made, without the bounds of a client's.
    """

    fields: dict[str, Any]
    names: dict[str, str]
    is_own: bool = False


class LimitsLoaded(msgspec.Struct, tag="loaded", array_like=True, frozen=True):
    """The answer to LoadLimits."""


class Checked(msgspec.Struct, tag="checked", array_like=True, frozen=True):
    """The grammar of a constraint."""

    grammar: str


class ConstraintRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """An InvalidRequestError."""

    message: str
    param: str | None


Command = LoadLimits | CheckGrammar
Reply = LimitsLoaded | Checked | ConstraintRefused

decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_reply: Callable[[bytes], Reply] = msgspec.msgpack.Decoder(Reply).decode


# Fields of bodies that constrain the output.
CONSTRAINT_FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_whitespace_pattern", "structural_tag",
)  # fmt: skip
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
    "structural_tag": "structural_tag",
}
_FIELDS = [field.name for field in dataclass_fields(StructuredOutputsParams)]
MAX_CACHED = 256
MAX_CACHED_BYTES = 8 << 20
GRAMMARS = SandboxKind("grammar", "quire.server.grammars.grammar_worker", CHECK_LIMIT_S, MAX_REPLY_BYTES)

_UNSENDABLE = (OverflowError, TypeError, UnicodeEncodeError, RecursionError)
_CRASHES = (-signal.SIGSEGV, -signal.SIGABRT)  # a parser ran out of stack or of memory


def constraint_of(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of the constraint, and the client's name of each; both are empty if there is none.

    InvalidRequestError for two constraints, and for a `response_format` of unknown form.
    """
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}

    def add(field: str, value: object, name: str) -> None:
        if value is None or (field == "json_object" and value is False):
            return
        others = [each for each in fields if each == field or {each, field} <= set(CONSTRAINTS)]
        if others:
            message = f"{name} and {names[others[0]]} exclude each other: an output has one constraint"
            raise InvalidRequestError(message, param=name)
        fields[field], names[field] = value, name

    params = given.get("structured_outputs")
    if params is not None and not isinstance(params, dict):
        refuse("structured_outputs", params, "an object")
    for field, value in (params or {}).items():
        add(field, value, f"structured_outputs.{field}")
    for name, field in _GUIDED.items():
        add(field, given.get(name), name)
    if given.get("response_format") is not None:
        add(*_of_response_format(given["response_format"]))
    if fields.keys() & set(CONSTRAINTS):
        return fields, names
    if params is None:
        return {}, {}           # options of a constraint that there is none of
    kinds = ", ".join(CONSTRAINTS)
    unknown = next((f"; it has no field {shown(name)}" for name in params if name not in _FIELDS), "")
    message = f"structured_outputs must have exactly one of {kinds}, got none{unknown}"
    raise InvalidRequestError(message, param="structured_outputs")


def _of_response_format(value: Any) -> tuple[str, Any, str]:  # noqa: ANN401 (JSON)
    """Return the field, its value and its name."""
    if not isinstance(value, dict):
        refuse("response_format", value, "an object")
    kind = value.get("type")
    if kind == "text":
        return "json", None, ""
    if kind == "json_object":
        schema = value.get("schema")  # a form of llama.cpp
        if schema is not None:
            return "json", schema, "response_format.schema"
        return "json_object", True, "response_format"
    if kind == "json_schema":
        return "json", _schema_of(value.get("json_schema")), "response_format.json_schema.schema"
    if kind == "structural_tag":
        return "structural_tag", dict(value), "response_format"
    expected = "one of text, json_object, json_schema, structural_tag"
    raise InvalidRequestError(
        f"response_format.type must be {expected}, got {shown(kind)}", param="response_format.type"
    )


def _schema_of(value: Any) -> Any:  # noqa: ANN401 (JSON)
    name = "response_format.json_schema"
    if not isinstance(value, dict):
        refuse(name, value, "an object with a schema")
    for field, kind, expected in (("name", str, "a string"), ("strict", bool, "true or false")):
        if value.get(field) is not None and not isinstance(value[field], kind):
            refuse(f"{name}.{field}", value[field], expected)
    schema = value.get("schema")
    return {"type": "object"} if schema is None else schema


class GrammarChecker:
    """Checks constraints in a sandbox, clients in rotation. Lives on one event loop; `close` it there."""

    def __init__(self, options: ServerOptions) -> None:
        self._config = options.outputs_config
        self.applies_in_reasoning = self._config.enable_in_reasoning  # grammars hold from the first token on
        limits = GrammarLimits(
            SchemaLimits(options.max_schema_bytes, options.max_schema_depth, options.max_schema_properties),
            options.max_grammar_bytes, options.max_regex_bytes, options.max_regex_length, options.max_choice_texts,
        )  # fmt: skip
        self._max_waiting, self._num_waiting = options.max_queued_requests, 0
        self._lane = SandboxLane(GRAMMARS, "grammar", lambda: frame(LoadLimits(limits)))
        self._checked: OrderedDict[bytes, str] = OrderedDict()  # grammars by their jobs, the latest last
        self._num_cached_bytes = 0

    async def check(self, given: Mapping[str, Any], client_id: str = "") -> StructuredOutputsParams | None:
        """Return the grammar of a body's CONSTRAINT_FIELDS, checked; None if they ask for nothing.

        InvalidRequestError names the field and the reason; ApiError 429 where too many requests wait.
        """
        fields, names = constraint_of(given)
        if not fields:
            return None
        if self._config.disable_any_whitespace:
            fields.setdefault("disable_any_whitespace", True)
        if self._config.disable_additional_properties:
            fields.setdefault("disable_additional_properties", True)
        name = min(names.values())
        try:
            job = frame(CheckGrammar(fields, names))
        except _UNSENDABLE as error:
            raise InvalidRequestError(f"{name} must be JSON: {error}", param=name) from error
        return StructuredOutputsParams(grammar=await self._grammar(job, name, client_id))

    async def check_grammar(self, grammar: str, name: str, client_id: str = "") -> None:
        """Compile a grammar that was made of the field `name`. Errors are those of `check`."""
        await self._grammar(frame(CheckGrammar({"grammar": grammar}, {"grammar": name}, is_own=True)), name, client_id)

    async def close(self) -> None:
        """End the process."""
        await self._lane.close()

    async def _grammar(self, job: bytes, name: str, client_id: str) -> str:
        if job in self._checked:
            self._checked.move_to_end(job)
            return self._checked[job]
        if self._num_waiting >= self._max_waiting:
            raise overloaded(self._num_waiting, self._max_waiting, retry_after_s=1)
        self._num_waiting += 1
        try:
            async with self._lane.semaphore.slot(client_id):
                reply = decode_reply(await self._lane.ask(job))
        except JobLimitError as error:
            raise InvalidRequestError(f"{name} cannot be checked {error}", param=name) from error
        except SandboxEndedError as error:
            if error.status not in _CRASHES:
                raise
            raise InvalidRequestError(f"{name} cannot be checked: it is too complex", param=name) from error
        finally:
            self._num_waiting -= 1
        if isinstance(reply, ConstraintRefused):
            raise InvalidRequestError(reply.message, param=reply.param)
        assert isinstance(reply, Checked), f"expected a grammar, got {reply}"
        self._keep(job, reply.grammar)
        return reply.grammar

    def _keep(self, job: bytes, grammar: str) -> None:
        """Cache a grammar, within the bounds."""
        if job in self._checked or len(job) + len(grammar) > MAX_CACHED_BYTES // 4:
            return
        self._checked[job] = grammar
        self._num_cached_bytes += len(job) + len(grammar)
        while len(self._checked) > MAX_CACHED or self._num_cached_bytes > MAX_CACHED_BYTES:
            self._num_cached_bytes -= sum(map(len, self._checked.popitem(last=False)))
