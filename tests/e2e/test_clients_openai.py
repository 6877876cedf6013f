"""The openai package against a real server: every answer is what the model is known to say, every error is its own."""

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI, Stream
from openai.types.chat import ChatCompletionChunk
from openai.types.completion import Completion

from support.clients import KEY, LIMIT_S, MODEL
from support.metrics_page import read_metrics, wait_until_idle
from support.reciting_model import NUM_POSITIONS, ROUNDS, TEXT, Reciter
from support.server import ServerProcess, running_server, wait_until
from support.small_tokenizers import EOS
from support.stopping import stopped

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
SAMPLED: dict[str, Any] = {"model": MODEL, "temperature": 1.0, "seed": 5}
ABORTED = "quire:requests_aborted_total"
LONGEST = NUM_POSITIONS - 1
LONG: dict[str, Any] = {"model": MODEL, "prompt": [5], "max_tokens": LONGEST, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=LIMIT_S) as opened:
        yield opened


@asynccontextmanager
async def async_client(server: ServerProcess) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=LIMIT_S) as opened:
        yield opened


def texts_of(stream: Stream[Completion]) -> dict[int, str]:
    """Return the text of each choice of a stream."""
    texts: dict[int, str] = defaultdict(str)
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    return dict(texts)


def messages_of(stream: Stream[ChatCompletionChunk]) -> dict[int, str]:
    """Return the content of each choice of a stream."""
    texts: dict[int, str] = defaultdict(str)
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    return dict(texts)


# --- completions ------------------------------------------------------------------------------------------------------


def test_completion(client: OpenAI, reciter: Reciter) -> None:
    length = len(reciter.script)
    answer = client.completions.create(**GREEDY, prompt=reciter.prompt(), max_tokens=length)
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [(0, TEXT, "length")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        length, length, 2 * length
    )
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens in range(length)


def test_list_of_prompts(client: OpenAI, reciter: Reciter) -> None:
    prompts = [reciter.prompt(), reciter.prompt(1)]
    alone = [client.completions.create(**GREEDY, prompt=one, max_tokens=9).choices[0].text for one in prompts]
    together = client.completions.create(**SAMPLED, prompt=prompts, max_tokens=9, n=2, extra_body={"top_k": 1})
    assert [(choice.index, choice.text) for choice in together.choices] == list(
        enumerate([alone[0], alone[0], alone[1], alone[1]])
    )


def test_pieces_of_a_stream_are_the_answer(client: OpenAI, reciter: Reciter) -> None:
    chunks = list(
        client.completions.create(
            **GREEDY, prompt=reciter.prompt(), max_tokens=ROUNDS * len(reciter.script), stream=True
        )
    )
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == ROUNDS * TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_stream_that_is_closed_is_aborted(client: OpenAI, server: ServerProcess) -> None:
    """It has begun before its first token, and is ended long before its last one."""
    before = read_metrics(server.url)
    with stopped(server.engine_pid()), client.completions.create(**LONG, stream=True) as stream:
        stream.close()
        wait_until(lambda: read_metrics(server.url)[ABORTED] == before[ABORTED] + 1)
    after = wait_until_idle(server.url)
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] < LONGEST


def test_usage_comes_last_if_asked_for(client: OpenAI, reciter: Reciter) -> None:
    asked = client.completions.create(
        **SAMPLED, prompt=reciter.prompt(), max_tokens=5, n=2, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = asked
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(reciter.script), 10)


def test_completion_logprobs(client: OpenAI, reciter: Reciter) -> None:
    (choice,) = client.completions.create(
        **GREEDY, prompt=reciter.prompt(), max_tokens=len(reciter.script), logprobs=2
    ).choices
    assert choice.logprobs is not None
    logprobs = choice.logprobs
    assert logprobs.tokens is not None
    assert logprobs.tokens[:3] == ["T", "he", " "]
    assert logprobs.token_logprobs is not None
    assert all(value is not None and -10 < value < 0 for value in logprobs.token_logprobs)
    assert logprobs.top_logprobs is not None
    assert [max(top, key=lambda token: top[token]) for top in logprobs.top_logprobs] == logprobs.tokens
    assert logprobs.text_offset is not None
    assert [choice.text[offset] for offset in logprobs.text_offset[:3]] == ["T", "h", " "]
    assert sorted(logprobs.text_offset) == logprobs.text_offset


