"""Prompts in every form, and the bounds of one call."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from quire.core.errors import InvalidRequestError
from quire.engine.requests.input_processor import TokenizedPrompt
from quire.server.apis.completions.completion_routes import parse_prompts
from support.openai_server import OpenAIServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def limit(monkeypatch: pytest.MonkeyPatch, server: OpenAIServer, **limits: int) -> None:
    """Let a test have limits of its own."""
    monkeypatch.setattr(server.service, "options", replace(server.service.options, **limits))  # type: ignore[arg-type]


def test_forms_of_prompts() -> None:
    assert parse_prompts("x") == ["x"]
    assert parse_prompts([5, 6]) == [[5, 6]]
    assert parse_prompts(["x", "y"]) == ["x", "y"]
    assert parse_prompts([[5], [6, 7]]) == [[5], [6, 7]]
    for wrong in (None, 5, True, {}, [], [True], [None], [{}], ["x", 5], [[5], 5], ["x", [5]], [[5], "x"]):
        with pytest.raises(InvalidRequestError, match="prompt must be text") as refused:
            parse_prompts(wrong)
        assert refused.value.param == "prompt"


@pytest.mark.parametrize("prompt", [[-1], [4096], [5, "x"], [5, True], [10**30], [[5], []], ["x", [5.0]]])
def test_token_ids_are_checked(server: OpenAIServer, prompt: Any) -> None:  # noqa: ANN401 (JSON)
    status, error = server.refusal(COMPLETIONS, prompt=prompt)
    assert (status, error["param"]) == (400, "prompt")


def test_empty_prompt_is_as_long_as_what_the_tokenizer_adds(server: OpenAIServer) -> None:
    assert server.ask(COMPLETIONS, prompt="", max_tokens=1)["usage"]["prompt_tokens"] == 1


def test_special_tokens_are_left_out_where_asked(server: OpenAIServer) -> None:
    asked = {"max_tokens": 1, "return_token_ids": True, "temperature": 0}
    for add in (True, False, None):
        answer = server.ask(COMPLETIONS, prompt="The cat", add_special_tokens=add, **asked)
        tokens = server.ask("/tokenize", prompt="The cat", add_special_tokens=add is not False)["tokens"]
        assert answer["choices"][0]["prompt_token_ids"] == tokens
        answer = server.ask(CHAT, messages=MESSAGES, add_special_tokens=add, **asked)
        tokens = server.ask("/tokenize", messages=MESSAGES, add_special_tokens=add)["tokens"]
        assert answer["prompt_token_ids"] == tokens
        assert tokens[:2] == ([0, 0] if add else [0, tokens[1]])
    status, error = server.refusal(COMPLETIONS, prompt="", add_special_tokens=False)
    assert (status, error["param"]) == (400, "prompt")


def test_one_bad_prompt_of_many_queues_none(server: OpenAIServer) -> None:
    for bad in ([4096], "x " * 2000):
        status, _ = server.refusal(COMPLETIONS, prompt=["x", bad, "y"], max_tokens=5)
        assert status == 400
        assert server.on_loop(lambda: len(server.service.client._streams)) == 0


def test_too_long_a_prompt_is_told_in_numbers(server: OpenAIServer) -> None:
    status, error = server.refusal(COMPLETIONS, prompt=[5] * 1020, max_tokens=5)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "1020" in error["message"]
    assert "1024" in error["message"]
    status, error = server.refusal(CHAT, messages=[{"role": "user", "content": "x " * 2000}])
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")


def test_prompt_that_is_too_long_alone_is_told_as_such(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, server, max_call_tokens=1500, max_prompt_candidates=1500)
    status, error = server.refusal(COMPLETIONS, prompt=[5] * 1600, prompt_logprobs=2)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    status, error = server.refusal(CHAT, messages=[{"role": "user", "content": "x " * 2000}], prompt_logprobs=2)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")


def test_chat_gets_as_many_tokens_as_fit(server: OpenAIServer) -> None:
    messages = [{"role": "user", "content": " x" * 1000}]
    assert 1000 < server.ask("/tokenize", messages=messages)["count"] < 1024
    answer = server.ask(CHAT, messages=messages, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 1024
    assert answer["choices"][0]["finish_reason"] == "length"


def test_prompts_of_a_call_are_bounded(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(server.ask(COMPLETIONS, prompt=["x"] * 28, max_tokens=1)["choices"]) == 28  # 8 seats, 20 places
    status, error = server.refusal(COMPLETIONS, prompt=["x"] * 29)
    assert (status, error["param"]) == (400, "prompt")
    assert "20" in error["message"]
    limit(monkeypatch, server, max_choices=10)
    status, error = server.refusal(COMPLETIONS, prompt=["x"] * 3, n=4)
    assert (status, error["param"]) == (400, "n")
    limit(monkeypatch, server, max_call_tokens=50)
    status, error = server.refusal(COMPLETIONS, prompt=[[5] * 26] * 2)
    assert (status, error["param"]) == (400, "prompt")


def test_logprobs_of_prompts_are_bounded(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, server, max_prompt_candidates=119)
    status, error = server.refusal(COMPLETIONS, prompt=[[5] * 10] * 2, prompt_logprobs=2, n=2)
    assert (status, error["param"]) == (400, "prompt_logprobs")
    assert "120" in error["message"]
    server.ask(COMPLETIONS, prompt=[[5] * 10] * 2, prompt_logprobs=2, n=1, max_tokens=1)
    named = {"prompt_logprob_token_ids": [[5] * 3] * 9}
    status, error = server.refusal(COMPLETIONS, prompt=[[5] * 10] * 2, **named, n=2)
    assert (status, error["param"]) == (400, "prompt_logprob_token_ids")
    server.ask(COMPLETIONS, prompt=[[5] * 10] * 2, **named, max_tokens=1)


def test_long_prompts_hold_up_no_short_ones(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, may_go_on = server.service.client.inputs, threading.Event()
    tokenize = inputs.tokenize

    def tokenize_slowly(prompt: Any, **how: bool) -> TokenizedPrompt:  # noqa: ANN401 (JSON)
        if len(prompt) > 1000:
            may_go_on.wait()
        return tokenize(prompt, **how)

    monkeypatch.setattr("quire.server.limits.fair_semaphore.LONG_CHARS", 1000)
    monkeypatch.setattr(inputs, "tokenize", tokenize_slowly)
    with ThreadPoolExecutor(3) as clients:
        refused = [clients.submit(server.refusal, COMPLETIONS, prompt=[5] * 1025) for _ in range(3)]
        try:
            server.wait_until(lambda: server.service.admission.num_preparing == 3)
            assert server.ask(COMPLETIONS, prompt="x", max_tokens=1)["usage"]["completion_tokens"] == 1
        finally:
            may_go_on.set()
        assert {future.result()[1]["code"] for future in refused} == {"context_length_exceeded"}


def test_full_queue_is_told_before_any_work(server: OpenAIServer) -> None:
    num_free_seqs = server.service.client.num_free_seqs
    server.on_loop(lambda: setattr(server.service.admission, "num_preparing", 19 + num_free_seqs))
    try:
        response = server.http.post(COMPLETIONS, json={"prompt": ["x", "y"]})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "server_overloaded")
        assert int(response.headers["retry-after"]) >= 1
        assert server.ask(COMPLETIONS, prompt="x", max_tokens=1)["usage"]["completion_tokens"] == 1
    finally:
        server.on_loop(lambda: setattr(server.service.admission, "num_preparing", 0))


def test_template_writes_the_prompt(server: OpenAIServer) -> None:
    rendered = "<|endoftext|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    asked = {"temperature": 0, "max_tokens": 5, "return_token_ids": True}
    answer = server.ask(CHAT, messages=MESSAGES, **asked)
    assert server.ask("/detokenize", tokens=answer["prompt_token_ids"])["prompt"] == rendered
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert server.ask(CHAT, messages=parts, **asked)["choices"] == answer["choices"]


def test_final_message_can_be_continued(server: OpenAIServer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "def"}]
    answer = server.ask(CHAT, messages=messages, continue_final_message=True, max_tokens=1, return_token_ids=True)
    text = server.ask("/detokenize", tokens=answer["prompt_token_ids"])["prompt"]
    assert text.endswith("<|im_start|>assistant\ndef")
    status, error = server.refusal(CHAT, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert (status, error["param"]) == (400, "continue_final_message")


def test_generation_prompt_can_be_left_out(server: OpenAIServer) -> None:
    answer = server.ask(CHAT, messages=MESSAGES, add_generation_prompt=False, max_tokens=1, return_token_ids=True)
    assert server.ask("/detokenize", tokens=answer["prompt_token_ids"])["prompt"].endswith("hi<|im_end|>\n")


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "continue_final_message"])
def test_template_variables_are_no_fields(server: OpenAIServer, name: str) -> None:
    status, error = server.refusal(CHAT, messages=MESSAGES, chat_template_kwargs={name: True})
    assert (status, error["param"]) == (400, "chat_template_kwargs")
    server.ask(CHAT, messages=MESSAGES, chat_template_kwargs={"enable_thinking": False}, max_tokens=1)


def test_what_a_template_cannot_render_is_told(server: OpenAIServer) -> None:
    status, error = server.refusal(CHAT, messages=[{"role": "user", "content": None}])
    assert (status, error["param"]) == (400, "messages")
