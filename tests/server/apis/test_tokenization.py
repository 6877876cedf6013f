"""Text to tokens and back over HTTP."""

from typing import Any

import pytest

from support.openai_server import OpenAIServer

MESSAGES = [{"role": "user", "content": "hi"}]


def test_there_and_back(server: OpenAIServer) -> None:
    text = "def f(x):\n    return '日本😀'"
    answer = server.ask("/tokenize", prompt=text, add_special_tokens=False)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 1024
    assert answer["token_strs"] is None
    assert server.ask("/detokenize", tokens=answer["tokens"]) == {"prompt": text}


def test_special_tokens_are_added_unless_unwanted(server: OpenAIServer) -> None:
    bare, full = (server.ask("/tokenize", prompt="x", add_special_tokens=add)["tokens"] for add in (False, True))
    assert full == [0, *bare] == server.ask("/tokenize", prompt="x")["tokens"]
    assert server.ask("/detokenize", tokens=full)["prompt"] == "<|endoftext|>x"


def test_tokens_as_the_vocabulary_spells_them(server: OpenAIServer) -> None:
    answer = server.ask("/tokenize", prompt="def f", return_token_strs=True)
    assert answer["token_strs"] == ["<|endoftext|>", "def", "Ġf"]


def test_conversation_is_what_a_chat_would_see(server: OpenAIServer) -> None:
    chat = server.ask("/v1/chat/completions", messages=MESSAGES, max_tokens=1, return_token_ids=True)
    assert server.ask("/tokenize", messages=MESSAGES)["tokens"] == chat["prompt_token_ids"]
    shorter = server.ask("/tokenize", messages=MESSAGES, add_generation_prompt=False)["tokens"]
    assert shorter == chat["prompt_token_ids"][: len(shorter)]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": "perhaps"}, "add_special_tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(server: OpenAIServer, path: str, body: dict[str, Any], param: str) -> None:
    status, error = server.refusal(path, **body)
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model_is_not_here(server: OpenAIServer, path: str) -> None:
    status, error = server.refusal(path, prompt="x", tokens=[5], model="other")
    assert (status, error["code"]) == (404, "model_not_found")
