"""Client libraries that call tools, against a real server: a model recites a call, and then an answer."""

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any, Literal

os.environ["LANGSMITH_TRACING"] = "false"
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a price list

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from support.calling_model import WEATHER, CallingModel, call_text, write_calling_model
from support.clients import LIMIT_S
from support.server import ServerProcess, running_server

ULM = {"city": "Ulm"}
TEXTS = {
    "plain": "It is 18 degrees.",
    "call": call_text("get_weather", ULM),
    "reasoning": f"<think>Ulm, is it?</think>Let me see.\n{call_text('get_weather', ULM)}",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CallingModel:
    return write_calling_model(tmp_path_factory.mktemp("calling"), TEXTS)


@pytest.fixture(scope="module")
def server(model: CallingModel) -> Iterator[ServerProcess]:
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with running_server(str(model.folder), "--served-model-name", "calling", *flags) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0) as client:
        yield client


@pytest.fixture
def asked(model: CallingModel) -> dict[str, Any]:
    return {"model": "calling", "messages": model.messages["call"], "temperature": 0, "tools": [WEATHER]}


# --- openai -----------------------------------------------------------------------------------------------------------


def test_openai_round_trip(client: OpenAI, model: CallingModel, asked: dict[str, Any]) -> None:
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "get_weather", ULM)
    result = {"role": "tool", "tool_call_id": call.id, "content": model.result_before("plain", "call")}
    messages = [*asked["messages"], choice.message, result]
    answer = client.chat.completions.create(**asked | {"messages": messages}).choices[0]
    assert (answer.message.content, answer.message.tool_calls) == (TEXTS["plain"], None)


def test_openai_stream_helper(client: OpenAI, model: CallingModel, asked: dict[str, Any]) -> None:
    tools = [openai.pydantic_function_tool(Weather, name="get_weather")]
    tools[0]["function"].pop("strict", None)
    kinds = list[str]()
    fields = asked | {"messages": model.messages["reasoning"], "tools": tools}
    with client.chat.completions.stream(**fields) as stream:
        for event in stream:
            kinds.append(event.type)
        final = stream.get_final_completion().choices[0]
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= {*kinds}
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "Let me see."
    assert final.message.model_extra is not None
    assert final.message.model_extra["reasoning"] == "Ulm, is it?"
    (call,) = final.message.tool_calls or ()
    assert json.loads(call.function.arguments) == ULM


def test_openai_parse(client: OpenAI, asked: dict[str, Any]) -> None:
    """The helper sends strict functions, and reads their arguments."""
    choice = {"type": "function", "function": {"name": "Trip"}}
    fields = {"tools": [openai.pydantic_function_tool(Trip)], "tool_choice": choice}
    (parsed,) = client.chat.completions.parse(**asked | fields).choices[0].message.tool_calls or ()
    assert isinstance(parsed.function.parsed_arguments, Trip)


class Weather(BaseModel):
    """Weather of a city."""

    city: str


class Trip(BaseModel):
    """A trip to a city."""

    city: Literal["Ulm", "Rome"]
    days: Literal[1, 2, 3]


# --- langchain --------------------------------------------------------------------------------------------------------


@pytest.fixture
def langchain_model(server: ServerProcess) -> Any:  # noqa: ANN401
    pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make clients runs this test")
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="calling", temperature=0, timeout=LIMIT_S, max_retries=0
    )


def test_langchain_bind_tools(langchain_model: Any, model: CallingModel) -> None:  # noqa: ANN401
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = langchain_model.bind_tools([WEATHER])
    message = HumanMessage(model.messages["call"][0]["content"])
    answer = bound.invoke([message])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", ULM)
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    result = ToolMessage(model.result_before("plain", "call"), tool_call_id=call["id"])
    assert bound.invoke([message, answer, result]).content == TEXTS["plain"]


def test_langchain_stream(langchain_model: Any, model: CallingModel) -> None:  # noqa: ANN401
    from langchain_core.messages import HumanMessage

    first, *others = langchain_model.bind_tools([WEATHER]).stream(
        [HumanMessage(model.messages["reasoning"][0]["content"])]
    )
    for other in others:
        first += other
    assert first.content == "Let me see."
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [("get_weather", ULM)]


