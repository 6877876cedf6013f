"""StructuredOutputsParams: the form that an output must have; bounds on schemas and on the work of grammars.

Any constraint becomes one text, its grammar (`quire.grammar_writing.writer`), which is checked where it is compiled,
and for requests over HTTP before that, in a process with a time limit.
"""

import json as json_codec
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import msgspec

from quire.core.checks import check_bool, check_strings, refuse, shown
from quire.core.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)

MAX_SCHEMA_BYTES = 2**20        # json, structural_tag, or all choices together; in UTF-8
MAX_REGEX_BYTES = 2**16
MAX_GRAMMAR_BYTES = 4 * 2**20   # more than a schema: canonical grammars hold schemas as escaped text
MAX_CHOICES = 10_000
MAX_WHITESPACE_BYTES = 1024
MAX_SCHEMA_DEPTH = 120          # arrays and objects inside each other; llguidance reads 128

_TEXTS = {
    "regex": MAX_REGEX_BYTES,
    "grammar": MAX_GRAMMAR_BYTES,
    "whitespace_pattern": MAX_WHITESPACE_BYTES,
}
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """Exactly one constraint of an output, and options of JSON. InvalidRequestError, a ValueError, names what is wrong.

    `json`: a JSON schema, as text or as a dict, which is stored as text. `regex`: in Python's syntax, matched from
    beginning to end. `choice`: one of these texts. `grammar`: Lark with llguidance's extensions, or GBNF.
    `json_object`: any JSON object. `structural_tag`: text in which what follows certain markers has a form, as JSON.
    Options of JSON: `disable_any_whitespace` leaves no blank between two lexemes, `whitespace_pattern` is the regex of
    the blanks there, `disable_additional_properties` forbids properties that a schema does not name.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs must have exactly one of {', '.join(CONSTRAINTS)}, "
                f"got {' and '.join(given) or 'none'}",
                param="structured_outputs",
            )
        for name, most in _TEXTS.items():
            if getattr(self, name) is not None:
                _check_bytes(name, getattr(self, name), most)
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            check_bool(name, getattr(self, name))
        if self.json_object is not None:
            check_bool("json_object", self.json_object)
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", _check_json("structural_tag", self.structural_tag))
        if self.json is not None:
            object.__setattr__(self, "json", _check_schema("json", self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _check_choice(self.choice))


def structured_outputs_from(value: object) -> StructuredOutputsParams:
    """Return parameters that were given as such or as a mapping of their fields."""
    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        refuse("structured_outputs", value, "StructuredOutputsParams or a mapping of its fields")
    known = [field.name for field in fields(StructuredOutputsParams)]
    for name in value:
        if name not in known:
            message = f"structured_outputs has no field {shown(name)}; its fields are {', '.join(known)}"
            raise InvalidRequestError(message, param="structured_outputs")
    return StructuredOutputsParams(**value)


def GuidedDecodingParams(  # noqa: N802 (stands for a class of vLLM)
    *, backend: str | None = None, backend_was_auto: bool = False, disable_fallback: bool = False,
    **constraint: Any,  # noqa: ANN401
) -> StructuredOutputsParams:
    """Return StructuredOutputsParams: an earlier name. The fields that choose among back ends have no effect."""
    log.warning("GuidedDecodingParams is an earlier name of StructuredOutputsParams")
    if backend is not None:
        log.warning("guided decoding: backend %r was asked for; grammars are llguidance's", backend)
    return StructuredOutputsParams(**constraint)


def compact_json(value: object) -> str:
    """Return `value` as JSON without blanks, in its own order of keys. ValueError or TypeError for what is no JSON."""
    return json_codec.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _check_bytes(field: str, value: object, most: int) -> str:
    """Return `value` if it is a text of 1 to `most` bytes."""
    if not isinstance(value, str) or not value:
        refuse(field, value, "a string that is not empty")
    [text] = check_strings(field, [value])
    num_bytes = len(text) if text.isascii() else len(text.encode())
    if num_bytes > most:
        raise InvalidRequestError(f"{field} must be at most {most} bytes, got {num_bytes}", param=field)
    return text


def _check_schema(field: str, value: object) -> str:
    """Return a JSON schema as compact text; keys keep their order, which is that of the output."""
    text = _check_json(field, value)
    if not text.startswith(("{", "t", "f")):
        refuse(field, value, "a JSON schema: an object, true or false")
    return text


def _check_json(field: str, value: object) -> str:
    """Return JSON that was given as text, or as a dict, as compact text."""
    if isinstance(value, str):
        _check_bytes(field, value, MAX_SCHEMA_BYTES)
    elif not isinstance(value, dict):
        refuse(field, value, "JSON, as a string or a dict")
    try:
        schema = json_codec.loads(value) if isinstance(value, str) else value
        check_depth(field, schema)
        text = compact_json(schema)
    except InvalidRequestError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field} must be JSON: {str(error)[:200]}", param=field) from error
    return _check_bytes(field, text, MAX_SCHEMA_BYTES)


def check_depth(field: str, value: object, most: int = MAX_SCHEMA_DEPTH) -> None:
    """Raise InvalidRequestError if JSON has more than `most` arrays and objects inside each other."""
    level: list[object] = [value]
    for _ in range(most + 1):
        level = [inner for each in level for inner in _elements(each)]
        if not level:
            return
    raise InvalidRequestError(f"{field} must be nested at most {most} deep", param=field)


def _elements(value: object) -> Sequence[object]:
    """Return the arrays and objects directly in a value of JSON."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [each for each in inside if isinstance(each, dict | list | tuple)]


