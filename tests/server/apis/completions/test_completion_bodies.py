"""What the models of bodies say to openapi.json."""

import json
from typing import Any

import pytest

from quire.server.api.request_bodies import Body, schema_of
from quire.server.apis.completions.completion_bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from support.openai_server import OpenAIServer


@pytest.mark.parametrize(
    ("body_type", "required"),
    [(CompletionBody, ["prompt"]), (ChatBody, ["messages"]), (TokenizeBody, []), (DetokenizeBody, ["tokens"])],
)
def test_schema_stands_on_its_own(body_type: type[Body], required: list[str]) -> None:
    schema = schema_of(body_type)
    assert schema.get("required", []) == required
    assert set(schema["properties"]) == set(body_type.model_fields)
    assert "$ref" not in json.dumps(schema)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_openapi_describes_the_bodies(server: OpenAIServer, path: str) -> None:
    operation: dict[str, Any] = server.http.get("/openapi.json").json()["paths"][path]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"]["properties"]["model"]
