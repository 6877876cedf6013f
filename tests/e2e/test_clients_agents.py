"""Client libraries that speak /v1/responses and /v1/messages, and frameworks of agents, against a real server."""

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

os.environ["LANGSMITH_TRACING"] = "false"
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a price list

import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from support.calling_model import CITY, WEATHER, CallingModel, call_text, write_calling_model
from support.clients import LIMIT_S
from support.server import ServerProcess, running_server
from support.small_tokenizers import BOS

ULM = {"city": "Ulm"}
TEXTS = {
    "plain": "It is 18 degrees.",
    "call": call_text("get_weather", ULM),
    "reasoning": f"<think>Ulm, is it?</think>Let me see.\n{call_text('get_weather', ULM)}",
    "fields": "[[ ## answer ## ]]\n18 degrees\n\n[[ ## completed ## ]]",
}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": CITY}
LENGTH = 100  # tokens that are enough for each text

pytestmark = [
    pytest.mark.filterwarnings("ignore:Items? .* using the `ReadOnly` qualifier:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_(computed_)?fields' attribute on:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),  # its log of a chat as a response
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CallingModel:
    return write_calling_model(tmp_path_factory.mktemp("calling"), TEXTS)


@pytest.fixture(scope="module")
def server(model: CallingModel) -> Iterator[ServerProcess]:
    flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with running_server(str(model.folder), "--served-model-name", "calling", *flags) as running:
        yield running


def question(model: CallingModel, name: str) -> str:
    return model.messages[name][0]["content"]


# --- openai -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0) as client:
        yield client


def test_openai_responses(client: OpenAI, model: CallingModel) -> None:
    asked: dict[str, Any] = {"model": "calling", "temperature": 0, "max_output_tokens": LENGTH, "tools": [FUNCTION]}
    asking = {"role": "user", "content": question(model, "call")}
    (call,) = client.responses.create(**asked, input=[asking]).output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", ULM)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": model.result_before("plain", "call")}
    assert client.responses.create(**asked, input=[asking, call.model_dump(), result]).output_text == TEXTS["plain"]
    with client.responses.stream(**asked, input=question(model, "reasoning")) as stream:
        kinds = [event.type for event in stream]
        output = stream.get_final_response().output
    assert [item.type for item in output] == ["reasoning", "message", "function_call"]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert "response.function_call_arguments.delta" in kinds


# --- anthropic --------------------------------------------------------------------------------------------------------


def test_anthropic(server: ServerProcess, model: CallingModel) -> None:
    tools: list[Any] = [{"name": "get_weather", "input_schema": CITY}]
    asked: dict[str, Any] = {"model": "calling", "max_tokens": LENGTH, "tools": tools}
    asked |= {"extra_body": {"temperature": 0}}
    asking: Any = {"role": "user", "content": question(model, "call")}
    with Anthropic(base_url=server.url, api_key="none", timeout=LIMIT_S, max_retries=0) as client:
        first = client.messages.create(**asked, messages=[asking])
        (call,) = first.content
        assert call.type == "tool_use"
        assert (call.name, call.input, first.stop_reason) == ("get_weather", ULM, "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": model.result_before("plain", "call")}
        called: Any = {"role": "assistant", "content": first.content}
        messages: Any = [asking, called, {"role": "user", "content": [result]}]
        (block,) = client.messages.create(**asked, messages=messages).content
        assert (block.type, block.text) == ("text", TEXTS["plain"])  # type: ignore[union-attr]
        reasoning: Any = [{"role": "user", "content": question(model, "reasoning")}]
        with client.messages.stream(**asked, messages=reasoning) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
    assert text.strip() == "Let me see."
    assert [each.type for each in final.content] == ["thinking", "text", "tool_use"]


# --- openai-agents ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_openai_agents_by_responses(server: ServerProcess, model: CallingModel, *, is_streamed: bool) -> None:
    """The library's default model class, with a tool."""
    pytest.importorskip("agents", reason="openai-agents is not installed: make clients runs this test")
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool

    async def run() -> tuple[str, list[str], list[str]]:
        cities, kinds = list[str](), list[str]()

        @function_tool(strict_mode=False)
        def get_weather(city: str) -> str:
            cities.append(city)
            return model.result_before("plain", "call")

        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S) as client:
            responses = OpenAIResponsesModel("calling", openai_client=client)
            settings = ModelSettings(temperature=0, max_tokens=LENGTH)
            agent = Agent("weather", model=responses, tools=[get_weather], model_settings=settings)
            if not is_streamed:
                answer = await Runner.run(agent, question(model, "call"))
                return answer.final_output, cities, kinds
            streamed = Runner.run_streamed(agent, question(model, "call"))
            async for event in streamed.stream_events():
                kinds.append(event.data.type if event.type == "raw_response_event" else event.type)
            return streamed.final_output, cities, kinds

    output, cities, kinds = asyncio.run(run())
    assert (output, cities) == (TEXTS["plain"], ["Ulm"])
    assert ("response.output_text.delta" in kinds) == is_streamed


# --- pydantic-ai ------------------------------------------------------------------------------------------------------


