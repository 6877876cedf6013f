"""Limits on reasoning tokens: thinking_token_budget of chats, budget_tokens of the Messages API."""

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic

from quire.engine.options import EngineOptions
from support.calling_model import WEATHER, CallingModel, call_text, write_calling_model
from support.openai_server import LIMIT_S, NAME, Json, OpenAIServer, openai_server

CHAT = "/v1/chat/completions"
ULM = {"city": "Ulm"}
# Behind a forced end of the reasoning the model goes on with the text of the position that it has reached.
TEXTS = {
    "thinks": "So it is.</think>Yes, and no.",
    "begins": "<think>So it is.</think>Yes, and no.",
    "plain": "Yes, and no.",
    "calls": f"<think>Ulm.</think>{call_text('get_weather', ULM)}",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CallingModel:
    return write_calling_model(tmp_path_factory.mktemp("calling"), TEXTS, added=("<think>", "</think>"))


@pytest.fixture(scope="module")
def server(model: CallingModel) -> Iterator[OpenAIServer]:
    with openai_server(EngineOptions(model=str(model.folder), num_kv_blocks=512)) as running:
        yield running


def answer(server: OpenAIServer, model: CallingModel, name: str, **fields: Any) -> Json:  # noqa: ANN401 (JSON)
    """Return an answer; a stream has the same reasoning and content."""
    asked = {"messages": model.messages[name], "temperature": 0} | fields
    if name == "thinks":
        asked["chat_template_kwargs"] = {"thinks": True}
    whole = server.ask(CHAT, **asked)
    deltas = [choice["delta"] for event in server.stream(CHAT, **asked) for choice in event["choices"]]
    for key in ("reasoning", "content"):
        streamed = "".join(delta.get(key) or "" for delta in deltas)
        assert streamed == (whole["choices"][0]["message"][key] or "")
    return whole


def num_reasoning_tokens(whole: Json) -> int:
    """Return the tokens up to the end of the reasoning, markers included."""
    count: int = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return count


@pytest.mark.parametrize(("name", "num_markers"), [("thinks", 1), ("begins", 2)])
@pytest.mark.parametrize("budget", [0, 1, 3])
def test_reasoning_is_ended_when_its_budget_is_spent(
    server: OpenAIServer, model: CallingModel, name: str, num_markers: int, budget: int
) -> None:
    free = answer(server, model, name)
    bounded = answer(server, model, name, thinking_token_budget=budget)
    assert num_reasoning_tokens(free) > budget + num_markers
    assert num_reasoning_tokens(bounded) == (budget + num_markers if budget else 0)  # no reasoning, no markers of it
    (choice,) = bounded["choices"]
    reasoning = choice["message"]["reasoning"] or ""
    assert free["choices"][0]["message"]["reasoning"].startswith(reasoning)
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("name", list(TEXTS))
@pytest.mark.parametrize("budget", [100, -1, None])
def test_budget_that_is_not_spent_changes_nothing(
    server: OpenAIServer, model: CallingModel, name: str, budget: int | None
) -> None:
    fields: Json = {"tools": [WEATHER]} if name == "calls" else {}
    (free,) = answer(server, model, name, **fields)["choices"]
    (bounded,) = answer(server, model, name, **fields, thinking_token_budget=budget)["choices"]
    for each in (free, bounded):
        for call in each["message"].get("tool_calls", []):
            call["id"] = ""
    assert bounded == free


def test_what_follows_a_spent_budget_has_its_form(server: OpenAIServer, model: CallingModel) -> None:
    form = {"structured_outputs": {"regex": "[ab]{2}"}}
    whole = answer(server, model, "thinks", thinking_token_budget=2, **form)
    assert num_reasoning_tokens(whole) == 3
    assert set(whole["choices"][0]["message"]["content"].strip()) <= {"a", "b"}
    forced = answer(
        server, model, "begins", thinking_token_budget=2, tools=[WEATHER], tool_choice="required", max_tokens=100
    )
    assert num_reasoning_tokens(forced) == 4
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    answered = answer(server, model, "begins", thinking_token_budget=2, tools=[strict])
    assert num_reasoning_tokens(answered) == 4


@pytest.mark.parametrize("budget", [-2, 1.5, "many"])
def test_invalid_budgets_are_refused(server: OpenAIServer, model: CallingModel, budget: object) -> None:
    status, error = server.refusal(CHAT, messages=model.messages["plain"], thinking_token_budget=budget)
    assert (status, error["param"]) == (400, "thinking_token_budget")


def test_budget_is_refused_with_beams_and_where_reasoning_has_no_markers(
    server: OpenAIServer, model: CallingModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    asked: Json = {"messages": model.messages["plain"], "thinking_token_budget": 5}
    status, error = server.refusal(CHAT, **asked, use_beam_search=True, n=2)
    assert (status, error["param"]) == (400, "thinking_token_budget")
    status, error = server.refusal("/v1/completions", prompt="x", thinking_token_budget=5)
    assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", "thinking_token_budget")
    spelled = write_calling_model(tmp_path_factory.mktemp("spelled"), TEXTS)  # its markers are several tokens each
    with openai_server(EngineOptions(model=str(spelled.folder), num_kv_blocks=512)) as other:
        status, error = other.refusal(CHAT, **asked)
        assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", "thinking_token_budget")
        assert "special token at each end" in error["message"]
        with Anthropic(base_url=other.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
            assert client.messages.create(**of_messages(spelled, "begins", 2)).content


def of_messages(model: CallingModel, name: str, budget: object) -> dict[str, Any]:
    thinking = {"type": "enabled", "budget_tokens": budget}
    asked = {"model": NAME, "max_tokens": 100, "messages": model.messages[name], "thinking": thinking}
    return asked | {"extra_body": {"temperature": 0}}


def test_budget_of_the_messages_api_bounds_thinking(server: OpenAIServer, model: CallingModel) -> None:
    chat = answer(server, model, "begins", thinking_token_budget=2)["choices"][0]["message"]
    with Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        thinking, text = client.messages.create(**of_messages(model, "begins", 2)).content
        assert thinking.type == "thinking"
        assert text.type == "text"
        assert (thinking.thinking, text.text) == (chat["reasoning"], chat["content"])
        with pytest.raises(Exception, match="budget_tokens must be an integer from 1"):
            client.messages.create(**of_messages(model, "begins", 0))
