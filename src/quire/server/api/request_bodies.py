"""Bodies of requests: the base of their pydantic models, their entries in openapi.json, and their fields from bytes.

An unsupported parameter that would change the response is refused unless its value is the default; one without effect
is accepted; an unknown name is ignored with a warning in the log.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema
from starlette.requests import ClientDisconnect, Request

from quire.core.checks import MAX_INT, refuse, shown
from quire.core.sampling_params import MAX_DEADLINE_MS
from quire.server.api.json_decoding import (
    SLICE_BYTES,
    SLICE_VALUES,
    JsonError,
    Slices,
    TooDeepError,
    TooManyValuesError,
    bounds_beside_strings,
    check_size,
    decoded,
    loads,
)
from quire.server.errors import NO_JSON, invalid, unsupported
from quire.server.http.application import CLIENT_ID
from quire.server.limits.fair_semaphore import run_at_once, run_sliced
from quire.server.options import DEFAULT_LIMITS, MAX_ELEMENTS, Limits
from quire.server.service import Service

Schema = dict[str, Any]

MAX_HTTP_SEED = 2**63 - 1  # as in vLLM's server; Python takes more

ELEMENT = "element"         # type of pydantic's errors that begin with the place in a list, as in `[0].text`

NULL: Schema = {"type": "null"}
TEXT: Schema = {"type": "string", "minLength": 1}
log = logging.getLogger(__name__)

B = TypeVar("B", bound="Body")

LONG_BYTES = 1 << 18      # a longer body is decoded in the lane of long ones

_EXPECTED = "Input should be "  # prefix of pydantic's messages
_WORDS = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}

_MAX_NAMES_LOGGED = 8
_JSON_ERRORS = (*NO_JSON, JsonError, TooDeepError, TooManyValuesError)


class Strict(BaseModel):
    """An object without conversions between types. Its checks are built by the first request that has one."""

    model_config = ConfigDict(strict=True, defer_build=True)


@dataclass(frozen=True, slots=True)
class OtherFields:
    """Names that an API knows though they are no fields of its bodies."""

    unsupported: Mapping[str, tuple[object, ...]]   # refused, but for these values (and null), which change nothing
    without_effect: Collection[str]                 # accepted


class Body(Strict):
    """Fields of every body."""

    OTHERS: ClassVar[OtherFields] = OtherFields({}, ())
    NESTED: ClassVar[Mapping[str, type[Strict]]] = {}   # objects in which names are checked, too, by their field

    model: str | None = None


def documented_as(*kinds: Schema) -> WithJsonSchema:
    """Document a field that pydantic checks only in part: a later check is faster, or its error clearer."""
    return WithJsonSchema({"anyOf": list(kinds)} if len(kinds) > 1 else kinds[0])


def list_of(items: Schema, *, least: int = 0) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items, "minItems": least}


def number(low: float, high: float, *, above_low: bool = False) -> WithJsonSchema:
    """Document a number in [low, high], or in (low, high] with `above_low`, or null."""
    return documented_as({"type": "number", "exclusiveMinimum" if above_low else "minimum": low, "maximum": high}, NULL)


def integer(low: int, high: int = MAX_INT) -> WithJsonSchema:
    """Document an integer in [low, high], or null."""
    return documented_as({"type": "integer", "minimum": low, "maximum": high}, NULL)


Milliseconds = Annotated[int | None, Field(strict=True), integer(1, MAX_DEADLINE_MS)]  # until a deadline


_described: dict[str, type[BaseModel]] = {}  # bodies of routes, by the titles that stand for their schemas


def request_body(body_type: type[BaseModel]) -> Schema:
    """Return the OpenAPI entry of a body that the route decodes itself, with a title alone as its schema.

    `titled` has the schema. All schemas take a tenth of a server's start, and few servers are asked for them.
    """
    title = f"{body_type.__module__}.{body_type.__qualname__}"
    _described[title] = body_type
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": {"title": title}}}}}


def titled(title: str) -> Schema:
    """Return the schema of the body that `request_body` gave this title."""
    return schema_of(_described[title])


def schema_of(body_type: type[BaseModel]) -> Schema:
    """Return the JSON schema of a body with all definitions inlined: openapi.json has no place for them.

    A field that may be left out says so by not being required, and a default of null says no more.
    """
    schema = body_type.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:  # noqa: ANN401 (JSON)
        if isinstance(value, list):
            return [inlined(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inlined(definitions[value["$ref"].rpartition("/")[2]])
        return {key: inlined(item) for key, item in value.items() if (key, item) != ("default", None)}

    whole: Schema = inlined(schema)
    return whole


async def read_body(request: Request, body_type: type[B]) -> B:
    """Return the body of a request. ApiError, or InvalidRequestError, names the first invalid field.

    A large body is decoded in slices, one per lane and iteration of the event loop, clients in rotation. One that is
    large by long strings, such as an image, is decoded at once.
    """
    service: Service = request.app.state.service
    raw = await _raw(request)
    bounds = _bounds(raw) if len(raw) <= SLICE_BYTES else bounds_beside_strings(raw)
    if bounds[0] <= SLICE_VALUES:
        return _body_of(_object(raw, *bounds, service.options), body_type, service.options)
    async with service.decode_lanes.slot(request.scope[CLIENT_ID], is_long=len(raw) > LONG_BYTES):
        given = await run_sliced(_object_in_slices(raw, body_type, service.options))
        await asyncio.sleep(0)
        return _body_of(given, body_type, service.options)


async def read_field_names(request: Request) -> tuple[bytes, set[str]]:
    """Return the bytes of a body and the names of its fields; as `read_body`, without its checks of fields."""
    service: Service = request.app.state.service
    raw = await _raw(request)
    async with service.decode_lanes.slot(request.scope[CLIENT_ID], is_long=len(raw) > LONG_BYTES):
        return raw, set(await run_sliced(_object_in_slices(raw, Body, service.options)))


def decode_body(raw: bytes, body_type: type[B], limits: Limits = DEFAULT_LIMITS) -> B:
    """Return the fields of a body at once, or raise as `read_body`."""
    return _body_of(_object(raw, *_bounds(raw), limits), body_type, limits)


async def _raw(request: Request) -> bytes:
    """Return the bytes of a body, which the application's `receive` gives as one message."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    raw: bytes = message["body"]
    return raw


