"""Choices, JSON, grammars and tools with a model that means what it writes, over HTTP."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.engine.options import EngineOptions
from support.openai_server import OpenAIServer, openai_server

pytestmark = pytest.mark.real

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 20},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "likes": {
            "type": "array",
            "items": {"enum": ["tea", "paper", "rain"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
PLACE = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{2,11}$"}},
            "required": ["city"],
        },
        {"type": "null"},
    ]
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
QUESTION = "What is the weather in Paris?"


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[OpenAIServer]:
    """Return a server of the chat model."""
    with openai_server(EngineOptions(str(smollm2), max_model_len=1024)) as running:
        yield running


def chat(server: OpenAIServer, question: str, **body: Any) -> dict[str, Any]:  # noqa: ANN401 (JSON)
    """Return the first choice of a greedy answer."""
    body = {"temperature": 0, "max_tokens": 200} | body
    choice: dict[str, Any] = server.ask(
        "/v1/chat/completions", messages=[{"role": "user", "content": question}], **body
    )["choices"][0]
    return choice


@pytest.mark.parametrize(
    "schema", [PERSON, PLACE, {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4}]
)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}])
def test_json_fits_its_schema(server: OpenAIServer, schema: dict[str, Any], sampling: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    choice = chat(server, "Invent a person who lives in Paris.", response_format=wanted, **sampling)
    assert choice["finish_reason"] == "stop"
    Draft202012Validator(schema).validate(json.loads(choice["message"]["content"]))


def test_choice_is_the_likeliest_of_those_given(server: OpenAIServer) -> None:
    choices = ["hydrogen and oxygen", "iron and gold", "butter and bread"]
    choice = chat(server, "What is water made of?", structured_outputs={"choice": choices})
    assert (choice["message"]["content"], choice["finish_reason"]) == (choices[0], "stop")


@pytest.mark.parametrize("constraint", [
    {"regex": r"The answer is [0-9]{1,3}\."},
    {"grammar": 'start: "The answer is " /[0-9]{1,3}/ "."'},
], ids=["regex", "grammar"])  # fmt: skip
def test_regex_and_grammar_are_obeyed(server: OpenAIServer, constraint: dict[str, Any]) -> None:
    choice = chat(server, "What is two plus two?", structured_outputs=constraint)
    assert re.fullmatch(r"The answer is [0-9]{1,3}\.", choice["message"]["content"])
    assert choice["finish_reason"] == "stop"


ANY, ONE = "required", {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("wanted", [ANY, ONE], ids=["any", "one"])
def test_forced_tool_is_called_with_arguments_of_its_schema(server: OpenAIServer, wanted: object) -> None:
    choice = chat(server, QUESTION, tools=[WEATHER], tool_choice=wanted, parallel_tool_calls=False)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    Draft202012Validator(WEATHER["function"]["parameters"]).validate(arguments)
    assert arguments["city"] == "Paris"


def test_streamed_call_is_the_whole_one(server: OpenAIServer) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "tools": [WEATHER], "temperature": 0}
    body |= {"tool_choice": "required", "parallel_tool_calls": False}
    whole = server.ask("/v1/chat/completions", **body)["choices"][0]["message"]["tool_calls"][0]["function"]
    events = server.stream("/v1/chat/completions", **body)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    parts = [call["function"] for delta in deltas for call in delta.get("tool_calls") or []]
    assert "".join(part.get("arguments") or "" for part in parts) == whole["arguments"]
    assert "".join(part.get("name") or "" for part in parts) == whole["name"]


def test_readme_shows_what_the_model_answers(server: OpenAIServer) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    body = json.loads(re.search(r"-d '(\{\"messages\".*\})'", readme)[1])
    answer = server.ask("/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    assert answer in " ".join(readme.replace("\n> ", " ").split())
