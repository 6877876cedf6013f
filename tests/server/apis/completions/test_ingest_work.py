"""Work between two iterations of the event loop while hostile bodies come in: bounded on every route, for every field.

A meter counts what the parser, the validator and the encoder of messages to other processes are given. The bodies are
as large as the default limits allow.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from quire.engine.processes import client as client_module
from quire.server.api import json_decoding, request_bodies
from quire.server.api.json_decoding import SLICE_BYTES
from quire.server.grammars import grammar_checker as checker
from quire.server.options import DEFAULT_LIMITS
from quire.server.templates import template_renderer
from support.openai_server import OpenAIServer

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE, PREFIXES = (
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/prefixes"
)
SIZE = DEFAULT_LIMITS.max_body_bytes - 256
MAX_VALUES = DEFAULT_LIMITS.max_json_values
LANES = 2                                         # one slice of each may be done in an iteration of the event loop
Counts = dict[str, int]

# Per turn. A list of numbers has an element for two bytes, and one that is alone on its slice may be twice as long.
MOST: Counts = {
    "elements": LANES * SLICE_BYTES,              # parsed: numbers and the like
    "values": LANES * MAX_VALUES,                 # parsed: strings, lists, objects; 8 ms where all are one object's
    "sent": DEFAULT_LIMITS.max_conversation_bytes + (1 << 20),  # bytes
    "requests": 8,                                # with the engine's reports between them
}


class Meter:
    """Sums of work in the present iteration of the event loop, and the highest of any turn."""

    def __init__(self) -> None:
        self.highest: Counts = dict.fromkeys(MOST, 0)
        self._now: Counts = dict.fromkeys(MOST, 0)

    def end_turn(self) -> None:
        self.highest = {name: max(self.highest[name], num) for name, num in self._now.items()}
        self._now = dict.fromkeys(MOST, 0)

    def parser(self, decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        def metered(text: bytes) -> Any:  # noqa: ANN401 (JSON)
            self._now["elements"] += text.count(b",")
            self._now["values"] += text.count(b"[") + text.count(b"{") + text.count(b'"') // 2
            return decode(text)

        return metered

    def frame(self, encode: Callable[[msgspec.Struct], bytes]) -> Callable[[msgspec.Struct], bytes]:
        def metered(message: msgspec.Struct) -> bytes:
            framed = encode(message)
            self._now["sent"] += len(framed)
            self._now["requests"] += 1
            return framed

        return metered


@pytest.fixture
def meter(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Meter]:
    """Return a meter of the server's event loop, whose limits are the default ones."""
    meter = Meter()
    defaults = {name: getattr(DEFAULT_LIMITS, name) for name in ("max_queued_requests", "max_n")}
    monkeypatch.setattr(server.service, "options", replace(server.service.options, **defaults))
    for module, name in ((json_decoding, "loads"), (json_decoding, "_decode_raw"), (request_bodies, "loads")):
        monkeypatch.setattr(module, name, meter.parser(getattr(module, name)))
    for module in (client_module, template_renderer, checker):
        monkeypatch.setattr(module, "frame", meter.frame(module.frame))
    ticking = server.on_loop(lambda: asyncio.get_running_loop().create_task(_tick(meter)))
    yield meter
    server.on_loop(ticking.cancel)


async def _tick(meter: Meter) -> None:
    while True:
        meter.end_turn()
        await asyncio.sleep(0)