def _check_choice(value: object) -> tuple[str, ...]:
    choices = check_strings("choice", value)
    if not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidRequestError(f"choice must have from 1 to {MAX_CHOICES} texts, got {len(choices)}", param="choice")
    num_bytes = sum(len(text.encode()) for text in choices)
    if num_bytes > MAX_SCHEMA_BYTES:
        message = f"choice must have at most {MAX_SCHEMA_BYTES} bytes in all, got {num_bytes}"
        raise InvalidRequestError(message, param="choice")
    return choices


class StructuredOutputsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults of all requests with a grammar. Grammars are llguidance's, whatever `backend` names."""

    backend: str = "auto"
    disable_fallback: bool = False                  # no effect: there is one back end
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    reasoning_parser: str = ""                      # no effect: `--reasoning-parser` of a server has it
    enable_in_reasoning: bool = False               # the grammar holds from the first token on

    def with_defaults(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """Return parameters with the options of JSON that are on here, or `params` itself if that changes nothing."""
        no_blanks = self.disable_any_whitespace or params.disable_any_whitespace
        closed = self.disable_additional_properties or params.disable_additional_properties
        if (no_blanks, closed) == (params.disable_any_whitespace, params.disable_additional_properties):
            return params
        return replace(params, disable_any_whitespace=no_blanks, disable_additional_properties=closed)


def parse_config(text: str) -> StructuredOutputsConfig:
    """Return the configuration of a JSON text. ConfigError names an unknown key or a wrong value."""
    try:
        config = msgspec.json.decode(text or "{}", type=StructuredOutputsConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"structured_outputs_config: {error}; got {text[:200]!r}") from error
    if config.reasoning_parser:
        log.warning("structured_outputs_config: reasoning_parser %r has no effect; --reasoning-parser of a server has",
                    config.reasoning_parser)
    if config.backend not in ("auto", "guidance", "llguidance"):
        log.warning("structured_outputs_config: backend %r was asked for; grammars are llguidance's", config.backend)
    return config


_UNENCODABLE = (TypeError, OverflowError, UnicodeEncodeError, RecursionError, ValueError)


@dataclass(frozen=True, slots=True)
class SchemaLimits:
    """Bounds on one schema; a server's are its flags."""

    max_schema_bytes: int = 128 << 10       # as JSON without blanks
    max_schema_depth: int = 32              # lists and objects inside of each other
    max_schema_properties: int = 1024       # all objects together; grammars take time quadratic in them


def check_schema(where: str, schema: object, limits: SchemaLimits, param: str | None = None) -> None:
    """Raise InvalidRequestError, for the field `param` or `where`, for a schema past the limits. Linear in its size."""
    param = param or where
    check_json_bytes(where, schema, limits.max_schema_bytes, "max_schema_bytes", param)
    num_properties = 0
    for depth, level in enumerate(_levels(schema), start=1):
        if depth > limits.max_schema_depth:
            message = f"{where} must be nested at most {limits.max_schema_depth} levels deep (max_schema_depth)"
            raise InvalidRequestError(message, param=param)
        for value in level:
            properties = value.get("properties") if isinstance(value, dict) else None
            num_properties += len(properties) if isinstance(properties, dict) else 0
    if num_properties > limits.max_schema_properties:
        most = f"at most {limits.max_schema_properties} properties (max_schema_properties)"
        raise InvalidRequestError(f"{where} must have {most}, got {num_properties}", param=param)


def check_json_bytes(where: str, value: object, limit: int, flag: str, param: str | None = None) -> None:
    """Raise InvalidRequestError for a value that has more bytes than the limit, as JSON if it is no text."""
    param = param or where
    try:
        num_bytes = len(value.encode(errors="replace") if isinstance(value, str) else msgspec.json.encode(value))
    except _UNENCODABLE as error:
        raise InvalidRequestError(f"{where} must be JSON: {error}", param=param) from error
    if num_bytes > limit:
        raise InvalidRequestError(f"{where} must have at most {limit} bytes ({flag}), got {num_bytes}", param=param)


def _levels(schema: object) -> Iterator[Sequence[object]]:
    """Yield the lists and objects of a schema, those of one depth at a time."""
    values: list[object] = [schema]
    while level := [value for value in values if isinstance(value, dict | list | tuple)]:
        yield level
        values = [below for value in level for below in (value.values() if isinstance(value, dict) else value)]


NOTHING_FOLLOWS = "NoExtensionBias"  # reason of a stop, and start of an error

GRAMMAR_LIMITS: Mapping[str, Any] = {
    "max_lexer_states": 4_000,    # 1 to 2 kB each; the schemas of SchemaStore need less than 2,000
    "step_lexer_fuel": 100_000,   # for one mask, 14,000 per ms
    "step_max_items": 20_000,     # for one mask, 20,000 per ms
    "max_grammar_size": 200_000,
    "verbose_errors": False,      # they would quote the output of a request
}


def has_text(matcher: "LLMatcher") -> bool:
    """Return whether a matcher allows any text from where it is; True if it has failed."""
    if matcher.is_error() or matcher.is_accepting():
        return True
    matcher.compute_bitmask()  # an error if nothing follows
    return not str(matcher.get_error()).startswith(NOTHING_FOLLOWS)
