"""Ollama's API over several models: forms, streams, tool calls, reasoning, and models that stay or go."""

import json
import math
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.model.resolve import DEMO_MODEL
from quire.server.errors import ApiError
from quire.server.models.ollama_forms import OllamaChatBody, chat_messages, keep_alive_s, sampling
from support.calling_model import WEATHER, CallingModel, call_text, write_calling_model
from support.server import ANSWER_LIMIT_S, ServerProcess, running_server, wait_until
from support.stopping import stopped_children

TEXTS = {"call": call_text("get_weather", {"city": "Rome"}), "thought": "<think>why</think>because", "plain": "water"}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> CallingModel:
    return write_calling_model(tmp_path_factory.mktemp("models") / "calling", TEXTS)


@pytest.fixture(scope="module")
def server(calling: CallingModel) -> Iterator[ServerProcess]:
    (calling.folder.parent / "demo").symlink_to(DEMO_MODEL)
    with running_server("--models-dir", str(calling.folder.parent), "--num-kv-blocks", "64") as server:
        yield server


def ask(server: ServerProcess, kind: str, **body: Any) -> Any:  # noqa: ANN401 (JSON)
    answer = server.post(f"/api/{kind}", {"stream": False} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines(server: ServerProcess, kind: str, **body: Any) -> list[Any]:  # noqa: ANN401 (JSON)
    answer = server.post(f"/api/{kind}", body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def chat(calling: CallingModel, text: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 (JSON)
    options = {"temperature": 0, "num_predict": calling.num_tokens[text], "num_ctx": 2048, "num_gpu": 0}
    return {"model": "calling:latest", "messages": calling.messages[text], "options": options} | fields


def test_chat_is_one_answer_or_lines_of_it(server: ServerProcess, calling: CallingModel) -> None:
    whole = ask(server, "chat", **chat(calling, "plain"))
    assert whole["model"] == "calling:latest"
    assert whole["message"] == {"role": "assistant", "content": "water"}
    assert (whole["done"], whole["done_reason"]) == (True, "stop")
    assert whole["eval_count"] == calling.num_tokens["plain"]
    assert whole["prompt_eval_count"] > 0
    assert 0 <= whole["load_duration"] <= whole["total_duration"]
    *parts, last = lines(server, "chat", **chat(calling, "plain"))
    assert "".join(each["message"]["content"] for each in parts) == "water"
    assert not any(each["done"] for each in parts)
    assert (last["done_reason"], last["eval_count"]) == ("stop", whole["eval_count"])


def test_calls_have_objects_and_their_results_find_them(server: ServerProcess, calling: CallingModel) -> None:
    called = {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    body = chat(calling, "call", tools=[WEATHER])
    assert ask(server, "chat", **body)["message"]["tool_calls"] == [called]
    *_, call, last = lines(server, "chat", **body)
    assert call["message"]["tool_calls"] == [called]
    assert last["done_reason"] == "stop"
    result = calling.result_before("plain", "call")
    messages = [*calling.messages["call"], {"role": "assistant", "content": "", "tool_calls": [called]},
                {"role": "tool", "tool_name": "get_weather", "content": result}]  # fmt: skip
    body = chat(calling, "plain", messages=messages, tools=[WEATHER])
    assert ask(server, "chat", **body)["message"]["content"] == "water"


def test_thinking_is_apart(server: ServerProcess, calling: CallingModel) -> None:
    message = ask(server, "chat", **chat(calling, "thought", think=True))["message"]
    assert (message["thinking"], message["content"]) == ("why", "because")
    parts = lines(server, "chat", **chat(calling, "thought"))
    assert "".join(each["message"].get("thinking", "") for each in parts) == "why"
    assert "".join(each["message"]["content"] for each in parts) == "because"


def test_generate_takes_texts_with_the_template_or_raw(server: ServerProcess, calling: CallingModel) -> None:
    body = chat(calling, "plain", prompt=calling.messages["plain"][0]["content"], messages=None)
    assert ask(server, "generate", **body)["response"] == "water"
    *parts, last = lines(server, "generate", **body)
    assert ("".join(each["response"] for each in parts), last["done"]) == ("water", True)
    body = {"model": "demo", "prompt": "import os", "options": {"num_predict": 3, "temperature": 0}, "raw": True}
    raw = ask(server, "generate", **body)
    plain = server.post("/v1/completions", {"model": "demo", "prompt": "import os", "max_tokens": 3, "temperature": 0})
    assert raw["response"] == plain.json()["choices"][0]["text"]
    assert raw["done_reason"] == "length"


def test_schema_forms_the_answer(server: ServerProcess) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "format": schema}
    assert json.loads(ask(server, "chat", **body)["message"]["content"]) == {"a": 7}


def test_models_are_listed_shown_and_kept_as_long_as_asked(server: ServerProcess) -> None:
    tags = server.get("/api/tags").json()["models"]
    assert [each["name"] for each in tags] == ["calling", "demo"]
    assert tags[1]["size"] > 10_000_000
    assert tags[1]["details"]["family"] == "llama"
    shown = ask(server, "show", model="demo:latest")
    assert shown["model_info"]["llama.context_length"] == 2048
    assert server.get("/api/version").json()["version"]
    assert ask(server, "generate", model="demo", keep_alive=-1)["done_reason"] == "load"
    (running,) = server.get("/api/ps").json()["models"]
    assert (running["name"], running["expires_at"]) == ("demo", "9999-12-31T23:59:59Z")
    assert ask(server, "chat", model="demo", messages=[], keep_alive=0)["done_reason"] == "unload"
    wait_until(lambda: server.get("/api/ps").json()["models"] == [])
    body = {"model": "demo", "prompt": "x", "raw": True, "options": {"num_predict": 1}, "keep_alive": "0s"}
    ask(server, "generate", **body)
    wait_until(lambda: not server.child_pids())


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("chat", {"model": "none", "messages": [{"role": "user", "content": "x"}]}, 404, "there is no model 'none'"),
        ("chat", {"messages": []}, 400, "missing required field `model`"),
        ("chat", {"model": "demo", "messages": [{"role": "user", "content": "x", "images": ["eA=="]}]}, 400, "images"),
        ("chat", {"model": "demo", "messages": [{"role": "user"}], "options": {"top_p": 3}}, 400, "top_p"),
        ("generate", {"model": "demo", "prompt": "x", "suffix": "y"}, 400, "suffix is not supported"),
        ("generate", {"model": "demo", "prompt": "x", "keep_alive": "soon"}, 400, "keep_alive must be seconds"),
        ("embed", {"model": "demo"}, 400, "the body must have input"),
        ("embed", {"model": "demo", "input": "x"}, 400, "embed"),
        ("pull", {"model": "x"}, 404, "quire pull, list and rm manage models"),
    ],
)
def test_errors_have_their_form(server: ServerProcess, path: str, body: Any, status: int, told: str) -> None:  # noqa: ANN401
    answer = server.post(f"/api/{path}", body)
    assert answer.status_code == status
    assert [*answer.json()] == ["error"]
    assert told in answer.json()["error"]


@pytest.mark.parametrize("path", ["api/chat", "v1/chat/completions"])
@pytest.mark.parametrize("body", [b'{"model": "\xff"}', b'{"more": ' + b"[" * 100_000], ids=["no UTF-8", "deep"])
def test_bodies_that_cannot_be_read_are_refused(server: ServerProcess, path: str, body: bytes) -> None:
    assert httpx.post(f"{server.url}/{path}", content=body, timeout=ANSWER_LIMIT_S).status_code == 400


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(None, None), (5, 5.0), (0, 0.0), (-1, math.inf), ("-1", math.inf), ("5m", 300.0), ("1h30m", 5400.0), ("0", 0.0),
     ("250ms", 0.25), ("-5m", math.inf), ("90", 90.0)],
)  # fmt: skip
def test_keep_alive_is_read_as_there(given: float | str | None, seconds: float | None) -> None:
    assert keep_alive_s(given) == seconds