def filled(head: bytes, piece: bytes, tail: bytes) -> bytes:
    """Return a body of the largest size."""
    return head + piece * ((SIZE - len(head) - len(tail)) // len(piece)) + tail


def chat(content: bytes, more: bytes = b"") -> bytes:
    return b'{"max_tokens":1,"messages":[{"role":"user","content":' + content + b"}]" + more + b"}"


def numbered(head: bytes, piece: bytes, count: int, tail: bytes) -> bytes:
    return head + b",".join(piece % number for number in range(count)) + tail


PROMPT = b'{"max_tokens":1,"prompt":'
PART = b'{"type":"text","text":""}'
VARIABLE = b',"chat_template_kwargs":{"x":'
TOOLS = b',"tool_choice":"required","tools":[%s]'
TOOL = b'{"type":"function","function":{"name":"f","parameters":%s}}'
SCHEMA = b',"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":%s}}'
PROPERTIES = numbered(b'{"type":"object","properties":{', b'"%x":{"type":"string"}', 1000, b"}}")
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {  # made by their tests: together they take 150 MiB
    "a text": (COMPLETIONS, lambda: filled(PROMPT + b'"', b"a", b'"}')),
    "escapes": (COMPLETIONS, lambda: filled(PROMPT + b'"', b"\\u0041", b'"}')),
    "token ids": (COMPLETIONS, lambda: filled(PROMPT + b"[", b"1,", b"1]}")),
    "token ids in a list": (COMPLETIONS, lambda: filled(PROMPT + b"[[", b"1,", b"1]]}")),
    "1,024 prompts": (COMPLETIONS, lambda: PROMPT + b"[" + b",".join([b"[" + b"5," * 1000 + b"5]"] * 1024) + b"]}"),
    "1,024 texts with stop strings": (
        COMPLETIONS,
        lambda: numbered(b'{"max_tokens":1,"stop":[', b'"stop %d"', 64, b'],"prompt":[') + b'"x",' * 1023 + b'"x"]}',
    ),
    "brackets": (COMPLETIONS, lambda: filled(PROMPT + b"[", b"[],", b"[]]}")),
    "texts": (COMPLETIONS, lambda: filled(PROMPT + b"[", b'"",', b'""]}')),
    "objects in an unknown field": (COMPLETIONS, lambda: filled(PROMPT + b'"a","x":[', b"{},", b"{}]}")),
    "numbers in an unknown field": (COMPLETIONS, lambda: filled(PROMPT + b'"a","x":[', b"1,", b"1]}")),
    "unknown fields": (COMPLETIONS, lambda: numbered(PROMPT + b'"a",', b'"%x":1', 380_000, b"}")),
    "as many unknown fields as may be": (
        COMPLETIONS, lambda: numbered(PROMPT + b'"a",', b'"%x":1', MAX_VALUES - 4, b"}"),
    ),
    "equal names": (COMPLETIONS, lambda: filled(PROMPT + b'"a"', b',"n":1', b"}")),
    "a long number": (COMPLETIONS, lambda: filled(b'{"n":', b"1", b"}")),
    "nested": (COMPLETIONS, lambda: filled(b'{"x":', b"[", b"}")),
    "a long name": (COMPLETIONS, lambda: filled(b'{"', b"\\n", b'":1}')),
    "an unsupported field": (COMPLETIONS, lambda: filled(PROMPT + b'"a","tools":[', b"1,", b"1]}")),
    "logit_bias": (COMPLETIONS, lambda: numbered(PROMPT + b'"a","logit_bias":{', b'"%d":1', 4096, b"}}")),
    "too much logit_bias": (COMPLETIONS, lambda: numbered(PROMPT + b'"a","logit_bias":{', b'"%d":1', 300_000, b"}}")),
    "stop tokens": (COMPLETIONS, lambda: filled(PROMPT + b'"a","stop_token_ids":[', b"1,", b"1]}")),
    "allowed tokens": (COMPLETIONS, lambda: filled(PROMPT + b'"a","allowed_token_ids":[', b"1,", b"1]}")),
    "bad words": (COMPLETIONS, lambda: filled(PROMPT + b'"a","bad_words":[', b'"a",', b'"a"]}')),
    "text parts": (CHAT, lambda: chat(filled(b"[", PART + b",", PART + b"]")[: SIZE - 90])),
    "parts as may be": (CHAT, lambda: chat(b"[" + (PART + b",") * 6000 + PART + b"]")),
    "numbers in a message": (CHAT, lambda: filled(b'{"messages":[{"role":"user","content":"","x":[', b"1,", b"1]}]}")),
    "messages": (CHAT, lambda: b'{"messages":[' + b",".join([b'{"role":"user","content":"hi"}'] * 4096) + b"]}"),
    "keys of a message": (
        CHAT, lambda: numbered(b'{"messages":[{"role":"user","content":"",', b'"%x":1', 300_000, b"}]}"),
    ),
    "template variables": (CHAT, lambda: chat(b'"a"', filled(VARIABLE + b"[", b"[],", b"[]]}")[: SIZE - 90])),
    "variables as may be": (CHAT, lambda: chat(b'"a"', VARIABLE + b"[" + b"[]," * 32_000 + b"[]]}")),
    "numbers as variables": (CHAT, lambda: chat(b'"a"', filled(VARIABLE + b"[", b"1,", b"1]}")[:-100] + b"1]}")),
    "a long message": (CHAT, lambda: chat(b'"' + b"a" * (SIZE - 100) + b'"')),
    "tools": (CHAT, lambda: chat(b'"a"', b',"tools":[' + b",".join([TOOL % b"{}"] * 20_000) + b"]")),
    "tools as may be": (CHAT, lambda: chat(b'"a"', TOOLS % b",".join([TOOL % PROPERTIES] * 4))),
    "a tool with brackets": (CHAT, lambda: chat(b'"a"', TOOLS % (TOOL % (b'{"x":[' + b"[]," * 1_000_000 + b"[]]}")))),
    "a tool with a text": (CHAT, lambda: chat(b'"a"', TOOLS % (TOOL % (b'{"title":"' + b"a" * (SIZE - 500) + b'"}')))),
    "a schema": (CHAT, lambda: chat(b'"a"', SCHEMA % PROPERTIES)),
    "a schema with brackets": (CHAT, lambda: chat(b'"a"', SCHEMA % (b'{"enum":[' + b"[]," * 1_000_000 + b"[]]}"))),
    "a schema with a text": (CHAT, lambda: chat(b'"a"', SCHEMA % (b'{"title":"' + b"a" * (SIZE - 500) + b'"}'))),
    "a schema as text": (COMPLETIONS, lambda: filled(PROMPT + b'"a","guided_json":"', b"a", b'"}')),
    "choices": (COMPLETIONS, lambda: filled(PROMPT + b'"a","guided_choice":[', b'"a",', b'"a"]}')),
    "a regex": (COMPLETIONS, lambda: filled(PROMPT + b'"a","guided_regex":"', b"a", b'"}')),
    "a grammar": (COMPLETIONS, lambda: filled(PROMPT + b'"a","structured_outputs":{"grammar":"', b"a", b'"}}')),
    "unknown constraints": (
        COMPLETIONS, lambda: numbered(PROMPT + b'"a","structured_outputs":{', b'"%x":1', 300_000, b"}}"),
    ),
    "text to tokenize": (TOKENIZE, lambda: filled(b'{"prompt":"', b"ab ", b'"}')),
    "brackets to tokenize": (TOKENIZE, lambda: filled(b'{"prompt":[', b"[],", b"[]]}")),
    "tokens": (DETOKENIZE, lambda: filled(b'{"tokens":[', b"5,", b"5]}")),
    "tokens that are none": (DETOKENIZE, lambda: filled(b'{"tokens":[', b"[],", b"5]}")),
    "a prefix": (PREFIXES, lambda: filled(b'{"prompt":[', b"5,", b"5]}")),
    "a salt": (PREFIXES, lambda: filled(b'{"prompt":[5],"cache_salt":"', b"5", b'"}')),
}


@pytest.mark.parametrize("name", BODIES)
def test_no_turn_of_the_loop_is_long(name: str, server: OpenAIServer, meter: Meter) -> None:
    path, make_body = BODIES[name]
    response = server.http.post(path, content=make_body(), headers={"content-type": "application/json"})
    assert response.status_code in (200, 400), response.text[:500]
    assert meter.highest["elements"] > 0 or meter.highest["values"] > 0 or response.status_code == 400
    for count, most in MOST.items():
        assert meter.highest[count] <= most, (count, meter.highest)
