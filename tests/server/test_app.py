"""What /openapi.json says of bounds, errors and kinds of answers."""

from typing import Any

import pytest

from quire.core.sampling_params import SamplingParams
from quire.server.apis.completions.completion_bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    PrefixBody,
    TokenizeBody,
)
from support.http_app import ask, make_app

BODIES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/prefixes": PrefixBody,
}


def paths(**options: Any) -> dict[str, Any]:  # noqa: ANN401 (those of ServerOptions)
    schema: dict[str, Any] = ask(make_app(**options), "GET", "/openapi.json").json()
    return schema["paths"]  # type: ignore[no-any-return]


def fields_of(described: dict[str, Any], path: str) -> dict[str, Any]:
    body: dict[str, Any] = described[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return body["properties"]  # type: ignore[no-any-return]


def kinds_of(field: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {kind["type"]: kind for kind in field.get("anyOf", [field])}


@pytest.mark.parametrize("path", BODIES)
def test_every_number_has_its_range_and_every_field_may_be_null_unless_it_is_required(path: str) -> None:
    for name, field in fields_of(paths(), path).items():
        kinds = kinds_of(field) if name != "stream_options" else {"null": {}}
        for kind in ("integer", "number"):
            if kind in kinds:
                assert {"minimum", "exclusiveMinimum"} & kinds[kind].keys()
                assert "maximum" in kinds[kind]
        assert ("null" in kinds) != BODIES[path].model_fields[name].is_required(), name


def test_ranges_are_those_of_the_parameters() -> None:
    fields = fields_of(paths(), "/v1/completions")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    for name in ("temperature", "top_p", "min_p", "seed", *penalties):
        kinds = kinds_of(fields[name])
        kind = kinds.get("number") or kinds["integer"] | {"minimum": int(kinds["integer"]["minimum"])}
        SamplingParams(**{name: kind["maximum"]})
        if name not in ("temperature", "seed"):  # routes take less of these than Python does: see test_fields
            with pytest.raises(ValueError, match=name):
                SamplingParams(**{name: kind["maximum"] + 1})
        if "exclusiveMinimum" in kind:
            with pytest.raises(ValueError, match=name):
                SamplingParams(**{name: kind["exclusiveMinimum"]})
        else:
            SamplingParams(**{name: kind["minimum"]})
            with pytest.raises(ValueError, match=name):
                SamplingParams(**{name: kind["minimum"] - 1})


def test_bounds_that_flags_set_are_told_by_the_server_that_has_them() -> None:
    for limit in (3, 5):
        described = paths(max_n=limit, max_stop_strings=limit, max_salt_chars=limit, max_logit_bias=limit)
        fields = fields_of(described, "/v1/chat/completions")
        assert kinds_of(fields["n"])["integer"]["maximum"] == limit
        assert kinds_of(fields["stop"])["array"]["maxItems"] == limit
        assert kinds_of(fields["cache_salt"])["string"]["maxLength"] == limit
        assert kinds_of(fields["logit_bias"])["object"]["maxProperties"] == limit
        assert kinds_of(fields["top_logprobs"])["integer"]["maximum"] == 20


def test_errors_and_streams_are_described_on_every_route() -> None:
    described = paths()
    for path, methods in described.items():
        is_anthropics = path.startswith("/v1/messages")
        fields = ["type", "message"] if is_anthropics else ["message", "type", "param", "code"]
        for operation in methods.values():
            for status in ("4XX", "5XX"):
                schema = operation["responses"][status]["content"]["application/json"]["schema"]
                assert schema["required"] == (["type", "error"] if is_anthropics else ["error"])
                assert schema["properties"]["error"]["required"] == fields
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        content = described[path]["post"]["responses"]["200"]["content"]
        assert content.keys() == {"application/json", "text/event-stream"}
    assert described["/metrics"]["get"]["responses"]["200"]["content"].keys() == {"text/plain"}