def _bounds(raw: bytes) -> tuple[int, int]:
    """Return at most how many strings, lists and objects a text has, and at most how deep it is."""
    num_values = raw.count(b"[") + raw.count(b"{") + raw.count(b'"') // 2
    return num_values, num_values


def _object(raw: bytes, num_values: int, depth: int, limits: Limits) -> dict[str, Any]:
    """Return the JSON object of a body with at most so many values, and at most so deep."""
    try:
        if depth > limits.max_json_depth or num_values > limits.max_json_values:
            run_at_once(check_size(raw, limits.max_json_depth, limits.max_json_values))
        given = loads(raw)
    except _JSON_ERRORS as error:
        _refuse_json(error)
    return given if isinstance(given, dict) else _refuse_other(given)


def _object_in_slices(raw: bytes, body_type: type[B], limits: Limits) -> Slices[dict[str, Any]]:
    """Return the JSON object of a body, with None for names that no route knows."""
    wanted = body_type.model_fields.keys() | body_type.OTHERS.unsupported.keys()
    try:
        given = yield from decoded(raw, wanted, limits.max_json_depth, limits.max_json_values)
    except _JSON_ERRORS as error:
        _refuse_json(error)
    return given if isinstance(given, dict) else _refuse_other(given)


def _refuse_json(error: Exception) -> NoReturn:
    if isinstance(error, TooDeepError):
        invalid(f"the body is {error} (max_json_depth)", code="invalid_json")
    if isinstance(error, TooManyValuesError):
        invalid(f"the body has {error} (max_json_values)")
    invalid(f"the body is not valid JSON: {error}", code="invalid_json")


def _refuse_other(given: object) -> NoReturn:
    invalid(f"the body must be a JSON object, got {type(given).__name__}")


def _body_of(given: dict[str, Any], body_type: type[B], limits: Limits) -> B:
    """Return a body of its fields, after the checks of their names and numbers of elements."""
    fields = body_type.model_fields.keys()
    if not given.keys() <= fields:
        check_field_names(given, fields, body_type.OTHERS)
        given = {name: given[name] for name in fields & given.keys()}
    for field in MAX_ELEMENTS.keys() & given.keys():
        limit = getattr(limits, MAX_ELEMENTS[field])
        if isinstance(given[field], list | dict) and len(given[field]) > limit:
            refuse(field, given[field], f"at most {limit} of them ({MAX_ELEMENTS[field]})")
    for field, nested in body_type.NESTED.items():
        if isinstance(given.get(field), dict):
            check_field_names(given[field], nested.model_fields, body_type.OTHERS, f"{field}.")
    try:
        return body_type.model_validate(given)
    except ValidationError as error:
        _refuse_first(error)


def _refuse_first(error: ValidationError) -> NoReturn:
    """Raise the first error of a validation, with the value in its text."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = _param(first["loc"])
    if first["type"] == "missing":
        invalid(f"{param} is missing", param=param)
    if first["type"] in _WORDS or first["msg"].startswith(_EXPECTED):
        refuse(param, first["input"], _WORDS.get(first["type"], first["msg"].removeprefix(_EXPECTED)))
    invalid(f"{param}{'' if first['type'] == ELEMENT else ': '}{first['msg']}", param=param)


def _param(location: tuple[int | str, ...]) -> str:
    """Return the path of a field, as in `messages[0].content`."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return path.removeprefix(".")


def check_field_names(
    given: Mapping[str, object], fields: Collection[str], known: OtherFields, within: str = ""
) -> None:
    """Check the names that are no fields of a body: ApiError 400 for an unsupported one with an effect.

    `within` is the prefix of the names of a nested object: "stream_options.".
    """
    others = {within + name: value for name, value in given.items() if name not in fields}
    if not others:
        return
    for name, value in others.items():
        if name in known.unsupported and not _changes_nothing(value, known.unsupported[name]):
            unsupported(name, value)
    unknown = [name for name in others if name not in known.unsupported and name not in known.without_effect]
    if unknown:
        names = ", ".join(shown(name) for name in unknown[:_MAX_NAMES_LOGGED])
        log.warning("%d unknown fields of a request are ignored: %s", len(unknown), names)


def _changes_nothing(value: object, defaults: tuple[object, ...]) -> bool:
    return value is None or any(type(value) is type(default) and value == default for default in defaults)