def test_pydantic_ai_by_responses(server: ServerProcess, model: CallingModel) -> None:
    pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: make clients runs this test")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run() -> tuple[str, str, list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S) as client:
            responses = OpenAIResponsesModel("calling", provider=OpenAIProvider(openai_client=client))
            agent, cities = Agent(responses, model_settings={"temperature": 0, "max_tokens": LENGTH}), list[str]()

            @agent.tool_plain
            def get_weather(city: str) -> str:
                cities.append(city)
                return model.result_before("plain", "call")

            answer = await agent.run(question(model, "call"))
            async with agent.run_stream(question(model, "plain")) as stream:
                streamed = [text async for text in stream.stream_text()]
            return answer.output, streamed[-1], cities

    assert asyncio.run(run()) == (TEXTS["plain"], TEXTS["plain"], ["Ulm"])


# --- langchain --------------------------------------------------------------------------------------------------------


def test_langchain_by_responses(server: ServerProcess, model: CallingModel) -> None:
    pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make clients runs this test")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    settings: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "model": "calling", "temperature": 0}
    settings |= {"timeout": LIMIT_S, "max_retries": 0, "max_completion_tokens": LENGTH}
    bound = ChatOpenAI(**settings, use_responses_api=True).bind_tools([WEATHER])
    asking = HumanMessage(question(model, "call"))
    answer = bound.invoke([asking])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", ULM)
    result = ToolMessage(model.result_before("plain", "call"), tool_call_id=call["id"])
    assert bound.invoke([asking, answer, result]).text == TEXTS["plain"]
    first, *others = bound.stream([HumanMessage(question(model, "reasoning"))])
    for other in others:
        first += other
    assert first.text.strip() == "Let me see."
    assert [(each["name"], each["args"]) for each in first.tool_calls] == [("get_weather", ULM)]


# --- litellm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_responses(
    server: ServerProcess, model: CallingModel, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """openai/ asks /v1/responses; hosted_vllm/ makes a chat of it."""
    litellm = pytest.importorskip("litellm", reason="litellm is not installed: make clients runs this test")
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    common = {"model": f"{provider}/calling", "api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0}
    common |= {"tools": [FUNCTION], "max_output_tokens": LENGTH, "timeout": LIMIT_S}
    with openai.DefaultHttpxClient() as session:
        monkeypatch.setattr(litellm, "client_session", session)
        answer = litellm.responses(**common, input=question(model, "call"))
        events = list(litellm.responses(**common, input=question(model, "plain"), stream=True))
        litellm.in_memory_llm_clients_cache.flush_cache()
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", ULM)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXTS["plain"]
    assert events[-1].type == "response.completed"


# --- llama-index ------------------------------------------------------------------------------------------------------


def test_llama_index(server: ServerProcess, model: CallingModel) -> None:
    pytest.importorskip("llama_index.llms.openai_like", reason="llama-index is not installed: make clients runs this")
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def get_weather(city: str) -> str:
        """Weather of a city."""
        return city

    settings: dict[str, Any] = {"api_base": f"{server.url}/v1", "api_key": "none", "model": "calling"}
    settings |= {"temperature": 0, "max_tokens": LENGTH, "timeout": LIMIT_S, "max_retries": 0}
    with openai.DefaultHttpxClient() as http:
        chat = OpenAILike(**settings, is_chat_model=True, is_function_calling_model=True, http_client=http)
        asking = [ChatMessage(role="user", content=question(model, "plain"))]
        assert chat.chat(asking).message.content == TEXTS["plain"]
        pieces = [piece.delta or "" for piece in chat.stream_chat(asking)]
        assert "".join(pieces) == TEXTS["plain"]
        tools = [FunctionTool.from_defaults(get_weather)]
        answer = chat.chat_with_tools(tools, user_msg=question(model, "call"))
        (call,) = chat.get_tool_calls_from_response(answer)
        assert (call.tool_name, call.tool_kwargs) == ("get_weather", ULM)
        text = OpenAILike(**settings, is_chat_model=False, http_client=http)
        whole = text.complete(question(model, "plain")).text
        assert whole
        assert "".join(piece.delta or "" for piece in text.stream_complete(question(model, "plain"))) == whole


# --- dspy -------------------------------------------------------------------------------------------------------------


def test_dspy(server: ServerProcess, model: CallingModel) -> None:
    dspy = pytest.importorskip("dspy", reason="dspy is not installed: make clients runs this test")
    settings = {"api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0, "max_tokens": LENGTH}
    language_model = dspy.LM("openai/calling", **settings, cache=False, num_retries=0)
    assert language_model(question(model, "plain")) == [TEXTS["plain"]]
    program, adapter = dspy.Predict("question -> answer"), dspy.ChatAdapter(use_json_adapter_fallback=False)

    def num_tokens(text: str) -> int:
        messages = adapter.format(program.signature, [], {"question": text})
        rendered = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return len(model.tokenizer.encode(f"{BOS}{rendered}assistant:", add_special_tokens=False).ids)

    total, start = sum(model.num_tokens.values()), sum(list(model.num_tokens.values())[:-1])  # the last text's
    asking = next("x" * length for length in range(2 * total) if num_tokens("x" * length) % total == start)
    with dspy.context(lm=language_model, adapter=adapter):
        assert program(question=asking).answer == "18 degrees"
        *_, last = dspy.streamify(program, async_streaming=False)(question=asking)
    assert last.answer == "18 degrees"
