"""Answers as clients see them: their shape, their numbers, and the errors of both routes."""

import json
import logging
from itertools import pairwise
from typing import Any

import pytest

from quire.core.sampling_params import SamplingParams
from quire.engine.processes.client import PreparedRequest
from quire.engine.processes.streams import RequestStream
from quire.engine.requests.input_processor import TokenizedPrompt
from support import vllm_fields
from support.openai_server import NAME, OpenAIServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def test_completion_has_the_shape_of_openai(server: OpenAIServer) -> None:
    answer = server.ask(COMPLETIONS, prompt="def f(", **GREEDY)
    (choice,) = answer.pop("choices")
    assert choice.pop("text")
    nulls = vllm_fields.COMPLETION_CHOICE - {"index", "text", "finish_reason"}
    assert choice == {"index": 0, "finish_reason": "length", **dict.fromkeys(nulls)}
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 0
    assert answer.pop("system_fingerprint").startswith("quire-")
    details = answer["usage"].pop("prompt_tokens_details")
    assert details.pop("cached_tokens") in range(4)
    assert details == dict.fromkeys(vllm_fields.PROMPT_USAGE - {"cached_tokens"})
    counts = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    assert answer.pop("usage") == {**counts, "completion_tokens_details": None}
    nulls = vllm_fields.COMPLETION - {"id", "created", "system_fingerprint", "usage", "choices"}
    assert answer == {**dict.fromkeys(nulls), "object": "text_completion", "model": NAME}


def test_chat_has_the_shape_of_openai(server: OpenAIServer) -> None:
    answer = server.ask(CHAT, messages=MESSAGES, **GREEDY)
    assert (answer["object"], answer["model"]) == ("chat.completion", NAME)
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    message = choice.pop("message")
    assert message.pop("content")
    others = (vllm_fields.MESSAGE | {"reasoning_content"}) - {"content"}
    assert message == {**dict.fromkeys(others), "role": "assistant"}
    nulls = vllm_fields.CHAT_CHOICE - {"message"}
    assert choice == {**dict.fromkeys(nulls), "index": 0, "finish_reason": "length"}
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage.keys() == vllm_fields.USAGE
    assert answer.keys() == vllm_fields.CHAT
    assert {answer[name] for name in ("prompt_logprobs", "prompt_token_ids", "prompt_text", "service_tier")} == {None}


def test_chunks_have_the_keys_of_vllm(server: OpenAIServer) -> None:
    chunks = server.stream(COMPLETIONS, prompt="def f(", **GREEDY)
    assert {frozenset(chunk["choices"][0]) for chunk in chunks} == {vllm_fields.COMPLETION_CHUNK_CHOICE}
    assert all(chunk["kv_transfer_params"] is None for chunk in chunks)
    chunks = server.stream(CHAT, messages=MESSAGES, **GREEDY)
    *others, last = chunks
    assert {frozenset(chunk["choices"][0]) for chunk in others} <= {vllm_fields.CHAT_CHUNK_CHOICE}
    assert last["choices"][0].keys() == vllm_fields.LAST_CHAT_CHUNK_CHOICE
    assert [name for name in ("prompt_token_ids", "prompt_text") if name in chunks[0]] == [
        "prompt_token_ids", "prompt_text",
    ]


def test_choices_are_numbered_prompt_by_prompt(server: OpenAIServer) -> None:
    asked: dict[str, Any] = {"n": 2, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    together = server.ask(COMPLETIONS, prompt=["def f(", "import "], **asked)
    alone = [server.ask(COMPLETIONS, prompt=prompt, **asked) for prompt in ("def f(", "import ")]
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for answer in alone for choice in answer["choices"]]
    assert [choice["text"] for choice in together["choices"]] == texts
    assert len(set(texts)) == 4
    assert together["usage"]["prompt_tokens"] == sum(answer["usage"]["prompt_tokens"] for answer in alone)
    assert together["usage"]["completion_tokens"] == 4 * 8


