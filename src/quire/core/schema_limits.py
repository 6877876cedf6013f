"""SchemaLimits: bounds on JSON schemas that clients send, in response formats and in tools."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from quire.core.errors import InvalidRequestError

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