def test_langchain_forced_calls(langchain_model: Any) -> None:  # noqa: ANN401
    for choice in ("any", "Trip"):
        bound = langchain_model.bind_tools([Trip], tool_choice=choice, parallel_tool_calls=False)
        (call,) = bound.invoke("hi").tool_calls
        assert call["name"] == "Trip"
        assert Trip(**call["args"])
    for strict in (True, None):
        structured = langchain_model.with_structured_output(Trip, method="function_calling", strict=strict)
        assert isinstance(structured.invoke("hi"), Trip)


# --- instructor -------------------------------------------------------------------------------------------------------


def test_instructor(client: OpenAI) -> None:
    instructor = pytest.importorskip("instructor", reason="instructor is not installed: make clients runs this test")
    asking = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    fields = {"model": "calling", "temperature": 0, "messages": [{"role": "user", "content": "hi"}]}
    assert isinstance(asking.create(**fields, response_model=Trip, max_retries=0), Trip)


# --- pydantic-ai ------------------------------------------------------------------------------------------------------


def test_pydantic_ai_agent(server: ServerProcess, model: CallingModel) -> None:
    pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: make clients runs this test")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run() -> tuple[str, list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S) as client:
            chat = OpenAIChatModel("calling", provider=OpenAIProvider(openai_client=client))
            agent, cities = Agent(chat, model_settings={"temperature": 0}), list[str]()

            @agent.tool_plain
            def get_weather(city: str) -> str:
                cities.append(city)
                return model.result_before("plain", "call")

            answer = await agent.run(model.messages["call"][0]["content"])
            return answer.output, cities

    assert asyncio.run(run()) == (TEXTS["plain"], ["Ulm"])


def test_pydantic_ai_output(server: ServerProcess) -> None:
    pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: make clients runs this test")
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run() -> object:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S) as client:
            chat = OpenAIChatModel("calling", provider=OpenAIProvider(openai_client=client))
            settings = {"temperature": 0, "parallel_tool_calls": False}
            agent = Agent(chat, output_type=ToolOutput(Trip), model_settings=settings)
            return (await agent.run("hi")).output

    assert isinstance(asyncio.run(run()), Trip)


# --- openai-agents ----------------------------------------------------------------------------------------------------


def test_openai_agents(server: ServerProcess, model: CallingModel) -> None:
    pytest.importorskip("agents", reason="openai-agents is not installed: make clients runs this test")
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool

    async def run() -> tuple[str, list[str]]:
        cities = list[str]()

        @function_tool(strict_mode=False)
        def get_weather(city: str) -> str:
            cities.append(city)
            return model.result_before("plain", "call")

        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S) as client:
            chat = OpenAIChatCompletionsModel("calling", openai_client=client)
            settings = ModelSettings(temperature=0)
            agent = Agent("weather", model=chat, tools=[get_weather], model_settings=settings)
            answer = await Runner.run(agent, model.messages["call"][0]["content"])
            return answer.final_output, cities

    assert asyncio.run(run()) == (TEXTS["plain"], ["Ulm"])


# --- litellm ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Items? .* using the `ReadOnly` qualifier:UserWarning")
@pytest.mark.filterwarnings("ignore:Accessing the 'model_(computed_)?fields' attribute on:DeprecationWarning")
def test_litellm_tools(server: ServerProcess, model: CallingModel, monkeypatch: pytest.MonkeyPatch) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed: make clients runs this test")
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    common = {"model": "hosted_vllm/calling", "api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0}
    common |= {"messages": model.messages["reasoning"], "tools": [WEATHER], "max_retries": 0, "timeout": LIMIT_S}
    with openai.DefaultHttpxClient() as session:
        monkeypatch.setattr(litellm, "client_session", session)
        message = litellm.completion(**common).choices[0].message
        chunks = list(litellm.completion(**common, stream=True))
        fields = {"tools": [openai.pydantic_function_tool(Trip)], "tool_choice": "required"}
        (forced,) = litellm.completion(**common | fields, parallel_tool_calls=False).choices[0].message.tool_calls
        litellm.in_memory_llm_clients_cache.flush_cache()
    assert Trip(**json.loads(forced.function.arguments))
    assert message.content == "Let me see."
    assert message.reasoning_content == "Ulm, is it?"
    assert json.loads(message.tool_calls[0].function.arguments) == ULM
    whole = litellm.stream_chunk_builder(chunks).choices[0].message
    assert whole.tool_calls[0].function.name == "get_weather"
    assert json.loads(whole.tool_calls[0].function.arguments) == ULM
