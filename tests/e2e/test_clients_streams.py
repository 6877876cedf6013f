"""Streams as the openai package reads them, for texts whose characters the tokenizer cuts into bytes.

Whatever comes in pieces is what comes whole: bit for bit where the model is sure, and where it babbles.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from support.clients import KEY, LIMIT_S, MODEL
from support.reciting_model import TEXT, Reciter, write_reciter
from support.server import ServerProcess, running_server
from support.small_tokenizers import byte_fallback, byte_level

REPLACEMENT = "\ufffd"
STOPS = ["is 你", "ïc", "🎉 ", "nowhere"]  # each takes several tokens, and some begin inside a character's bytes


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=["byte level", "byte fallback"])
def reciter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reciter:
    """Return the model with either kind of tokenizer."""
    return write_reciter(tmp_path_factory.mktemp("reciter"), request.param())


@pytest.fixture(scope="module")
def server(reciter: Reciter) -> Iterator[ServerProcess]:
    """Serve the model."""
    with running_server(str(reciter.folder), "--served-model-name", MODEL) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=LIMIT_S) as opened:
        yield opened


def pieces_of(client: OpenAI, route: str, asked: dict[str, Any]) -> dict[int, list[str]]:
    """Return the pieces of each choice of a stream."""
    pieces: dict[int, list[str]] = defaultdict(list)
    if route == "completions":
        for chunk in client.completions.create(**asked, stream=True):
            pieces[chunk.choices[0].index].append(chunk.choices[0].text)
    else:
        for part in client.chat.completions.create(**asked, stream=True):
            pieces[part.choices[0].index].append(part.choices[0].delta.content or "")
    return pieces


def whole_of(client: OpenAI, route: str, asked: dict[str, Any]) -> dict[int, str]:
    """Return the text of each choice of an answer."""
    if route == "completions":
        return {choice.index: choice.text for choice in client.completions.create(**asked).choices}
    answer = client.chat.completions.create(**asked)
    return {choice.index: choice.message.content or "" for choice in answer.choices}


def question(reciter: Reciter, route: str) -> dict[str, Any]:
    prompt = {"prompt": reciter.prompt()} if route == "completions" else {"messages": reciter.messages}
    return {"model": MODEL, **prompt}


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_characters_come_whole(client: OpenAI, reciter: Reciter, route: str) -> None:
    asked = question(reciter, route) | {"temperature": 0, "max_tokens": 2 * len(reciter.script)}
    (pieces,) = pieces_of(client, route, asked).values()
    assert "".join(pieces).replace("\n ", "\n").lstrip() == TEXT * 2
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert whole_of(client, route, asked) == {0: "".join(pieces)}


@pytest.mark.parametrize("route", ["completions", "chat"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_pieces_of_branches_are_the_whole_and_never_show_a_stop(
    client: OpenAI, reciter: Reciter, route: str, temperature: float
) -> None:
    asked = question(reciter, route) | {"temperature": temperature, "n": 4, "seed": 1, "max_tokens": 100, "stop": STOPS}
    pieces, whole = pieces_of(client, route, asked), whole_of(client, route, asked)
    assert {index: "".join(one) for index, one in pieces.items()} == whole
    assert len(whole) == 4
    assert not any(stop in text for stop in STOPS for text in whole.values())
    if temperature == 2.0:
        assert any(REPLACEMENT in text for text in whole.values())


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_every_choice_ends_once_then_usage_then_done(server: ServerProcess, reciter: Reciter, route: str) -> None:
    body = question(reciter, route) | {"n": 4, "seed": 2, "max_tokens": 50, "stop": STOPS, "temperature": 0.8}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    *frames, rest = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=LIMIT_S).text.split("\n\n")
    assert rest == ""
    frames = [frame for frame in frames if not frame.startswith(":")]   # a slow stream has comments
    assert all(frame.startswith("data: ") for frame in frames)
    assert frames.pop() == "data: [DONE]"
    *chunks, last = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] >= 4
    ended: Counter[int] = Counter()
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert not ended[choice["index"]], "a piece after the end"
        ended[choice["index"]] += choice["finish_reason"] is not None
    assert ended == {0: 1, 1: 1, 2: 1, 3: 1}