@pytest.mark.parametrize("given", ["", "5 m", "m", "1.2.3s", float("nan")])
def test_other_keep_alive_is_refused(given: float | str) -> None:
    with pytest.raises(ApiError, match="keep_alive must be"):
        keep_alive_s(given)


def test_sampling_has_its_names_there() -> None:
    options = {"num_predict": -1, "repeat_penalty": 1.1, "top_k": 40, "num_ctx": 4096, "mirostat": 1, "seed": None}
    assert sampling(OllamaChatBody("m", options=options, format="json")) == {
        "repetition_penalty": 1.1, "top_k": 40, "response_format": {"type": "json_object"},
    }  # fmt: skip
    assert sampling(OllamaChatBody("m", think=False)) == {"reasoning_effort": "none"}
    assert sampling(OllamaChatBody("m", think="low", format="")) == {"reasoning_effort": "low"}


def test_results_of_calls_with_one_name_are_in_their_order() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("b", "a", "a")]
    made = chat_messages([{"role": "assistant", "tool_calls": calls}, *results, {"role": "tool", "content": "?"}])
    assert [each["tool_call_id"] for each in made[1:]] == ["call_1", "call_0", "call_2", "call_unknown"]
    for broken in ({"tool_calls": [1]}, {"tool_calls": [{"function": {}}]}):
        with pytest.raises(ApiError, match="tool_calls must be objects"):
            chat_messages([{"role": "assistant", **broken}])


def test_killed_model_ends_a_stream_with_an_error(server: ServerProcess) -> None:
    ask(server, "generate", model="demo", prompt="", keep_alive=-1)
    (pid,) = server.child_pids()
    body = {"model": "demo", "prompt": "import os", "raw": True}
    with stopped_children(pid), httpx.stream(
        "POST", server.url + "/api/generate", json=body, timeout=ANSWER_LIMIT_S
    ) as stream:
        os.kill(pid, signal.SIGKILL)
        (last,) = stream.iter_lines()
    assert "has died" in json.loads(last)["error"]
    assert ask(server, "generate", **body, options={"num_predict": 1})["eval_count"] == 1
