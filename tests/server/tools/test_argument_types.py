"""Types of arguments that are text: those that a schema names in any of its ways, null of OpenAPI 3.0 among them."""

from typing import Any

import pytest

from quire.server.tools.literal_arguments import types_of


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "number"}, {"number"}),
        ({"type": ["number", "null"]}, {"number", "null"}),
        ({"type": "number", "nullable": True}, {"number", "null"}),
        ({"type": "number", "nullable": False}, {"number"}),
        ({"nullable": True, "enum": ["a"]}, {"string", "null"}),
        ({"$ref": "#/$defs/n"}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "boolean", "nullable": True}]}, {"string", "boolean", "null"}),
        ({"nullable": True}, set()),
    ],
)
def test_types_that_a_schema_allows(schema: dict[str, Any], types: set[str]) -> None:
    root = {"properties": {"a": schema}, "$defs": {"n": {"type": "integer", "nullable": True}}}
    assert types_of(root, "a") == types