def test_prompts_of_every_form_are_the_same(server: OpenAIServer) -> None:
    text = "def f("
    ids = server.ask("/tokenize", prompt=text)["tokens"]
    forms: list[Any] = [text, [text], ids, [ids]]
    assert len({server.ask(COMPLETIONS, prompt=form, **GREEDY)["choices"][0]["text"] for form in forms}) == 1


def test_stop_is_told_with_its_reason(server: OpenAIServer) -> None:
    free = server.ask(COMPLETIONS, prompt="def f(", temperature=0, max_tokens=20, return_token_ids=True)["choices"][0]
    stop = free["text"][4:7]
    cut = server.ask(COMPLETIONS, prompt="def f(", temperature=0, max_tokens=20, stop=["@@@", stop])["choices"][0]
    assert cut["text"] == free["text"][: free["text"].index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    token = free["token_ids"][3]
    cut = server.ask(COMPLETIONS, prompt="def f(", temperature=0, max_tokens=20, stop_token_ids=[token])["choices"][0]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", token)


def test_token_ids_are_told_if_asked_for(server: OpenAIServer) -> None:
    completion = server.ask(COMPLETIONS, prompt=[0, 315], return_token_ids=True, **GREEDY)["choices"][0]
    assert completion["prompt_token_ids"] == [0, 315]
    assert server.ask("/detokenize", tokens=completion["token_ids"])["prompt"] == completion["text"]
    chat = server.ask(CHAT, messages=MESSAGES, return_token_ids=True, **GREEDY)
    text = chat["choices"][0]["message"]["content"]
    assert server.ask("/detokenize", tokens=chat["choices"][0]["token_ids"])["prompt"] == text
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]


def test_logprobs_of_both_routes_are_of_the_same_tokens(server: OpenAIServer) -> None:
    ids = server.ask("/tokenize", messages=MESSAGES)["tokens"]
    completion = server.ask(COMPLETIONS, prompt=ids, logprobs=2, **GREEDY)["choices"][0]
    chat = server.ask(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)["choices"][0]
    lists, objects = completion["logprobs"], chat["logprobs"]["content"]
    assert lists["tokens"] == [entry["token"] for entry in objects]
    assert lists["token_logprobs"] == [entry["logprob"] for entry in objects]
    assert lists["top_logprobs"] == [
        {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in objects
    ]
    assert "".join(lists["tokens"]) == completion["text"] == chat["message"]["content"]
    ends = [*lists["text_offset"][1:], len(completion["text"])]
    slices = [completion["text"][start:end] for start, end in zip(lists["text_offset"], ends, strict=True)]
    assert slices == lists["tokens"]
    assert bytes(byte for entry in objects for byte in entry["bytes"]).decode() == completion["text"]


@pytest.mark.parametrize("skips", [True, False])
def test_offsets_of_an_echo_count_the_special_tokens_that_came_in_the_text(server: OpenAIServer, skips: bool) -> None:
    prompt = "<|im_start|>user\nhi<|im_end|>\n"
    asked = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1, "skip_special_tokens": skips}
    (choice,) = server.ask(COMPLETIONS, **asked)["choices"]
    first, *tokens, _ = choice["logprobs"]["tokens"]
    offsets = choice["logprobs"]["text_offset"]
    assert (first, offsets[0]) == ("<|endoftext|>", 0)      # the token that the tokenizer puts before every text
    slices = [prompt[start:end] for start, end in pairwise(offsets[1:])]
    assert slices == tokens


def test_echo_shows_the_prompt(server: OpenAIServer) -> None:
    prompt = "def f("
    plain = server.ask(COMPLETIONS, prompt=prompt, **GREEDY)["choices"][0]["text"]
    ids = server.ask("/tokenize", prompt=prompt)["tokens"]
    for form, shown in ((prompt, prompt), (ids, server.ask("/detokenize", tokens=ids)["prompt"])):
        assert server.ask(COMPLETIONS, prompt=form, echo=True, **GREEDY)["choices"][0]["text"] == shown + plain


