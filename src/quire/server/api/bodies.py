"""Bodies of requests: the base of their pydantic models, and their entries in openapi.json."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from quire.core.checks import MAX_INT

Schema = dict[str, Any]

MAX_HTTP_SEED = 2**63 - 1  # as in vLLM's server; Python takes more

ELEMENT = "element"         # type of an error of pydantic whose text begins with the place in a list, as in `[0].text`

NULL: Schema = {"type": "null"}
TEXT: Schema = {"type": "string", "minLength": 1}


class Strict(BaseModel):
    """An object without conversions between types."""

    model_config = ConfigDict(strict=True)


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


def request_body(body_type: type[BaseModel]) -> Schema:
    """Return the OpenAPI entry of a body that the route decodes itself."""
    content = {"application/json": {"schema": schema_of(body_type)}}
    return {"requestBody": {"required": True, "content": content}}


def schema_of(body_type: type[BaseModel]) -> Schema:
    """Return the JSON schema of a body with all definitions inlined: openapi.json has no place for them."""
    schema = body_type.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:  # noqa: ANN401 (JSON)
        if isinstance(value, list):
            return [inlined(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inlined(definitions[value["$ref"].rpartition("/")[2]])
        return {key: inlined(item) for key, item in value.items()}

    whole: Schema = inlined(schema)
    return whole
