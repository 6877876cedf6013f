"""langchain-openai against a real server, chats and completions."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

os.environ["LANGSMITH_TRACING"] = "false"

import openai
import pytest

from support.clients import KEY, LIMIT_S, MODEL
from support.reciting_model import ROUNDS, TEXT, Reciter
from support.server import ServerProcess

pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make clients runs these tests")

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI, OpenAI


def settings(server: ServerProcess, fields: dict[str, Any]) -> dict[str, Any]:
    common = {"base_url": f"{server.url}/v1", "api_key": KEY, "model": MODEL, "max_retries": 0, "timeout": LIMIT_S}
    return common | {"temperature": 0} | fields


@pytest.fixture
def chat(server: ServerProcess, reciter: Reciter) -> Callable[..., ChatOpenAI]:
    """Return a function that makes a chat model, greedy unless told otherwise."""
    return lambda **fields: ChatOpenAI(**settings(server, {"max_completion_tokens": len(reciter.script)} | fields))


@pytest.fixture
def completions(server: ServerProcess, reciter: Reciter) -> Callable[..., OpenAI]:
    """Return a function that makes a completion model, greedy unless told otherwise."""
    return lambda **fields: OpenAI(**settings(server, {"max_tokens": len(reciter.script)} | fields))


@pytest.fixture
def message(reciter: Reciter) -> HumanMessage:
    return HumanMessage(reciter.messages[0]["content"])


# --- chats ------------------------------------------------------------------------------------------------------------


def test_chat_invoke(chat: Callable[..., ChatOpenAI], message: HumanMessage, reciter: Reciter) -> None:
    answer = chat().invoke([message])
    assert isinstance(answer, AIMessage)
    assert answer.content == TEXT
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == MODEL
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] == answer.usage_metadata["output_tokens"] == len(reciter.script)


def test_chat_stream(chat: Callable[..., ChatOpenAI], message: HumanMessage, reciter: Reciter) -> None:
    length = ROUNDS * len(reciter.script)
    first, *others = chat(stream_usage=True, max_completion_tokens=length).stream([message])
    whole = first
    for other in others:
        whole += other
    assert whole.content == ROUNDS * TEXT
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == length


def test_chat_async(chat: Callable[..., ChatOpenAI], message: HumanMessage) -> None:
    async def ask() -> tuple[list[object], str]:
        async with openai.DefaultAsyncHttpxClient() as http:  # the package would keep one open for another event loop
            model = chat(http_async_client=http)
            answers = await model.abatch([[message]] * 3)
            pieces = [str(chunk.content) async for chunk in model.astream([message])]
        return [answer.content for answer in answers], "".join(pieces)

    assert asyncio.run(ask()) == ([TEXT] * 3, TEXT)


def test_chat_batch(chat: Callable[..., ChatOpenAI], message: HumanMessage) -> None:
    answers = chat().batch([[message], [message, AIMessage("x"), message], [message]])
    assert [answers[0].content, answers[2].content] == [TEXT, TEXT]
    assert answers[1].usage_metadata["input_tokens"] > answers[0].usage_metadata["input_tokens"]


def test_chat_branches(chat: Callable[..., ChatOpenAI], message: HumanMessage) -> None:
    (branches,) = chat(n=3, temperature=1.0, seed=5).generate([[message]]).generations
    assert len({branch.text for branch in branches}) == 3


def test_chat_stop(chat: Callable[..., ChatOpenAI], message: HumanMessage) -> None:
    answer = chat(stop=["世"]).invoke([message])
    assert answer.content == TEXT[: TEXT.index("世")]
    assert answer.response_metadata["finish_reason"] == "stop"
    assert chat().invoke([message], stop=["世"]).content == answer.content


def test_chat_logprobs(chat: Callable[..., ChatOpenAI], message: HumanMessage) -> None:
    answer = chat(logprobs=True, top_logprobs=2).invoke([message])
    tokens = answer.response_metadata["logprobs"]["content"]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == TEXT
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


def test_chat_extra_fields(chat: Callable[..., ChatOpenAI], message: HumanMessage) -> None:
    assert chat(temperature=2.0, extra_body={"top_k": 1}).invoke([message]).content == TEXT


def test_chat_errors(chat: Callable[..., ChatOpenAI], message: HumanMessage) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be a number from 0 to 2, got -1"):
        chat(temperature=-1).invoke([message])
    with pytest.raises(openai.BadRequestError) as raised:
        list(chat(max_completion_tokens=5000).stream([message]))
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(ContextOverflowError):
        chat().invoke([message] * 150)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        chat(model="gpt-none").invoke([message])
    with pytest.raises(openai.AuthenticationError):
        chat(api_key="wrong").invoke([message])


# --- completions ------------------------------------------------------------------------------------------------------


def test_completion_invoke(completions: Callable[..., OpenAI]) -> None:
    assert completions().invoke(TEXT) == TEXT


def test_completion_stream(completions: Callable[..., OpenAI], reciter: Reciter) -> None:
    assert "".join(completions(max_tokens=ROUNDS * len(reciter.script)).stream(TEXT)) == ROUNDS * TEXT


def test_completion_async(completions: Callable[..., OpenAI]) -> None:
    async def ask() -> tuple[str, str]:
        async with openai.DefaultAsyncHttpxClient() as http:
            model = completions(http_async_client=http)
            return await model.ainvoke(TEXT), "".join([piece async for piece in model.astream(TEXT)])

    assert asyncio.run(ask()) == (TEXT, TEXT)


def test_completion_batch(completions: Callable[..., OpenAI], reciter: Reciter) -> None:
    """The package sends all prompts in one call."""
    result = completions().generate([TEXT, TEXT])
    assert [branches[0].text for branches in result.generations] == [TEXT, TEXT]
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["completion_tokens"] == 2 * len(reciter.script)


def test_completion_branches_stop_and_logprobs(completions: Callable[..., OpenAI]) -> None:
    (branches,) = completions(n=3, temperature=1.0, seed=5, logprobs=2).generate([TEXT], stop=[" "]).generations
    assert len(branches) == 3
    for branch in branches:
        assert " " not in branch.text
        assert branch.generation_info is not None
        assert branch.generation_info["finish_reason"] == "stop"
        assert len(branch.generation_info["logprobs"]["tokens"]) > 0


def test_completion_errors(completions: Callable[..., OpenAI]) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p"):
        completions(top_p=7).invoke(TEXT)
    with pytest.raises(openai.NotFoundError):
        list(completions(model="gpt-none").stream(TEXT))