def test_echo_without_output_scores_a_prompt(server: OpenAIServer) -> None:
    answer = server.ask(COMPLETIONS, prompt="def f(", echo=True, logprobs=1, max_tokens=0)
    longer = server.ask(COMPLETIONS, prompt="def f(", echo=True, logprobs=1, max_tokens=1, temperature=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("def f(", "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["token_logprobs"] == longer["choices"][0]["logprobs"]["token_logprobs"][:-1]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    (chunk,) = server.stream(COMPLETIONS, prompt="def f(", echo=True, logprobs=1, max_tokens=0)
    (streamed,) = chunk["choices"]
    assert streamed == {name: choice[name] for name in streamed}


def test_logprobs_of_prompts(server: OpenAIServer) -> None:
    ids = server.ask("/tokenize", messages=MESSAGES)["tokens"]
    completion = server.ask(COMPLETIONS, prompt=ids, prompt_logprobs=1, **GREEDY)["choices"][0]["prompt_logprobs"]
    chat = server.ask(CHAT, messages=MESSAGES, prompt_logprobs=1, **GREEDY)["prompt_logprobs"]
    assert completion == chat
    assert completion[0] is None
    for token, position in zip(ids[1:], completion[1:], strict=True):
        assert set(position[str(token)]) == {"logprob", "rank", "decoded_token"}
        assert min(entry["rank"] for entry in position.values()) == 1


def cached_tokens(answer: dict[str, Any]) -> int:
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(cached, int)
    return cached


def test_usage_tells_how_much_of_the_prompts_was_found_in_the_cache(server: OpenAIServer) -> None:
    prompt = [7 + i for i in range(40)]
    answers = [server.ask(COMPLETIONS, prompt=prompt, **GREEDY) for _ in range(2)]
    assert [cached_tokens(answer) for answer in answers] == [0, 32]
    assert answers[0]["choices"] == answers[1]["choices"]
    several = server.ask(COMPLETIONS, prompt=[prompt, prompt[:32], [271] * 20], n=2, seed=1, max_tokens=2)
    assert cached_tokens(several) == 32 + 31
    stream = server.stream(COMPLETIONS, prompt=prompt, stream_options={"include_usage": True}, **GREEDY)
    assert cached_tokens(stream[-1]) == 32
    messages = [{"role": "user", "content": "x " * 40}]
    first, second = (cached_tokens(server.ask(CHAT, messages=messages, **GREEDY)) for _ in range(2))
    assert second >= first + 32, "the first may have found what the template writes before every message"


def test_salts_keep_what_was_asked_apart(server: OpenAIServer) -> None:
    prompt = [300 + i for i in range(40)]
    salts: list[dict[str, Any]] = [{"cache_salt": salt} for salt in ("a", "b", "a")] + [{}, {"cache_salt": None}]
    answers = [server.ask(COMPLETIONS, prompt=prompt, **salt, **GREEDY) for salt in salts]
    assert [cached_tokens(answer) for answer in answers] == [0, 0, 32, 0, 32]
    messages = [{"role": "user", "content": "y " * 40}]
    chats = [server.ask(CHAT, messages=messages, **salt, **GREEDY) for salt in salts[:3]]
    assert [cached_tokens(answer) > 32 for answer in chats] == [False, False, True]


@pytest.mark.parametrize("salt", ["", "x" * 1025, 5, ["a"]])
def test_salt_that_is_none_is_refused(server: OpenAIServer, salt: Any) -> None:  # noqa: ANN401 (JSON)
    for path, asked in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        status, error = server.refusal(path, cache_salt=salt, **asked)
        assert (status, error["param"]) == (400, "cache_salt")


def test_models(server: OpenAIServer) -> None:
    listed = server.http.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (NAME, "model", 1024)
    assert model.keys() == vllm_fields.MODEL
    assert (model["root"], model["parent"]) == (NAME, None)
    assert [permission.keys() for permission in model["permission"]] == [vllm_fields.PERMISSION]
    assert server.http.get(f"/v1/models/{NAME}").json() == model
    for other in ("other", "org/other"):
        response = server.http.get(f"/v1/models/{other}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})], ids=["completions", "chat"]
)
def test_errors_come_as_statuses_also_where_a_stream_was_asked_for(
    server: OpenAIServer, path: str, body: dict[str, Any]
) -> None:
    for stream in (False, True):
        for wrong, status, code, param in (
            ({"model": "other"}, 404, "model_not_found", "model"),
            ({"n": 0}, 400, None, "n"),
            ({"store": True}, 400, "unsupported_parameter", "store"),
            ({"max_tokens": 2000}, 400, "context_length_exceeded", None),
        ):
            got, error = server.refusal(path, **body | wrong | {"stream": stream})
            assert (got, error["type"], error["code"]) == (status, "invalid_request_error", code)
            assert error["param"] == param or param is None


@pytest.mark.parametrize("body", [{"prompt": None}, {}, {"prompt": "x"}], ids=str)
def test_prompts_as_embeddings_are_refused_by_their_name(server: OpenAIServer, body: dict[str, Any]) -> None:
    for embeddings in ("AAAA", ["AAAA", "AAAA"]):
        status, error = server.refusal(COMPLETIONS, prompt_embeds=embeddings, max_tokens=1, **body)
        assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", "prompt_embeds")
        assert error["message"].startswith("prompt_embeds")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_log_tells_what_a_call_has_cost(server: OpenAIServer, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    with caplog.at_level(logging.INFO, "quire.requests"):
        body = GREEDY | {"prompt": ["x", "y"], "n": 2, "temperature": 1, "stream": stream}
        response = server.http.post(COMPLETIONS, json=body)
        server.wait_until(lambda: bool(caplog.messages))
    line = json.loads(caplog.messages[0])
    assert line["request_id"] == response.headers["x-request-id"] in response.text
    told = {name: line[name] for name in ("model", "stream", "num_prompts", "prompt_tokens", "output_tokens")}
    assert told == {"model": NAME, "stream": stream, "num_prompts": 2, "prompt_tokens": 4, "output_tokens": 24}
    assert line["finish_reasons"] == ["length"] * 4
    assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["duration_s"]


def test_names_are_those_of_the_server(server: OpenAIServer) -> None:
    answer = server.ask(COMPLETIONS, prompt="x", model=NAME, max_tokens=1)
    assert answer["model"] == NAME
    assert server.stream(COMPLETIONS, prompt="x", max_tokens=1)[0]["model"] == NAME


@pytest.mark.parametrize("search", [{}, {"use_beam_search": True, "n": 2}], ids=["sampling", "beam search"])
def test_parameters_are_checked_against_the_model_once(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch, search: dict[str, Any]
) -> None:
    """All prompts of a call are checked before any of them is tokenized."""
    done, inputs = list[str](), server.service.client.inputs
    check, tokenize = SamplingParams.check_vocabulary, inputs.tokenize

    def checking(params: SamplingParams, vocab_size: int) -> None:
        done.append("checked")
        check(params, vocab_size)

    def tokenizing(prompt: Any, **how: bool) -> TokenizedPrompt:  # noqa: ANN401
        done.append("tokenized")
        return tokenize(prompt, **how)

    monkeypatch.setattr(SamplingParams, "check_vocabulary", checking)
    monkeypatch.setattr(inputs, "tokenize", tokenizing)
    server.ask(COMPLETIONS, prompt=["a", "b"], max_tokens=2, **search)
    assert done == ["checked", "tokenized", "tokenized"]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": [5]}), (CHAT, {"messages": MESSAGES})])
def test_priority_reaches_the_engine(
    path: str, body: dict[str, Any], server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, sent = server.service.client, list[int]()
    add = client.add

    async def noting(prepared: PreparedRequest, **settings: Any) -> RequestStream:  # noqa: ANN401
        sent.append(prepared.request.priority)
        return await add(prepared, **settings)

    monkeypatch.setattr(client, "add", noting)
    for priority in (-100, 100, 0, None):
        server.ask(path, **body, **GREEDY, priority=priority)
    assert sent == [-100, 100, 0, 0]
    for wrong in (-101, 101, 2**70, 1.5, "x"):
        status, error = server.refusal(path, **body, priority=wrong)
        assert (status, error["param"]) == (400, "priority")
