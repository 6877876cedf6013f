"""Client libraries that ask for a form of the answer, against a real server: what they send, and objects that they get.

The model prefers quotes and braces, so that it ends any string and any object after a few tokens.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

os.environ["LANGSMITH_TRACING"] = "false"
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a price list

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from support.clients import KEY, LIMIT_S, MODEL
from support.reciting_model import write_reciter
from support.server import ServerProcess, running_server
from support.small_tokenizers import byte_level

LENGTH = 400  # tokens that are enough for any trip
PROMPT = "Plan a trip as JSON."
TEXT = 20 * '"}'  # text that the model recites


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    reciter = write_reciter(tmp_path_factory.mktemp("closing"), byte_level(), TEXT)
    with running_server(str(reciter.folder), "--served-model-name", MODEL, "--api-key", KEY) as running:
        yield running


class Train(BaseModel):
    """A journey by train."""

    kind: Literal["train"]
    first_class: bool


class Walk(BaseModel):
    """A journey on foot."""

    kind: Literal["walk"]
    hours: Literal[1, 2]


class Anything(BaseModel):
    """Any object."""


class Trip(BaseModel):
    """A trip to a city."""

    city: str
    days: Literal[1, 2, 3]
    journey: Annotated[Train | Walk, Field(discriminator="kind")]


@asynccontextmanager
async def async_client(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=LIMIT_S, max_retries=0) as client:
        yield client


def asked(server: ServerProcess, ask: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:  # noqa: ANN401
    """Return what `ask` returns, given a client."""

    async def run() -> Any:  # noqa: ANN401
        async with async_client(server) as client:
            return await ask(client)

    return asyncio.run(run())


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=LIMIT_S, max_retries=0) as client:
        yield client


# --- langchain --------------------------------------------------------------------------------------------------------


@pytest.fixture
def chat(server: ServerProcess) -> Any:  # noqa: ANN401
    pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make clients runs this test")
    from langchain_openai import ChatOpenAI

    settings = {"base_url": f"{server.url}/v1", "api_key": KEY, "model": MODEL, "timeout": LIMIT_S, "max_retries": 0}
    return ChatOpenAI(**settings, temperature=0, max_completion_tokens=LENGTH)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("strict", [None, True])
def test_langchain_with_structured_output(chat: Any, method: str, strict: bool | None) -> None:  # noqa: ANN401
    answer = chat.with_structured_output(Trip, method=method, strict=strict, include_raw=True).invoke(PROMPT)
    assert answer["parsing_error"] is None
    assert isinstance(answer["parsed"], Trip)
    reason = answer["raw"].response_metadata["finish_reason"]
    assert reason == ("stop" if method == "json_schema" else "tool_calls")


def test_langchain_streams_a_form(chat: Any) -> None:  # noqa: ANN401
    *_, last = chat.with_structured_output(Trip.model_json_schema(), method="json_schema").stream(PROMPT)
    assert Trip(**last)


def test_langchain_json_mode(chat: Any) -> None:  # noqa: ANN401
    answer = chat.with_structured_output(None, method="json_mode", include_raw=True).invoke(PROMPT)
    assert isinstance(answer["parsed"], dict)
    assert answer["raw"].response_metadata["finish_reason"] == "stop"


def test_langchain_binds_tools_and_a_form(chat: Any) -> None:  # noqa: ANN401
    """With both an answer has calls, or fits the form."""
    from langchain_core.tools import tool

    @tool
    def book(city: Literal["Ulm", "Rome"]) -> str:
        """Book a trip."""
        return city

    bound = chat.bind_tools([book], response_format=Trip, strict=True, parallel_tool_calls=False)
    answer = bound.invoke(PROMPT)
    assert answer.tool_calls or isinstance(answer.additional_kwargs["parsed"], Trip)
    (call,) = chat.bind_tools([book], tool_choice="book", parallel_tool_calls=False).invoke(PROMPT).tool_calls
    assert book.invoke(call["args"]) in ("Ulm", "Rome")


# --- litellm ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def litellm_answer(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed: make clients runs this test")
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    common = {"api_base": f"{server.url}/v1", "api_key": KEY, "temperature": 0, "max_tokens": LENGTH}
    common |= {"messages": [{"role": "user", "content": PROMPT}], "max_retries": 0, "timeout": LIMIT_S}
    with openai.DefaultHttpxClient() as session:
        monkeypatch.setattr(litellm, "client_session", session)
        yield lambda **fields: litellm.completion(**common | fields)
        litellm.in_memory_llm_clients_cache.flush_cache()


@pytest.mark.filterwarnings("ignore:Items? .* using the `ReadOnly` qualifier:UserWarning")
@pytest.mark.filterwarnings("ignore:Accessing the 'model_(computed_)?fields' attribute on:DeprecationWarning")
@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_litellm_json_modes(litellm_answer: Callable[..., Any], provider: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "trip", "schema": Trip.model_json_schema()}}
    for form in (Trip, schema, schema | {"json_schema": schema["json_schema"] | {"strict": True}}):
        choice = litellm_answer(model=f"{provider}/{MODEL}", response_format=form).choices[0]
        assert choice.finish_reason == "stop"
        assert Trip(**json.loads(choice.message.content))
    choice = litellm_answer(model=f"{provider}/{MODEL}", response_format={"type": "json_object"}).choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(json.loads(choice.message.content), dict)


# --- instructor -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_instructor_modes(client: OpenAI, mode: str) -> None:
    """The mode JSON puts the schema into the prompt alone."""
    instructor = pytest.importorskip("instructor", reason="instructor is not installed: make clients runs this test")
    asking = instructor.from_openai(client, mode=instructor.Mode[mode])
    fields = {"model": MODEL, "temperature": 0, "max_tokens": LENGTH, "max_retries": 0}
    response_model = Anything if mode == "JSON" else Trip
    answer = asking.create(**fields, response_model=response_model, messages=[{"role": "user", "content": PROMPT}])
    assert isinstance(answer, response_model)


# --- pydantic-ai ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
def test_pydantic_ai_outputs(server: ServerProcess, kind: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: make clients runs this test")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def ask(client: openai.AsyncOpenAI) -> Any:  # noqa: ANN401
        chat = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
        settings = {"temperature": 0, "max_tokens": LENGTH, "parallel_tool_calls": False}
        output_type = getattr(pydantic_ai, kind)(Trip)
        return await pydantic_ai.Agent(chat, output_type=output_type, retries=0, model_settings=settings).run(PROMPT)

    assert isinstance(asked(server, ask).output, Trip)


# --- openai-agents ----------------------------------------------------------------------------------------------------


def test_openai_agents_output_type(server: ServerProcess) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed: make clients runs this test")

    async def ask(client: openai.AsyncOpenAI) -> Any:  # noqa: ANN401
        chat = agents.OpenAIChatCompletionsModel(MODEL, openai_client=client)
        settings = agents.ModelSettings(temperature=0, max_tokens=LENGTH)
        agent = agents.Agent("trips", model=chat, output_type=Trip, model_settings=settings)
        return await agents.Runner.run(agent, PROMPT, max_turns=1)

    assert isinstance(asked(server, ask).final_output, Trip)
