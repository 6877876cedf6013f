"""Forks of running and finished requests: their answers are those of completions with the tokens before the fork."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from support.openai_server import NAME, OpenAIServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = list(range(3, 43))
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


def fork(server: OpenAIServer, request_id: str, **body: Any) -> dict[str, Any]:  # noqa: ANN401 (JSON)
    return server.ask(f"/v1/requests/{request_id}/fork", **body)


def tokens_of(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


@pytest.fixture
def parent(server: OpenAIServer) -> dict[str, Any]:
    return server.ask(COMPLETIONS, prompt=PROMPT, max_tokens=24, n=2, seed=5, ignore_eos=True, return_token_ids=True)


def test_fork_goes_on_as_the_request_did(server: OpenAIServer) -> None:
    parent = server.ask(COMPLETIONS, prompt=PROMPT, max_tokens=24, **GREEDY)
    answer = fork(server, parent["id"], at=9, max_tokens=15, **GREEDY)
    assert tokens_of(answer) == tokens_of(parent)[9:]
    assert (answer["object"], answer["model"]) == ("text_completion", NAME)
    assert answer["id"] not in (parent["id"], "")
    assert answer["usage"]["prompt_tokens"] == 49
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48  # all but the last token, which is computed


@pytest.mark.parametrize(("index", "at"), [(0, 0), (0, 24), (1, 7), (1, None)])
def test_fork_is_a_completion_of_the_tokens_before_it(
    server: OpenAIServer, parent: dict[str, Any], index: int, at: int | None
) -> None:
    own = parent["choices"][index]["token_ids"]
    sampling = {"seed": 11, "n": 3, "max_tokens": 8, "temperature": 1.0, "return_token_ids": True}
    where = {"index": index} if at is None else {"index": index, "at": at}
    forked = fork(server, parent["id"], **where, **sampling)
    plain = server.ask(COMPLETIONS, prompt=PROMPT + own[:at], **sampling)
    assert [choice["token_ids"] for choice in forked["choices"]] == [c["token_ids"] for c in plain["choices"]]


def test_fork_of_a_running_request_shares_its_blocks_and_leaves_it_as_it_is(server: OpenAIServer) -> None:
    alone = server.ask(COMPLETIONS, prompt=PROMPT, max_tokens=400, **GREEDY)
    body, client = {"prompt": PROMPT, "max_tokens": 400, "stream": True, **GREEDY}, server.service.client
    with ExitStack() as running, ThreadPoolExecutor(1) as pool:
        with server.single_steps() as run_step:     # else the request might be over before it is forked
            response = running.enter_context(server.http.stream("POST", COMPLETIONS, json=body))
            server.wait_until(lambda: client.num_queued == 1)
            run_step()
            # a comment that keeps the stream alive may come before a chunk
            lines = (line for line in response.iter_lines() if line.startswith("data: {"))
            first = chunk_of(next(lines))
            while num_known(server, first["id"]) < 20:
                run_step()
            forked = pool.submit(fork, server, first["id"], at=20, max_tokens=4, **GREEDY)
            server.wait_until(lambda: client.num_queued == 1)
        answer = forked.result()
        rest = [chunk_of(line) for line in lines]
    assert tokens_of(answer) == tokens_of(alone)[20:24]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
    streamed = [token for chunk in (first, *rest) for choice in chunk["choices"] for token in choice["token_ids"]]
    assert streamed == tokens_of(alone)


def chunk_of(line: str) -> dict[str, Any]:
    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return chunk


def num_known(server: OpenAIServer, request_id: str) -> int:
    (past,) = server.service.history.find(request_id, 0)
    return len(past.branches.get(0, ()))


def test_fork_of_a_chat_continues_its_answer(server: OpenAIServer) -> None:
    messages = [{"role": "user", "content": "def f("}]
    chat = server.ask(CHAT, messages=messages, max_tokens=12, **GREEDY)
    answer = fork(server, chat["id"], at=5, max_tokens=7, echo=True, **GREEDY)
    assert tokens_of(answer) == tokens_of(chat)[5:]
    assert answer["choices"][0]["text"].endswith(chat["choices"][0]["message"]["content"])


def test_fork_streams_and_can_be_forked(server: OpenAIServer, parent: dict[str, Any]) -> None:
    chunks = server.stream(f"/v1/requests/{parent['id']}/fork", at=3, max_tokens=6, **GREEDY)
    streamed = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    again = fork(server, chunks[0]["id"], at=2, max_tokens=4, **GREEDY)
    assert tokens_of(again) == streamed[2:]


def test_fork_keeps_the_salt(server: OpenAIServer) -> None:
    parent = server.ask(COMPLETIONS, prompt=PROMPT[::-1], max_tokens=2, cache_salt="mine", **GREEDY)
    assert fork(server, parent["id"], max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    plain = server.ask(COMPLETIONS, prompt=PROMPT[::-1], max_tokens=1)
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("at", 25, "an integer from 0 to 24"),
        ("index", 2, "an integer from 0 to 1"),
        ("prompt_index", 1, "an integer from 0 to 0"),
        ("cache_salt", "another", "that of the request"),
        ("model", "another", "that of the request"),
        ("max_tokens", 0, "at least 1"),
    ],
)
def test_what_the_request_has_not_is_refused(
    server: OpenAIServer, parent: dict[str, Any], field: str, value: object, limit: str
) -> None:
    status, error = server.refusal(f"/v1/requests/{parent['id']}/fork", **{field: value})
    assert (status, error["param"]) == (400, field)
    assert limit in error["message"]
    assert str(value) in error["message"]


def test_unknown_requests_are_not_found(server: OpenAIServer) -> None:
    status, error = server.refusal("/v1/requests/cmpl-0/fork")
    assert (status, error["code"]) == (404, "request_not_found")
