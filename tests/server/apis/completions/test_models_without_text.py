"""Models that lack a tokenizer or a chat template: what needs none works, the rest says what is missing."""

from collections.abc import Iterator
from typing import Any

import pytest

from quire.engine.options import EngineOptions
from support import small_tokenizers
from support.cycle_model import write_cycle_model
from support.openai_server import OpenAIServer, openai_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
CYCLE = [5, 6, 7]


@pytest.fixture(scope="module")
def mute(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIServer]:
    """A model without a tokenizer, which says 5, 6, 7, 5, 6, ..."""
    folder = write_cycle_model(tmp_path_factory.mktemp("mute"), 16, CYCLE)
    with openai_server(EngineOptions(model=str(folder), num_kv_blocks=64)) as server:
        yield server


def test_token_ids_go_in_and_out(mute: OpenAIServer) -> None:
    body = {"prompt": [5], "temperature": 0, "max_tokens": 4, "return_token_ids": True, "logprobs": 1}
    (choice,) = mute.ask(COMPLETIONS, **body)["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [6, 7, 5, 6], "length")
    assert choice["logprobs"]["tokens"] == ["token_id:6", "token_id:7", "token_id:5", "token_id:6"]
    chunks = mute.stream(COMPLETIONS, **body)
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == [6, 7, 5, 6]


def test_echo_has_the_prompt_s_logprobs_and_no_text(mute: OpenAIServer) -> None:
    body = {"prompt": [5, 6], "temperature": 0, "max_tokens": 2, "echo": True, "return_token_ids": True, "logprobs": 1}
    (choice,) = mute.ask(COMPLETIONS, **body)["choices"]
    assert (choice["text"], choice["prompt_token_ids"], choice["token_ids"]) == ("", [5, 6], [7, 5])
    assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:7", "token_id:5"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    chunks = mute.stream(COMPLETIONS, **body)
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    assert tokens == choice["logprobs"]["tokens"]


def test_stream_without_text_tells_the_end(mute: OpenAIServer) -> None:
    (chunk,) = mute.stream(COMPLETIONS, prompt=[5], max_tokens=4)
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) == ("", "length")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "text"}, "prompt"),
        (COMPLETIONS, {"prompt": [5], "stop": "x"}, "stop"),
        (COMPLETIONS, {"prompt": [5], "bad_words": ["x"]}, "bad_words"),
        (CHAT, {"messages": MESSAGES}, "messages"),
        ("/tokenize", {"prompt": "text"}, "model"),
        ("/tokenize", {"messages": MESSAGES}, "model"),
        ("/detokenize", {"tokens": [5]}, "model"),
    ],
)
def test_what_needs_a_tokenizer_says_so(mute: OpenAIServer, path: str, body: dict[str, Any], param: str) -> None:
    status, error = mute.refusal(path, **body)
    assert (status, error["param"]) == (400, param)
    assert "no tokenizer" in error["message"]


def test_chat_needs_a_template(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, backend = tmp_path_factory.mktemp("plain"), small_tokenizers.byte_level()
    small_tokenizers.save(backend, folder)
    write_cycle_model(folder, backend.get_vocab_size(), CYCLE)
    with openai_server(EngineOptions(model=str(folder), num_kv_blocks=64)) as server:
        for path in (CHAT, "/tokenize"):
            status, error = server.refusal(path, messages=MESSAGES)
            assert (status, error["param"]) == (400, "messages")
            assert "no chat template" in error["message"]
        assert server.ask(COMPLETIONS, prompt="the", max_tokens=1)["usage"]["completion_tokens"] == 1
