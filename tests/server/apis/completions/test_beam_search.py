"""Beam search over HTTP: the engine's own answers on both routes, and every field that it cannot obey refused."""

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, BeamSearchParams
from support.openai_server import OpenAIServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 3, "max_tokens": 8}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def offline(demo_model: Path) -> Any:  # noqa: ANN401 (a fixture that yields)
    with LLM(str(demo_model), max_model_len=1024) as llm:
        yield llm


@pytest.mark.parametrize("penalty", [None, -1.0, 2])
def test_answers_are_those_of_the_offline_search(server: OpenAIServer, offline: LLM, penalty: float | None) -> None:
    asked = BEAMS | {"length_penalty": penalty, "temperature": 0.5, "ignore_eos": True, "seed": 4}
    answer = server.ask(COMPLETIONS, prompt=["def f(", "import "], return_token_ids=True, **asked)
    params = BeamSearchParams(
        3, 8, ignore_eos=True, temperature=0.5, length_penalty=1.0 if penalty is None else penalty
    )
    expected = [each for output in offline.beam_search(["def f(", "import "], params, use_tqdm=False)
                for each in output.outputs]  # fmt: skip
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["token_ids"] for choice in answer["choices"]] == [each.token_ids for each in expected]
    assert [choice["text"] for choice in answer["choices"]] == [each.text for each in expected]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 6 * 8


def test_chat_has_as_many_messages_as_beams(server: OpenAIServer) -> None:
    answer = server.ask(CHAT, messages=MESSAGES, **BEAMS)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert all(choice["message"]["role"] == "assistant" for choice in answer["choices"])
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3


def test_chat_without_max_tokens_is_searched_as_far_as_fits(server: OpenAIServer) -> None:
    answer = server.ask(CHAT, messages=[{"role": "user", "content": "x" * 700}], n=2, use_beam_search=True)
    assert len(answer["choices"]) == 2
    assert answer["usage"]["total_tokens"] <= 1024 + answer["usage"]["completion_tokens"] // 2


def test_one_beam_by_default(server: OpenAIServer) -> None:
    beam = server.ask(COMPLETIONS, prompt="def f(", use_beam_search=True)
    greedy = server.ask(COMPLETIONS, prompt="def f(", temperature=0)
    assert [each["text"] for each in beam["choices"]] == [each["text"] for each in greedy["choices"]]


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"stop": "x"},
        {"stop": ["x"]},
        {"stop_token_ids": [5]},
        {"top_p": 0.9},
        {"top_k": 4},
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"min_tokens": 2},
        {"logit_bias": {"5": 1}},
        {"allowed_token_ids": [5]},
        {"bad_words": ["x"]},
        {"prompt_logprobs": 1},
        {"n": 9},
        {"n": 0},
        {"length_penalty": 11},
        {"length_penalty": "x"},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_fields_that_a_search_cannot_obey_are_refused(server: OpenAIServer, path: str, fields: dict[str, Any]) -> None:
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": MESSAGES}
    status, error = server.refusal(path, **prompt | BEAMS | fields)
    (field,) = fields
    assert (status, error["param"], error["type"]) == (400, field, "invalid_request_error")
    assert error["message"].startswith(field)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"logprobs": 0}, "logprobs"),
        (COMPLETIONS, {"best_of": 5}, "best_of"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "logprobs"),
        (CHAT, {"logprobs": True}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 2}, "logprobs"),
    ],
    ids=str,
)
def test_what_only_one_route_has_is_refused(
    server: OpenAIServer, path: str, fields: dict[str, Any], param: str
) -> None:
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": MESSAGES}
    status, error = server.refusal(path, **prompt | BEAMS | fields)
    assert (status, error["param"]) == (400, param)


def test_defaults_given_by_name_are_no_offence(server: OpenAIServer) -> None:
    defaults = {
        "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1,
        "stop": [], "stop_token_ids": [], "logit_bias": {}, "bad_words": [], "min_tokens": 0, "stream": False,
        "length_penalty": 1, "best_of": 3, "logprobs": None, "temperature": 1,
    }  # fmt: skip
    plain, named = (server.ask(COMPLETIONS, prompt="def f(", **BEAMS, **more) for more in ({}, defaults))
    assert [each["text"] for each in plain["choices"]] == [each["text"] for each in named["choices"]]


def test_echo_and_cache_salt_go_with_a_search(server: OpenAIServer) -> None:
    plain = server.ask(COMPLETIONS, prompt="def f(", **BEAMS)
    echoed = server.ask(COMPLETIONS, prompt="def f(", echo=True, cache_salt="x", **BEAMS)
    assert [each["text"] for each in echoed["choices"]] == ["def f(" + each["text"] for each in plain["choices"]]
