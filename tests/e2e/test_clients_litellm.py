"""litellm against a real server: its functions, its streams, and its own classes for our errors."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a price list

from support.clients import KEY, LIMIT_S, MODEL
from support.reciting_model import NUM_POSITIONS, ROUNDS, TEXT, Reciter
from support.server import ServerProcess, running_server
from support.stopping import stopped

litellm = pytest.importorskip("litellm", reason="litellm is not installed: make clients runs these tests")

# What the package and pydantic have between them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Items? .* using the `ReadOnly` qualifier:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_(computed_)?fields' attribute on:DeprecationWarning"),
]

Fields = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def _left_tidy() -> Iterator[None]:
    """The package would leave connections open, and an event loop where it finds none."""
    asyncio.set_event_loop(None)
    with openai.DefaultHttpxClient() as session, pytest.MonkeyPatch.context() as patch:
        patch.setattr(litellm, "client_session", session)
        yield
    litellm.in_memory_llm_clients_cache.flush_cache()


@pytest.fixture
def settings(server: ServerProcess, reciter: Reciter, monkeypatch: pytest.MonkeyPatch) -> Fields:
    """Return what every call takes, and keep the package quiet."""
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    return {
        "api_base": f"{server.url}/v1",
        "api_key": KEY,
        "temperature": 0,
        "max_tokens": len(reciter.script),
        "max_retries": 0,
        "timeout": LIMIT_S,
    }


@pytest.fixture
def chat(settings: Fields, reciter: Reciter) -> Fields:
    return settings | {"model": f"openai/{MODEL}", "messages": reciter.messages}


@pytest.fixture
def text(settings: Fields) -> Fields:
    return settings | {"model": f"text-completion-openai/{MODEL}", "prompt": TEXT}


def test_completion(chat: Fields, reciter: Reciter) -> None:
    answer = litellm.completion(**chat)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "length")
    assert answer.usage.prompt_tokens == answer.usage.completion_tokens == len(reciter.script)


def test_completion_stream(chat: Fields, reciter: Reciter) -> None:
    length = ROUNDS * len(reciter.script)
    asked = chat | {"max_tokens": length, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = litellm.completion(**asked)
    pieces = [chunk.choices[0].delta.content for chunk in chunks]
    assert "".join(piece or "" for piece in pieces) == ROUNDS * TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert last.usage.completion_tokens == length


def test_async_completion(chat: Fields) -> None:
    async def ask() -> tuple[list[str], str]:
        answers = await asyncio.gather(*(litellm.acompletion(**chat) for _ in range(3)))
        stream = await litellm.acompletion(**chat, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        await litellm.close_litellm_async_clients()
        return [answer.choices[0].message.content for answer in answers], "".join(pieces)

    assert asyncio.run(ask()) == ([TEXT] * 3, TEXT)


def test_branches_stop_and_logprobs(chat: Fields) -> None:
    fields = chat | {"temperature": 1.0, "seed": 5, "n": 3, "stop": [" "], "logprobs": True, "top_logprobs": 2}
    answer = litellm.completion(**fields)
    assert len({choice.message.content for choice in answer.choices}) == 3
    for choice in answer.choices:
        assert " " not in choice.message.content
        assert choice.finish_reason == "stop"
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_extra_fields(chat: Fields) -> None:
    assert litellm.completion(**chat | {"temperature": 2.0}, top_k=1).choices[0].message.content == TEXT
    extra = {"extra_body": {"min_p": 1.0}}
    assert litellm.completion(**chat | {"temperature": 2.0} | extra).choices[0].message.content == TEXT


def test_text_completion(text: Fields) -> None:
    answer = litellm.text_completion(**text)
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [(TEXT, "length")]


def test_text_completion_stream(text: Fields, reciter: Reciter) -> None:
    asked = text | {"max_tokens": ROUNDS * len(reciter.script), "stream": True}
    pieces = [chunk.choices[0].text or "" for chunk in litellm.text_completion(**asked)]
    assert "".join(pieces) == ROUNDS * TEXT


def test_text_branches_stop_and_logprobs(text: Fields) -> None:
    answer = litellm.text_completion(**text | {"temperature": 1.0, "seed": 5}, n=3, stop=[" "], logprobs=2)
    assert len({choice.text for choice in answer.choices}) == 3
    for choice in answer.choices:
        assert " " not in choice.text
        assert choice.finish_reason == "stop"
        assert len(choice.logprobs.tokens) > 0


@pytest.mark.parametrize("call", [litellm.completion, litellm.text_completion], ids=["chat", "text"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_errors(call: Callable[..., Any], chat: Fields, text: Fields, *, stream: bool) -> None:
    common = (chat if call is litellm.completion else text) | {"stream": stream}

    def ask(**fields: object) -> object:
        return list(call(**common | fields))  # a stream of texts begins when it is read

    with pytest.raises(litellm.BadRequestError, match="top_p must be a number"):
        ask(top_p=7)
    with pytest.raises(litellm.ContextWindowExceededError, match=f"maximum context length is {NUM_POSITIONS} tokens"):
        ask(max_tokens=5000)
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        ask(model=common["model"].replace(MODEL, "gpt-none"))
    with pytest.raises(litellm.AuthenticationError):
        ask(api_key="wrong")


def test_errors_of_a_server_in_trouble(settings: Fields, reciter: Reciter) -> None:
    """One request runs and one waits: the next is refused. Then the engine dies."""
    with running_server(str(reciter.folder), "--max-num-seqs", "1", "--max-queued-requests", "1") as server:
        common = settings | {"api_base": f"{server.url}/v1", "model": f"openai/{server.name}"}
        common |= {"messages": reciter.messages}
        endless = common | {"stream": True, "max_tokens": None, "extra_body": {"ignore_eos": True}}
        running = litellm.completion(**endless)
        next(running)
        engine = server.engine_pid()
        with stopped(engine):
            waiting = litellm.completion(**endless)
            with pytest.raises(litellm.RateLimitError, match="1 requests wait already"):
                litellm.completion(**common)
            os.kill(engine, signal.SIGKILL)
        with pytest.raises(litellm.ServiceUnavailableError, match="the engine process ended"):
            list(running)
        with pytest.raises(litellm.ServiceUnavailableError, match="the engine process ended"):
            list(waiting)
        with pytest.raises(litellm.ServiceUnavailableError, match="the engine process ended"):
            litellm.completion(**common)