def test_streamed_completion_logprobs_are_the_same(client: OpenAI, reciter: Reciter) -> None:
    asked = SAMPLED | {"prompt": reciter.prompt(), "max_tokens": 40, "logprobs": 2, "n": 2}
    whole = client.completions.create(**asked)
    parts: dict[int, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            assert choice.logprobs is not None
            for name, values in choice.logprobs.model_dump().items():
                parts[choice.index][name] += values
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert dict(parts[choice.index]) == choice.logprobs.model_dump()


def test_seed_decides(client: OpenAI, reciter: Reciter) -> None:
    asked = {"model": MODEL, "prompt": reciter.prompt(), "max_tokens": 30}

    def text(seed: int) -> str:
        return client.completions.create(**asked, seed=seed).choices[0].text

    assert text(5) == text(5) != text(6)


def test_branches_differ_and_repeat(client: OpenAI, reciter: Reciter) -> None:
    asked = SAMPLED | {"prompt": reciter.prompt(), "max_tokens": 30, "n": 4}
    whole = {choice.index: choice.text for choice in client.completions.create(**asked).choices}
    assert len(set(whole.values())) == 4
    assert texts_of(client.completions.create(**asked, stream=True)) == whole
    alone = client.completions.create(**SAMPLED, prompt=reciter.prompt(), max_tokens=30).choices[0]
    assert alone.text == whole[0]


@pytest.mark.parametrize("stop", ["，世", ["nowhere", "世界", "好"], " Ü"])
def test_stop_strings_cut(client: OpenAI, reciter: Reciter, stop: str | list[str]) -> None:
    asked = GREEDY | {"prompt": reciter.prompt(), "max_tokens": len(reciter.script), "stop": stop}
    cut = min(TEXT.find(one) for one in ([stop] if isinstance(stop, str) else stop) if one in TEXT)
    (choice,) = client.completions.create(**asked).choices
    assert (choice.text, choice.finish_reason) == (TEXT[:cut], "stop")
    assert choice.model_extra is not None
    assert TEXT[cut:].startswith(choice.model_extra["stop_reason"])
    assert texts_of(client.completions.create(**asked, stream=True)) == {0: TEXT[:cut]}


@pytest.mark.parametrize("stream", [False, True])
def test_echo(client: OpenAI, reciter: Reciter, *, stream: bool) -> None:
    asked = GREEDY | {"prompt": TEXT, "max_tokens": 9, "echo": True}
    expected = client.completions.create(**GREEDY, prompt=TEXT, max_tokens=9).choices[0].text
    answer = client.completions.create(**asked, stream=stream)
    text = texts_of(answer)[0] if isinstance(answer, Stream) else answer.choices[0].text
    assert text == TEXT + expected


def test_extra_fields_reach_the_sampler(client: OpenAI, reciter: Reciter) -> None:
    """Each of them makes a random choice certain, or shows in the answer."""
    length = len(reciter.script)

    def ask(temperature: float = 1.5, max_tokens: int = length, **extra: object) -> tuple[str, str, dict[str, Any]]:
        (choice,) = client.completions.create(
            model=MODEL, prompt=reciter.prompt(), temperature=temperature, max_tokens=max_tokens, extra_body=extra
        ).choices
        return choice.text, choice.finish_reason, choice.model_extra or {}

    assert ask(top_k=1)[0] == TEXT
    assert ask(min_p=1.0)[0] == TEXT
    assert ask(allowed_token_ids=[reciter.script[0]], max_tokens=4)[0] == "TTTT"
    assert "The" not in ask(temperature=0, bad_words=["The"])[0]
    assert ask(temperature=0, repetition_penalty=50.0, max_tokens=9)[0] != TEXT[:9]
    assert ask(temperature=0, stop_token_ids=[reciter.script[2]])[:2] == (TEXT[:3], "stop")
    certain_end = {"logit_bias": {"1": 100}}
    assert ask(**certain_end)[:2] == ("", "stop")
    assert ask(**certain_end, min_tokens=2, max_tokens=9)[1] == "stop"
    assert ask(**certain_end, ignore_eos=True, max_tokens=9)[1] == "length"
    assert ask(**certain_end, ignore_eos=True, max_tokens=2, skip_special_tokens=False)[0] == EOS * 2
    assert ask(temperature=0, stop="你", include_stop_str_in_output=True)[0] == TEXT[: TEXT.index("你") + 1]
    shown = ask(temperature=0, return_token_ids=True, prompt_logprobs=1)[2]
    assert (shown["token_ids"], shown["prompt_token_ids"]) == (reciter.script, reciter.script)
    assert [position is None for position in shown["prompt_logprobs"]] == [True] + [False] * (length - 1)


# --- chats ------------------------------------------------------------------------------------------------------------


def test_chat(client: OpenAI, reciter: Reciter) -> None:
    answer = client.chat.completions.create(
        **GREEDY, messages=reciter.messages, max_completion_tokens=len(reciter.script)
    )
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == answer.usage.completion_tokens == len(reciter.script)


def test_chat_stream(client: OpenAI, reciter: Reciter) -> None:
    *chunks, last = client.chat.completions.create(
        **GREEDY,
        messages=reciter.messages,
        max_tokens=ROUNDS * len(reciter.script),
        stream=True,
        stream_options={"include_usage": True},
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == ROUNDS * TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == ROUNDS * len(reciter.script)


def test_stream_helper_gathers_what_the_whole_answer_says(client: OpenAI, reciter: Reciter) -> None:
    """The package's own view of a stream, which takes each chunk as a change of what came before."""
    asked = SAMPLED | {"messages": reciter.messages, "logprobs": True, "top_logprobs": 2, "stop": " "}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        gathered = stream.get_final_completion()
    (choice,), (expected,) = gathered.choices, whole.choices
    assert choice.message.content == expected.message.content
    assert (choice.finish_reason, choice.logprobs) == (expected.finish_reason, expected.logprobs)


@pytest.mark.parametrize("seed", range(6))
def test_branches_of_a_chat_begin_in_order(client: OpenAI, reciter: Reciter, seed: int) -> None:
    """The package's stream helper counts on it, also where the first character of a branch takes many tokens."""
    messages = [{"role": "user", "content": reciter.messages[0]["content"] + "x" * TEXT.index("你")}]
    asked = {"model": MODEL, "messages": messages, "seed": seed, "n": 4, "max_tokens": 60, "stop": " "}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        first: dict[int, None] = {}
        for event in stream:
            if event.type == "chunk":
                first |= dict.fromkeys(choice.index for choice in event.chunk.choices)
        gathered = stream.get_final_completion()
    assert list(first) == [0, 1, 2, 3]
    assert [choice.message.content for choice in gathered.choices] == [
        choice.message.content for choice in whole.choices
    ]


def test_chat_logprobs_carry_the_bytes(client: OpenAI, reciter: Reciter) -> None:
    asked = GREEDY | {"messages": reciter.messages, "max_tokens": len(reciter.script)}
    (choice,) = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    tokens = choice.logprobs.content
    assert bytes(byte for token in tokens for byte in token.bytes or ()).decode() == TEXT
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert (token.top_logprobs[0].token, token.top_logprobs[0].logprob) == (token.token, token.logprob)
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) < 1


def test_chat_branches_and_stop(client: OpenAI, reciter: Reciter) -> None:
    asked = SAMPLED | {"messages": reciter.messages, "max_tokens": 60, "n": 4, "stop": [" ", "\n"]}
    whole = client.chat.completions.create(**asked)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert len(texts) == 4
    assert not any(stop in (text or "") for text in texts.values() for stop in (" ", "\n"))
    assert messages_of(client.chat.completions.create(**asked, stream=True)) == texts


def test_chat_without_a_limit_goes_on_to_the_end_of_the_context(client: OpenAI) -> None:
    long = [{"role": "user", "content": "x" * (NUM_POSITIONS - 50)}]
    answer = client.chat.completions.create(**GREEDY, messages=long, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 1
    assert answer.usage.total_tokens == NUM_POSITIONS


# --- async ------------------------------------------------------------------------------------------------------------


def test_async_client(server: ServerProcess, reciter: Reciter) -> None:
    length = len(reciter.script)

    async def ask() -> tuple[list[str], str, str]:
        async with async_client(server) as client:
            many = await asyncio.gather(*(
                client.completions.create(**GREEDY, prompt=reciter.prompt(start), max_tokens=length - start)
                for start in range(8)
            ))
            text = said = ""
            async for chunk in await client.completions.create(
                **GREEDY, prompt=reciter.prompt(), max_tokens=length, stream=True
            ):
                text += chunk.choices[0].text
            async for piece in await client.chat.completions.create(
                **GREEDY, messages=reciter.messages, max_tokens=length, stream=True
            ):
                said += piece.choices[0].delta.content or ""
            return [one.choices[0].text for one in many], text, said

    many, text, said = asyncio.run(ask())
    assert many[0] == text == said == TEXT
    assert all(TEXT.endswith(one) for one in many)


@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_call_is_aborted(server: ServerProcess, *, stream: bool) -> None:
    aborted = read_metrics(server.url)[ABORTED]

    async def cancel() -> None:
        async with async_client(server) as client:
            with stopped(server.engine_pid()):      # else it might be over before it is cancelled
                calling = asyncio.create_task(_last_of(client, stream=stream))
                await asyncio.to_thread(wait_until, lambda: _num_waiting(server) == 1)
                calling.cancel()
                await asyncio.wait((calling,))
                await asyncio.to_thread(wait_until, lambda: read_metrics(server.url)[ABORTED] == aborted + 1)

    asyncio.run(cancel())
    wait_until_idle(server.url)


async def _last_of(client: AsyncOpenAI, *, stream: bool) -> object:
    """Return an answer, or the last piece of one."""
    last: object = await client.completions.create(**LONG, stream=stream)
    if isinstance(last, openai.AsyncStream):
        async for chunk in last:
            last = chunk
    return last


def _num_waiting(server: ServerProcess) -> float:
    return read_metrics(server.url)["vllm:num_requests_waiting"]


# --- models and errors ------------------------------------------------------------------------------------------------


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "quire")
    assert client.models.retrieve(MODEL) == model


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": -1}, "temperature", None),
        ({"n": 0}, "n", None),
        ({"n": 65}, "n", None),
        ({"top_p": 2}, "top_p", None),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"max_tokens": "many"}, "max_tokens", None),
        ({"max_tokens": NUM_POSITIONS}, "prompt", "context_length_exceeded"),
        ({"logprobs": 21}, "logprobs", None),
        ({"stop": ["", "x"]}, "stop", None),
        ({"suffix": "end"}, "suffix", "unsupported_parameter"),
        ({"prompt": []}, "prompt", None),
        ({"prompt": [10**6]}, "prompt", None),
        ({"extra_body": {"top_k": -5}}, "top_k", None),
        ({"extra_body": {"min_p": 1.5}}, "min_p", None),
        ({"extra_body": {"use_beam_search": True}, "top_p": 0.5}, "top_p", None),
        ({"extra_body": {"length_penalty": 11.0}}, "length_penalty", None),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ],
)
def test_bad_request(client: OpenAI, fields: dict[str, Any], param: str, code: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(**{"model": MODEL, "prompt": "x", **fields})
    error = raised.value
    assert (error.status_code, error.param, error.code, error.type) == (400, param, code, "invalid_request_error")
    assert param in error.message
    assert error.request_id


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", None),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", None),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
        ({"max_completion_tokens": 5000}, "messages", "context_length_exceeded"),
        ({"response_format": {"type": "xml"}}, "response_format.type", None),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools", None),
    ],
)
def test_bad_chat_request(client: OpenAI, fields: dict[str, Any], param: str, code: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**{"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields})
    assert (raised.value.param, raised.value.code) == (param, code)


def test_bad_request_for_a_stream_is_an_error_at_once(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="x", temperature=-1, stream=True)


def test_unknown_model_and_route(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(model="gpt-none", prompt="x")
    assert (raised.value.param, raised.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("gpt-none")
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as raised:
        client.files.list()
    assert raised.value.code == "unknown_url"


def test_wrong_key(server: ServerProcess) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client:
        for call in (client.models.list, lambda: client.completions.create(model=MODEL, prompt="x")):
            with pytest.raises(openai.AuthenticationError) as raised:
                call()
            assert (raised.value.status_code, raised.value.code) == (401, "invalid_api_key")
            assert raised.value.response.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.usefixtures("demo_model")
def test_full_queue() -> None:
    """One request runs and one waits: the next is refused, and taken when there is room again."""
    long = {"model": "quire-demo", "prompt": "def ", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    short = {"model": "quire-demo", "prompt": "def ", "max_tokens": 1}
    with (
        running_server("--max-num-seqs", "1", "--max-queued-requests", "1") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=LIMIT_S) as client,
    ):
        with ExitStack() as held:
            held.enter_context(stopped(server.engine_pid()))
            for _ in range(2):      # one for the seat, and one for the queue
                held.enter_context(client.completions.create(**long, stream=True))
            with pytest.raises(openai.RateLimitError) as raised:
                client.completions.create(**short)
            assert (raised.value.code, raised.value.type) == ("server_overloaded", "rate_limit_error")
            assert int(raised.value.response.headers["Retry-After"]) >= 1
        wait_until_idle(server.url)
        assert client.completions.create(**short).choices
