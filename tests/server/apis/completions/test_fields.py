"""vLLM's fields over the real application: what each changes in the response."""

import math
from pathlib import Path
from typing import Any

import pytest

from quire.engine.options import EngineOptions
from support.openai_server import NAME, Json, OpenAIServer, openai_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "hi"}]
REFUSAL = [{"type": "refusal", "refusal": "no"}]
BEGUN = [*MESSAGES, {"role": "assistant", "content": "def f("}]


def choice(answer: Json) -> Json:
    (only,) = answer["choices"]
    return dict(only)


def joined(chunks: list[Json], index: int = 0) -> str:
    """Return the content of a streamed message."""
    deltas = [each["delta"] for chunk in chunks for each in chunk["choices"] if each["index"] == index]
    return "".join(delta.get("content") or "" for delta in deltas)


def test_tokens_are_written_as_ids_if_the_client_asks(server: OpenAIServer) -> None:
    asked = {"logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True, "echo": True}
    answer = choice(server.ask(COMPLETIONS, prompt="def f(", **GREEDY, **asked))
    names = [f"token_id:{token}" for token in answer["prompt_token_ids"] + answer["token_ids"]]
    assert answer["logprobs"]["tokens"] == names
    plain = choice(server.ask(COMPLETIONS, prompt="def f(", **GREEDY, logprobs=2, echo=True))
    assert answer["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    assert all(name.startswith("token_id:") for top in answer["logprobs"]["top_logprobs"][1:] for name in top)
    asked = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    chat = choice(server.ask(CHAT, messages=MESSAGES, **GREEDY, **asked, return_tokens_as_token_ids=True))
    texts = choice(server.ask(CHAT, messages=MESSAGES, **GREEDY, **asked))["logprobs"]["content"]
    entries = chat["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in chat["token_ids"]]
    assert [entry["bytes"] for entry in entries] == [entry["bytes"] for entry in texts]


def test_server_writes_tokens_as_ids_unless_a_client_declines(demo_model: Path) -> None:
    engine = EngineOptions(model=str(demo_model), max_model_len=64, num_kv_blocks=16)
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    responses = {"input": "hi", "max_output_tokens": 2, "include": ["message.output_text.logprobs"], "temperature": 0}
    with openai_server(engine, return_tokens_as_token_ids=True) as server:
        for asked, is_by_id in (({}, True), ({"return_tokens_as_token_ids": False}, False)):
            whole = choice(server.ask(COMPLETIONS, prompt=[5, 6], **GREEDY, **asked, logprobs=1))["logprobs"]
            entries = choice(server.ask(CHAT, **GREEDY, **chat, **asked))["logprobs"]["content"]
            names = [*whole["tokens"], *whole["top_logprobs"][0], *(entry["token"] for entry in entries)]
            assert {name.startswith("token_id:") for name in names} == {is_by_id}
        (message,) = server.ask("/v1/responses", **responses)["output"]
        names = [entry["token"] for entry in message["content"][0]["logprobs"]]
        assert {name.startswith("token_id:") for name in names} == {True}


def test_metrics_of_a_request_with_one_answer(demo_model: Path) -> None:
    engine = EngineOptions(model=str(demo_model), max_model_len=64, num_kv_blocks=16)
    usage = {"stream_options": {"include_usage": True}}
    with openai_server(engine, enable_per_request_metrics=True) as server:
        for path, prompt in ((COMPLETIONS, {"prompt": [5, 6]}), (CHAT, {"messages": MESSAGES})):
            asked = GREEDY | prompt
            whole = server.ask(path, **asked)["metrics"]
            *others, last = server.stream(path, **asked, **usage)
            assert not any("metrics" in chunk for chunk in others)
            for metrics in (whole, last["metrics"]):
                assert min(metrics.values()) >= 0
                assert metrics["mean_itl_ms"] * 3 == pytest.approx(metrics["generation_time_ms"])
                inference_ms = metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]
                assert metrics["tokens_per_second"] * inference_ms == pytest.approx(4000)
            one = asked | {"max_tokens": 1}
            single = server.ask(path, **one)["metrics"]
            assert (list(single), single["mean_itl_ms"]) == (list(whole), None)
            *_, last = server.stream(path, **one, **usage)
            assert last["metrics"].keys() == single.keys() - {"mean_itl_ms"}
            several = asked | {"n": 2, "temperature": 1}
            assert server.ask(path, **several)["metrics"] is None
            assert "metrics" not in server.stream(path, **several, **usage)[-1]
        assert server.ask(COMPLETIONS, prompt=["a", "b"], **GREEDY)["metrics"] is None
        asked = {"input": "hi", "max_output_tokens": 4}
        assert server.ask("/v1/responses", **asked)["metrics"].keys() == whole.keys()


def test_logprobs_of_named_tokens(server: OpenAIServer) -> None:
    named = [7, 300, 9]
    asked = GREEDY | {"return_tokens_as_token_ids": True, "logprob_token_ids": named}
    whole = choice(server.ask(COMPLETIONS, prompt=[5, 6], **asked, logprobs=5, return_token_ids=True))
    for chosen, logprob, top in zip(
        whole["token_ids"], whole["logprobs"]["token_logprobs"], whole["logprobs"]["top_logprobs"], strict=True
    ):
        assert list(top) == list(dict.fromkeys(f"token_id:{token}" for token in [chosen, *named]))
        assert top[f"token_id:{chosen}"] == logprob == max(top.values())
    chat = choice(server.ask(CHAT, messages=MESSAGES, **asked, logprobs=True, top_logprobs=0))
    for entry in chat["logprobs"]["content"]:
        shown = [top["token"] for top in entry["top_logprobs"]]
        assert shown == list(dict.fromkeys([entry["token"], *(f"token_id:{token}" for token in named)]))


def test_named_logprobs_are_those_of_the_whole_distribution(server: OpenAIServer) -> None:
    asked = GREEDY | {"return_tokens_as_token_ids": True, "max_tokens": 1}
    likeliest = choice(server.ask(COMPLETIONS, prompt=[5, 6], **asked, logprobs=20))["logprobs"]["top_logprobs"][0]
    ids = [int(name.removeprefix("token_id:")) for name in likeliest]
    named = choice(server.ask(COMPLETIONS, prompt=[5, 6], **asked, logprobs=1, logprob_token_ids=ids[::-1]))
    assert named["logprobs"]["top_logprobs"][0] == likeliest


def test_named_tokens_of_a_prompt(server: OpenAIServer) -> None:
    asked = GREEDY | {"max_tokens": 2, "prompt_logprobs": 0}
    rows = [[6, 9], [7, -1, 9], []]
    whole = choice(server.ask(COMPLETIONS, prompt=[5, 6, 7, 8], **asked, prompt_logprob_token_ids=rows))
    scores, listed = whole["prompt_token_id_logprobs"], whole["prompt_logprobs"]
    assert [len(row) for row in scores] == [2, 3, 0]
    assert scores[1][1] is None, "padding"
    assert [scores[0][0], scores[1][0]] == pytest.approx([listed[1]["6"]["logprob"], listed[2]["7"]["logprob"]])
    named = {"prompt_logprob_token_ids": [[9]], "prompt_logprob_start": 2}
    last = choice(server.ask(COMPLETIONS, prompt=[5, 6, 7, 8], **asked, **named))["prompt_token_id_logprobs"]
    chunks = server.stream(COMPLETIONS, prompt=[5, 6, 7, 8], **(asked | named | {"n": 2, "temperature": 1}))
    told = [choice(chunk) for chunk in chunks if "prompt_token_id_logprobs" in choice(chunk)]
    assert [each["prompt_token_id_logprobs"] for each in told] == [last, last]
    num_tokens = server.ask(CHAT, messages=MESSAGES, **asked)["usage"]["prompt_tokens"]
    named = {"prompt_logprob_token_ids": [[9, 300]], "prompt_logprob_start": num_tokens - 2}
    chat = server.ask(CHAT, messages=MESSAGES, **asked, **named)
    assert [len(row) for row in chat["prompt_token_id_logprobs"]] == [2]
    assert "prompt_token_id_logprobs" not in server.ask(CHAT, messages=MESSAGES, **asked)
    error = server.refusal(COMPLETIONS, prompt=[5, 6], **asked, prompt_logprob_token_ids=[[1], [2]])
    assert (error[0], error[1]["param"]) == (400, "prompt_logprob_token_ids")


def test_logprobs_of_the_whole_vocabulary(demo_model: Path) -> None:
    engine = EngineOptions(model=str(demo_model), max_model_len=64, num_kv_blocks=16, max_logprobs=-1)
    asked = GREEDY | {"max_tokens": 2, "return_tokens_as_token_ids": True}
    with openai_server(engine, max_prompt_candidates=20_000) as server:
        size = server.service.client.ready.vocab_size
        whole = choice(server.ask(COMPLETIONS, prompt=[5, 6, 7], **asked, logprobs=-1, prompt_logprobs=size))
        tables = whole["logprobs"]["top_logprobs"]
        tables += [{key: each["logprob"] for key, each in place.items()} for place in whole["prompt_logprobs"][1:]]
        chat = choice(server.ask(CHAT, messages=MESSAGES, **asked, logprobs=True, top_logprobs=-1))
        tables += [
            {each["token"]: each["logprob"] for each in entry["top_logprobs"]} for entry in chat["logprobs"]["content"]
        ]
        assert [len(table) for table in tables] == [size] * 6
        for table in tables:
            assert sum(map(math.exp, table.values())) == pytest.approx(1, abs=1e-4)
        chunks = server.stream(COMPLETIONS, prompt=[5, 6, 7], **asked, logprobs=-1)
        assert [table for chunk in chunks for table in choice(chunk)["logprobs"]["top_logprobs"]] == tables[:2]
        for path, prompt in ((COMPLETIONS, {"prompt": [5] * 50}), (CHAT, {"messages": MESSAGES})):
            bound = server.refusal(path, **prompt, prompt_logprobs=-1, max_tokens=1)[1]
            assert (bound["param"], "max_prompt_candidates" in bound["message"]) == ("prompt_logprobs", True)


@pytest.mark.parametrize(("side", "kept"), [(None, slice(-3, None)), ("left", slice(-3, None)), ("right", slice(3))])
def test_prompts_are_truncated(server: OpenAIServer, side: str | None, kept: slice) -> None:
    asked = GREEDY | {"truncate_prompt_tokens": 3, "truncation_side": side, "return_token_ids": True}
    ids = [5, 6, 7, 8, 9]
    answer = server.ask(COMPLETIONS, prompt=ids, **asked)
    assert choice(answer)["prompt_token_ids"] == ids[kept]
    assert answer["usage"]["prompt_tokens"] == 3
    assert choice(answer)["text"] == choice(server.ask(COMPLETIONS, prompt=ids[kept], **GREEDY))["text"]


def test_truncated_texts_keep_the_special_tokens_that_are_added(server: OpenAIServer) -> None:
    text = "def f(a, b, c): return a + b + c"
    ids = server.ask("/tokenize", prompt=text)["tokens"]
    plain = server.ask("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    added = ids[: len(ids) - len(plain)]
    asked = GREEDY | {"truncate_prompt_tokens": 6, "return_token_ids": True}
    assert choice(server.ask(COMPLETIONS, prompt=text, **asked))["prompt_token_ids"] == [
        *added, *plain[len(added) - 6 :]
    ]
    echoed = choice(server.ask(COMPLETIONS, prompt=text, **asked, echo=True, add_special_tokens=False))
    assert echoed["text"].startswith(server.ask("/detokenize", tokens=plain[-6:])["prompt"])
    assert choice(server.ask(COMPLETIONS, prompt=text, **asked | {"truncate_prompt_tokens": 100}))[
        "prompt_token_ids"
    ] == ids


def test_longest_truncation_leaves_room_for_the_answer(server: OpenAIServer) -> None:
    ids = [5] * 1020
    answer = server.ask(COMPLETIONS, prompt=ids, max_tokens=10, truncate_prompt_tokens=-1, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 1024
    status, error = server.refusal(COMPLETIONS, prompt=ids, truncate_prompt_tokens=1025)
    assert (status, error["param"]) == (400, "truncate_prompt_tokens")
    chat = server.ask(CHAT, messages=[{"role": "user", "content": "x " * 5000}], truncate_prompt_tokens=7, max_tokens=1)
    assert chat["usage"]["prompt_tokens"] == 7


def test_chunks_have_usage_so_far_if_the_client_asks(server: OpenAIServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    several = {"prompt": ["def f(", "x"], "n": 2, "temperature": 1}
    for path, prompt in ((COMPLETIONS, several), (CHAT, {"messages": MESSAGES})):
        *chunks, last = server.stream(path, **GREEDY | prompt, stream_options=options)
        counted: dict[int, int] = {}
        for chunk in chunks:
            usage, index = chunk["usage"], choice(chunk)["index"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert usage["completion_tokens"] > counted.get(index, 0) or "role" in choice(chunk).get("delta", {})
            counted[index] = usage["completion_tokens"]
        assert set(counted.values()) == {4}
        assert last["usage"]["completion_tokens"] == sum(counted.values())
        assert last["choices"] == []
    del options["include_usage"]
    assert "usage" not in server.stream(COMPLETIONS, prompt="x", **GREEDY, stream_options=options)[0]


def test_chats_echo_the_message_that_they_continue(server: OpenAIServer) -> None:
    begun = {"messages": BEGUN, "continue_final_message": True, "n": 2, "temperature": 1, "seed": 3, "max_tokens": 4}
    plain = [each["message"]["content"] for each in server.ask(CHAT, **begun)["choices"]]
    echoed = [each["message"]["content"] for each in server.ask(CHAT, **begun, echo=True)["choices"]]
    assert echoed == [f"def f({text}" for text in plain]
    chunks = server.stream(CHAT, **begun, echo=True)
    assert [joined(chunks, index) for index in range(2)] == echoed
    assert choice(server.ask(CHAT, messages=MESSAGES, **GREEDY, echo=True)) == choice(
        server.ask(CHAT, messages=MESSAGES, **GREEDY)
    )


def test_rendered_prompt_is_returned_if_the_client_asks(server: OpenAIServer) -> None:
    answer = server.ask(CHAT, messages=MESSAGES, **GREEDY, return_prompt_text=True)
    assert "hi<|im_end|>" in answer["prompt_text"]
    first, *others = server.stream(CHAT, messages=MESSAGES, **GREEDY, return_prompt_text=True)
    assert first["prompt_text"] == answer["prompt_text"]
    assert not any("prompt_text" in chunk for chunk in others)


def test_echo_of_token_ids_has_their_special_tokens(server: OpenAIServer) -> None:
    ids = server.ask("/tokenize", messages=MESSAGES)["tokens"]
    answer = choice(server.ask(COMPLETIONS, prompt=ids, echo=True, max_tokens=0, logprobs=0))
    assert answer["text"] == server.ask("/detokenize", tokens=ids)["prompt"]
    assert "<|im_start|>" in answer["text"]
    offsets, tokens = answer["logprobs"]["text_offset"], answer["logprobs"]["tokens"]
    assert all(answer["text"][offset:].startswith(token.strip()) for offset, token in zip(offsets, tokens, strict=True))


def test_documents_are_a_variable_of_the_template(server: OpenAIServer) -> None:
    with_documents = server.ask(CHAT, messages=MESSAGES, **GREEDY, documents=[{"title": "a", "text": "b"}])
    assert choice(with_documents)["message"] == choice(server.ask(CHAT, messages=MESSAGES, **GREEDY))["message"]
    assert server.refusal(CHAT, messages=MESSAGES, documents=["a"])[1]["param"] == "documents"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"tools": []}, "tools"),
        (CHAT, {"tool_choice": "auto"}, "tool_choice"),
        (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages"),
        (CHAT, {"temperature": 2.5}, "temperature"),
        (CHAT, {"n": 2, "temperature": 0}, "n"),
        (COMPLETIONS, {"seed": 2**63}, "seed"),
        (COMPLETIONS, {"suffix": ""}, "suffix"),
        (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt"),
    ],
)
def test_what_vllm_refuses_is_refused(server: OpenAIServer, path: str, body: Json, param: str) -> None:
    asked: Json = {"prompt": "x"} if path == COMPLETIONS else {"messages": MESSAGES}
    status, error = server.refusal(path, **asked | body)
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"max_tokens": "3", "n": 1.0, "logprobs": True, "stream": "false"}),
        (COMPLETIONS, {"length_penalty": 2.0, "logit_bias": {"5": 500}, "request_id": "mine"}),
        (COMPLETIONS, {"stream_interval": 4, "thinking_token_budget": -1, "watermarking": False, "vllm_xargs": {}}),
        (CHAT, {"max_tokens": 9, "max_completion_tokens": 3}),
        (CHAT, {"messages": [{"role": "user"}, {"role": "assistant", "content": REFUSAL}]}),
    ],
)
def test_what_vllm_takes_is_taken(server: OpenAIServer, path: str, body: Json) -> None:
    asked: Json = {"prompt": "x"} if path == COMPLETIONS else {"messages": MESSAGES}
    answer = server.ask(path, **asked | {"max_tokens": 3, "ignore_eos": True} | body)
    assert (answer["usage"]["completion_tokens"], answer["model"]) == (3, NAME)


@pytest.mark.parametrize(("path", "asked"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})])
def test_repetition_ends_an_answer(server: OpenAIServer, path: str, asked: Json) -> None:
    asked = asked | {"allowed_token_ids": [5], "max_tokens": 40, "ignore_eos": True}
    answer = server.ask(path, **asked, repetition_detection={"max_pattern_size": 2, "min_count": 6})
    assert (choice(answer)["finish_reason"], choice(answer)["stop_reason"]) == ("repetition", "repetition_detected")
    assert answer["usage"]["completion_tokens"] == 6
    assert server.ask(path, **asked, repetition_detection={})["usage"]["completion_tokens"] == 40
    status, error = server.refusal(path, **asked, repetition_detection={"max_pattern_size": 257, "min_count": 2})
    assert (status, error["param"]) == (400, "repetition_detection.max_pattern_size")
