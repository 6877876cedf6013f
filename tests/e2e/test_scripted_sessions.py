"""Sessions in the bodies that coding agents send, with a model that answers by a script: calls, results, a summary.

The bodies have the fields of those that Claude Code 2.1.197, Codex 0.171.0 and Qwen Code 0.15.10 send, and other words.
`make agents` runs the agents themselves.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from quire.engine.options import EngineOptions
from support.openai_server import NAME, OpenAIServer, openai_server
from support.scripted_model import PLAIN, write_scripted_model

Json = dict[str, Any]
SCHEMA = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {
    "path": {"type": "string", "description": "the file"}, "lines": {"type": "number", "nullable": True},
    "metadata": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
}, "required": ["path"], "additionalProperties": False}  # fmt: skip
ASK, NAMES = "[[edit]] Mend it.", ["Read", "team__close"]
LISTING = {"path": "notes.txt"}


def call(name: str, arguments: Json) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def text(words: str) -> Json:
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIServer]:
    folder = tmp_path_factory.mktemp("scripted")
    steps = ["I look.\n" + call("Read", LISTING), call("team__close", {"path": "x"}), "It is mended, naïvely. 🙂"]
    model = write_scripted_model(folder, {"edit": steps, PLAIN: ["In short: mended."]})
    with openai_server(EngineOptions(model=str(model), num_kv_blocks=2048, max_model_len=8192)) as running:
        yield running


def test_session_of_messages(server: OpenAIServer) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    turns: list[Json] = [
        {"role": "user", "content": [
            text("<system-reminder>Today is Monday.</system-reminder>"), text(ASK) | mark,
        ]},
        {"role": "system", "content": "Kinds of helpers: none."},
    ]  # fmt: skip
    body = {
        "model": NAME, "max_tokens": 400, "messages": turns, "thinking": {"type": "adaptive"},
        "system": [text("x-anthropic-billing-header: v=1;"), text("You help.") | mark],
        "tools": [{"name": name, "description": "d", "input_schema": SCHEMA} for name in NAMES], "stream": False,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"}, "metadata": {"user_id": '{"session_id":"0"}'},
    }  # fmt: skip
    results: list[Json] = [
        {"content": "1\tThe notes.", "is_error": False},
        {"content": [{"type": "tool_reference", "tool_name": "WebFetch"}]},
    ]
    for result in results:
        answer = server.ask("/v1/messages?beta=true", **body)
        assert answer["stop_reason"] == "tool_use"
        (use,) = [block for block in answer["content"] if block["type"] == "tool_use"]
        turns.append({"role": "assistant", "content": answer["content"]})
        turns.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"]} | result]})
    answer = server.ask("/v1/messages?beta=true", **body)
    assert [block["text"] for block in answer["content"]] == ["It is mended, naïvely. 🙂"]
    assert answer["usage"]["cache_read_input_tokens"] > 0
    fields = ("model", "messages", "tools", "system")
    assert server.ask("/v1/messages/count_tokens", **{name: body[name] for name in fields})["input_tokens"] > 0


def test_session_of_responses(server: OpenAIServer) -> None:
    items: list[Json] = [
        {"type": "message", "id": f"msg_{number}", "role": role, "content": [{"type": "input_text", "text": text}]}
        for number, (role, text) in enumerate((("developer", "You help."), ("developer", "Skills."), ("user", ASK)))
    ]
    close = {"type": "function", "name": "close", "description": "d", "strict": False, "parameters": SCHEMA}
    body = {
        "model": NAME, "input": items, "tools": [
            close | {"name": "Read"}, {"type": "namespace", "name": "team", "description": "Others.", "tools": [close]},
            {"type": "web_search", "external_web_access": True},
        ], "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"}, "store": False,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0", "client_metadata": {"thread_id": "0"},
        "service_tier": "priority",
    }  # fmt: skip
    calls = []
    for number in range(2):
        output = server.ask("/v1/responses", **body)["output"]
        items += output
        calls.append(output[-1])
        result = {"type": "function_call_output", "id": f"fco_{number}", "output": "ok"}
        items.append(result | {"call_id": calls[-1]["call_id"]})
    assert [(item.get("namespace"), item["name"]) for item in calls] == [(None, "Read"), ("team", "close")]
    (message,) = server.ask("/v1/responses", **body)["output"]
    assert message["content"][0]["text"] == "It is mended, naïvely. 🙂"
    items += [message, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Sum it up."}]}]
    (summary,) = server.ask("/v1/responses", **body | {"tools": [], "parallel_tool_calls": False})["output"]
    assert summary["content"][0]["text"] == "In short: mended."


def test_session_of_chats(server: OpenAIServer) -> None:
    messages: list[Json] = [{"role": "system", "content": "You help."}, {"role": "user", "content": [ASK]}]
    functions = [{"name": name, "description": "d", "parameters": SCHEMA} for name in NAMES]
    tools = [{"type": "function", "function": function} for function in functions]
    names = []
    for _ in NAMES:
        (choice,) = server.ask("/v1/chat/completions", messages=messages, tools=tools, max_tokens=400)["choices"]
        (made,) = choice["message"]["tool_calls"]
        names.append(made["function"]["name"])
        messages += [choice["message"], {"role": "tool", "tool_call_id": made["id"], "content": [text("1")]}]
    assert names == NAMES
    (choice,) = server.ask("/v1/chat/completions", messages=messages, tools=tools, max_tokens=400)["choices"]
    assert choice["message"]["content"] == "It is mended, naïvely. 🙂"
