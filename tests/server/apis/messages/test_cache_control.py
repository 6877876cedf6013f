"""Blocks marked with cache_control: pinned, bounded, renewed, let go, and apart from the pins of other keys."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types import Usage

from quire.engine.options import EngineOptions
from support.openai_server import LIMIT_S, NAME, OpenAIServer, openai_server

KEYS = ("key-one", "key-two")
SYSTEM = "Words that every question begins with, " * 8
MARK = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def running_server(demo_model: Path) -> Iterator[OpenAIServer]:
    options = EngineOptions(model=str(demo_model), max_model_len=1024, num_kv_blocks=256)
    with openai_server(options, api_key=KEYS, max_pinned_share=0.4, max_pinned_share_per_key=0.3) as server:
        yield server


@pytest.fixture
def server(running_server: OpenAIServer) -> Iterator[OpenAIServer]:
    """Return the server; nothing is left pinned."""
    yield running_server
    for key in KEYS:
        for pin in pins(running_server, key):
            running_server.http.delete(f"/v1/prefixes/{pin['id']}", headers=headers(key)).raise_for_status()
    running_server.wait_until(running_server.is_idle)


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def pins(server: OpenAIServer, key: str) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = server.http.get("/v1/prefixes", headers=headers(key)).json()["data"]
    return data


def ask(server: OpenAIServer, question: str, key: str = KEYS[0], **fields: Any) -> Usage:  # noqa: ANN401 (the body's)
    """Return the usage of an answer. The system text is marked."""
    system = [{"type": "text", "text": SYSTEM, "cache_control": MARK}]
    asked = {"system": system, "messages": [{"role": "user", "content": question}]} | fields
    with Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=LIMIT_S) as client:
        return client.messages.create(model=NAME, max_tokens=2, **asked).usage


def test_marked_prefix_is_written_once_and_read_then(server: OpenAIServer) -> None:
    first = ask(server, "What?")
    (pin,) = pins(server, KEYS[0])
    assert pin["expires"] - pin["created"] in (300, 301)
    second = ask(server, "Something else?")
    assert first.cache_creation_input_tokens == pin["num_tokens"] - (first.cache_read_input_tokens or 0)
    assert second.cache_creation_input_tokens == 0
    assert second.cache_read_input_tokens is not None
    assert second.cache_read_input_tokens >= pin["num_tokens"]


def test_later_turn_lets_the_pin_of_the_turns_before_go(server: OpenAIServer) -> None:
    turns: list[Any] = [{"role": "user", "content": [{"type": "text", "text": SYSTEM, "cache_control": MARK}]}]
    ask(server, "", messages=turns, system="Be brief.")
    (before,) = pins(server, KEYS[0])
    more = {"type": "text", "text": "Go on. " * 9, "cache_control": MARK}
    turns += [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": [more]}]
    ask(server, "", messages=turns, system="Be brief.")
    (after,) = pins(server, KEYS[0])
    assert after["id"] != before["id"]
    assert after["num_tokens"] > before["num_tokens"]


def test_mark_that_is_seen_again_lives_on(server: OpenAIServer) -> None:
    ask(server, "What?")
    (before,) = pins(server, KEYS[0])
    system = [{"type": "text", "text": SYSTEM, "cache_control": MARK | {"ttl": "1h"}}]
    ask(server, "What then?", system=system)
    (after,) = pins(server, KEYS[0])
    assert after["id"] == before["id"]
    assert 3500 < after["expires"] - before["created"] < 3700


def test_later_shorter_mark_does_not_shorten_a_pin(server: OpenAIServer) -> None:
    def user(text: str, ttl: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": text, "cache_control": MARK | {"ttl": ttl}}]}

    def expires_in(turns: list[Any]) -> int:
        """Return the seconds for which the only pin lives after these turns."""
        ask(server, "", messages=turns, system="Be brief.")
        (pin,) = pins(server, KEYS[0])
        return int(pin["expires"] - pin["created"])

    assert expires_in([user(SYSTEM, "1h")]) > 3500
    assert expires_in([user(SYSTEM, "5m")]) > 3500
    turns = [user(SYSTEM, "5m"), {"role": "assistant", "content": "Fine."}, user("Go on. " * 9, "5m")]
    assert expires_in(turns) > 3400, "what extends it lives as long"


def test_pin_expires(server: OpenAIServer) -> None:
    ask(server, "What?")
    service = server.service
    (pin,) = pins(server, KEYS[0])
    server.on_loop(lambda: service.client.expire_prefix(pin["id"], 0.01))
    server.wait_until(lambda: not len(service.client.pinned))
    assert ask(server, "What?").cache_creation_input_tokens is not None
    assert len(pins(server, KEYS[0])) == 1


def test_pins_of_two_keys_are_apart(server: OpenAIServer) -> None:
    ask(server, "What?", KEYS[0])
    ask(server, "What?", KEYS[1])
    (one,), (other,) = pins(server, KEYS[0]), pins(server, KEYS[1])
    assert one["id"] != other["id"]


def test_prefix_that_finds_no_room_is_not_pinned_and_the_answer_comes(server: OpenAIServer) -> None:
    wide = 4 * SYSTEM
    for number in range(12):
        usage = ask(server, f"{number}?", system=[{"type": "text", "text": f"{number} {wide}", "cache_control": MARK}])
        assert usage.output_tokens == 2
    blocks = sum(pin["num_blocks"] for pin in pins(server, KEYS[0]))
    assert 0 < blocks <= int(0.3 * 256)
    assert usage.cache_creation_input_tokens == 0


@pytest.mark.parametrize("fields", [
    {"messages": [{"role": "user", "content": "short"}], "system": "x", "cache_control": MARK},
    {"messages": [{"role": "user", "content": SYSTEM}], "system": "x", "cache_control": MARK},
    {"messages": [{"role": "user", "content": SYSTEM}, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "a", "name": "f", "input": {}, "cache_control": MARK}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "18"}]}]},
    {"messages": [{"role": "user", "content": SYSTEM}, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "18" * 40,
                                      "cache_control": MARK}]}]},
    {"messages": [{"role": "user", "content": "hi"}], "system": "x",
     "tools": [{"name": "f", "description": SYSTEM, "input_schema": {}, "cache_control": MARK},
               {"name": "g", "input_schema": {}}]},
])  # fmt: skip
def test_any_block_may_be_marked(server: OpenAIServer, fields: dict[str, Any]) -> None:
    """Where the prefix has a block of tokens, it is pinned and read again."""
    first = ask(server, "", **fields)
    again = ask(server, "", **fields)
    assert again.cache_creation_input_tokens == 0
    pinned = pins(server, KEYS[0])
    assert len(pinned) == (first.cache_creation_input_tokens != 0 or bool(pinned))
    if pinned:
        assert (again.cache_read_input_tokens or 0) >= pinned[0]["num_tokens"]


def test_deferred_tools_are_described_where_a_result_refers_to_them(server: OpenAIServer) -> None:
    hello = {"role": "user", "content": "hi"}
    search, weather = ({"name": name, "input_schema": {"type": "object"}} for name in ("search", "weather"))
    later = weather | {"defer_loading": True}
    found = [
        hello,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "search", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
            {"type": "tool_reference", "tool_name": "weather"}]}]},
    ]  # fmt: skip

    def count(messages: Any, *tools: Any) -> int:  # noqa: ANN401 (the body's)
        with Anthropic(base_url=server.url, api_key=KEYS[0], max_retries=0, timeout=LIMIT_S) as client:
            return client.messages.count_tokens(model=NAME, messages=messages, tools=tools).input_tokens

    assert count([hello], search, later) == count([hello], search) < count([hello], search, weather)
    assert count(found, search) < count(found, search, later)
    marked = [*found[:2], {"role": "user", "content": [{**found[2]["content"][0], "cache_control": MARK}]}]  # type: ignore[dict-item]
    asked = {"system": "x", "messages": marked, "tools": [search, later]}
    first, again = ask(server, "", **asked), ask(server, "", **asked)
    assert first.cache_creation_input_tokens
    assert again.cache_read_input_tokens == first.cache_creation_input_tokens + (first.cache_read_input_tokens or 0)
