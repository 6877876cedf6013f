"""Every bound on what a client multiplies: what is just within is answered, what is past is refused by name."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec import json, msgpack

from quire.server.options import Limits
from support.http_app import ask, make_app
from support.openai_server import OpenAIServer

ROOT = Path(__file__).parents[4]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Case(NamedTuple):
    """A bound small enough to test, and a body that is as far as that, and further by one."""

    limit: int
    param: str | None
    path: str
    body: Callable[[int], dict[str, Any]]
    code: str | None = None


def completion(**fields: Any) -> dict[str, Any]:  # noqa: ANN401 (JSON)
    return {"prompt": [5], "max_tokens": 1} | fields


def nested(depth: int) -> dict[str, Any]:
    value: Any = 0
    for _ in range(depth - 1):
        value = [value]
    return completion(unknown=value)


def messages(num: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}] * num, "max_tokens": 1}


def with_tools(*tools: dict[str, Any]) -> dict[str, Any]:
    return messages(1) | {"tools": [{"type": "function", "function": {"name": "f"} | tool} for tool in tools]}


def with_tool_bytes(num: int) -> dict[str, Any]:
    num_bytes = len(msgpack.encode(with_tools({"description": "x" * 100})["tools"]))
    return with_tools({"description": "x" * (100 + num - num_bytes)})


def with_schema_bytes(num: int) -> dict[str, Any]:
    schema = {"title": ""}
    return with_tools({"parameters": {"title": "x" * (num - len(json.encode(schema)))}})


def with_schema_depth(num: int) -> dict[str, Any]:
    value: Any = {}
    for _ in range(num - 1):
        value = {"items": value}
    return with_tools({"parameters": value})


def with_properties(num: int) -> dict[str, Any]:
    inner = {"properties": {key: {} for key in map(str, range(num - 1))}}
    return with_tools({"parameters": {"properties": {"a": inner}}})


def with_arguments(num: int) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "x" * num}}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}], "max_tokens": 1}


BODIES: dict[str, list[Case]] = {
    "max_n": [Case(3, "n", COMPLETIONS, lambda n: completion(n=n))],
    "max_choices": [
        Case(4, "n", COMPLETIONS, lambda n: completion(n=n)),
        Case(4, "prompt", COMPLETIONS, lambda n: completion(prompt=[[5]] * n)),
    ],
    "max_call_tokens": [Case(8, "prompt", COMPLETIONS, lambda n: completion(prompt=[[5] * 4, [6] * (n - 4)]))],
    "max_prompt_candidates": [
        Case(12, "prompt_logprobs", COMPLETIONS, lambda n: completion(prompt=[5] * n, prompt_logprobs=0)),
    ],
    "max_output_candidates": [
        Case(12, "logprobs", COMPLETIONS, lambda n: completion(max_tokens=n, ignore_eos=True, logprobs=0)),
    ],
    "max_tools": [Case(3, "tools", path, lambda n: with_tools(*[{}] * n)) for path in (CHAT, "/tokenize")],
    "max_tool_bytes": [Case(200, "tools", path, with_tool_bytes) for path in (CHAT, "/tokenize")],
    "max_schema_bytes": [Case(100, "tools", path, with_schema_bytes) for path in (CHAT, "/tokenize")],
    "max_schema_depth": [Case(4, "tools", CHAT, with_schema_depth)],
    "max_schema_properties": [Case(5, "tools", CHAT, with_properties)],
    "max_argument_bytes": [Case(10, "messages", path, with_arguments) for path in (CHAT, "/tokenize")],
    "max_messages": [Case(3, "messages", path, messages) for path in (CHAT, "/tokenize")],
    "max_stop_strings": [Case(3, "stop", COMPLETIONS, lambda n: completion(stop=["x"] * n))],
    "max_stop_chars": [
        Case(5, "stop", COMPLETIONS, lambda n: completion(stop="x" * n)),
        Case(5, "bad_words", COMPLETIONS, lambda n: completion(bad_words=["x" * n])),
    ],
    "max_bad_words": [Case(3, "bad_words", COMPLETIONS, lambda n: completion(bad_words=["x"] * n))],
    "max_stop_token_ids": [Case(3, "stop_token_ids", COMPLETIONS, lambda n: completion(stop_token_ids=[5] * n))],
    "max_allowed_token_ids": [
        Case(3, "allowed_token_ids", COMPLETIONS, lambda n: completion(allowed_token_ids=[5] * n)),
    ],
    "max_logit_bias": [
        Case(3, "logit_bias", CHAT, lambda n: messages(1) | {"logit_bias": dict.fromkeys(map(str, range(n)), 1)}),
    ],
    "max_salt_chars": [
        Case(3, "cache_salt", COMPLETIONS, lambda n: completion(cache_salt="x" * n)),
    ],
    "max_json_values": [Case(10, None, COMPLETIONS, lambda n: completion(unknown=["x"] * (n - 6)))],
    "max_json_depth": [Case(4, None, COMPLETIONS, nested, "invalid_json")],
}
# Limits of the connection, and of time: the tests that show them.
CONSTRAINTS = "tests/server/grammars/test_structured_outputs.py::test_what_cannot_constrain_is_refused_by_name"
VECTORS = "tests/server/apis/embeddings/test_embeddings.py::"
IMAGES = "tests/server/images/test_image_inputs.py::"
ELSEWHERE = {
    **dict.fromkeys(
        ("max_images", "max_image_bytes", "max_decoded_image_bytes"), f"{IMAGES}test_images_of_a_request_are_bounded"
    ),
    "max_image_pixels": f"{IMAGES}test_hostile_images_cost_their_requests_alone",
    "max_total_image_bytes": f"{IMAGES}test_memory_of_images_is_bounded_by_client_and_in_all",
    "max_embedding_inputs": f"{VECTORS}test_bad_embedding_requests_name_field_and_limit",
    "max_rerank_documents": f"{VECTORS}test_bad_requests_for_scores_name_field_and_limit",
    "max_pooling_bytes": f"{VECTORS}test_bad_embedding_requests_name_field_and_limit",
    **dict.fromkeys(("max_grammar_bytes", "max_regex_bytes", "max_regex_length", "max_choice_texts"), CONSTRAINTS),
    "max_queued_requests": "tests/server/test_service.py::test_requests_that_wait_in_the_engine_count",
    "max_queued_tokens": "tests/server/test_service.py::test_queued_tokens_are_bounded_in_sum",
    "max_connections": "tests/server/http/test_protocol.py::test_connections_that_are_too_many_are_turned_away",
    "max_pipelined_requests": "tests/server/http/test_protocol.py::test_requests_that_wait_on_one_connection_are_few",
    "max_url_bytes": "tests/server/http/test_protocol.py::test_head_that_is_too_large_is_refused",
    "max_headers": "tests/server/http/test_protocol.py::test_largest_head_is_taken",
    "max_header_bytes": "tests/server/http/test_protocol.py::test_largest_head_is_taken",
    "max_body_bytes": "tests/server/http/test_application.py::test_body_of_exactly_the_limit_is_taken",
    "max_total_body_bytes": "tests/server/limits/test_body_memory.py::test_bound_holds_whatever_comes",
    "max_conversation_bytes": (
        "tests/server/templates/test_template_renderer.py::test_bytes_of_a_conversation_and_of_its_variables_are_bounded"
    ),
    "max_template_variable_bytes": (
        "tests/server/templates/test_template_renderer.py::test_bytes_of_a_conversation_and_of_its_variables_are_bounded"
    ),
    "max_buffered_bytes": "tests/server/http/test_protocol.py::test_reader_who_is_slow_but_reads_is_not_dropped",
    "max_logprob_bytes": "tests/server/limits/test_logprob_memory.py::test_calls_share_one_budget",
    "max_history_bytes": "tests/server/test_history.py::test_bytes_are_bounded",
    "receive_timeout": "tests/server/http/test_protocol.py::test_head_that_does_not_come_is_a_timeout",
    "send_timeout": "tests/server/http/test_protocol.py::test_reader_who_takes_nothing_is_dropped_and_his_answer_ends",
    "max_pinned_prefixes": "tests/server/apis/test_prefix_routes.py::test_pins_are_bounded",
    "max_requests_per_key": (
        "tests/server/limits/test_key_shares.py::test_requests_of_a_key_are_bounded_whatever_they_ask_for"
    ),
    "max_kv_share_per_key": (
        "tests/scheduling/test_kv_shares.py::test_request_past_the_share_waits_and_other_clients_pass"
    ),
    "max_pinned_share": "tests/server/apis/test_prefix_routes.py::test_pins_under_way_count_towards_the_share",
    "max_pinned_share_per_key": (
        "tests/server/apis/test_prefix_routes.py::test_shares_of_the_cache_bound_the_pins_of_a_key_and_of_all"
    ),
    "max_session_image_bytes": (
        "tests/e2e/test_image_sessions.py::test_server_keeps_images_of_sessions_and_restores_them"
    ),
    "max_session_bytes": "tests/server/apis/test_session_routes.py::test_messages_of_a_session_are_bounded",
    **dict.fromkeys(
        (f"max_saved_session{kind}{scope}" for kind in ("s", "_bytes") for scope in ("", "_per_key")),
        "tests/server/apis/test_session_routes.py::test_saved_sessions_are_bounded",
    ),
    "max_session_saves": "tests/server/apis/test_session_routes.py::test_saves_at_once_are_bounded",
    "pin_ttl": "tests/server/apis/test_prefix_routes.py::test_pin_expires_although_no_request_looks_for_it",
    "max_metric_labels": "tests/core/test_owner_labels.py::test_keys_beyond_the_limit_are_other",
    "idle_timeout": "tests/server/http/test_protocol.py::test_connection_without_a_request_is_closed_after_a_while",
}


def test_every_limit_is_tested() -> None:
    assert BODIES.keys() | ELSEWHERE.keys() == {field.name for field in fields(Limits)}
    for place in ELSEWHERE.values():
        path, _, name = place.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text()


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in BODIES.items() for case in cases])
def test_bound_is_reached_and_not_passed(
    name: str, case: Case, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service, "options", replace(server.service.options, **{name: case.limit}))
    server.ask(case.path, **case.body(case.limit))
    status, error = server.refusal(case.path, **case.body(case.limit + 1))
    assert (status, error["param"], error["code"]) == (400, case.param, case.code)
    assert error["type"] == "invalid_request_error"
    assert str(case.limit) in error["message"]
    assert name in error["message"] or name in ("max_n", "max_salt_chars")  # error of the field's own range


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_bounded_by_the_engines_flag(field: str, server: OpenAIServer) -> None:
    server.ask(COMPLETIONS, **completion(**{field: 20}))
    status, error = server.refusal(COMPLETIONS, **completion(**{field: 21}))
    assert (status, error["param"]) == (400, field)
    assert "max_logprobs" in error["message"]


def test_depth_is_bounded_on_every_route_and_before_the_interpreter_gives_up() -> None:
    app = make_app(max_json_depth=5)
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/v1/prefixes"):
        for depth in (6, 1000, 100_000):
            content = b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
            answer = ask(app, "POST", path, content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_reference_lists_every_limit_with_its_flag_and_default() -> None:
    table = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `--([a-z-]+)` \| ([^|]+?) \|", table, flags=re.MULTILINE))
    for field in fields(Limits):
        shown = rows[field.name.replace("_", "-")].replace(",", "")
        sizes = {"KiB": 1 << 10, "MiB": 1 << 20}
        number = re.fullmatch(r"(\d+|\d\.\d+)(KiB|MiB|)", shown)
        assert number is not None, shown
        assert float(number[1]) * sizes.get(number[2], 1) == field.default
