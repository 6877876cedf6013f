"""A stream is the answer in pieces: joined they are what is given whole, and no piece shows what the whole would not.

The model says one round of characters, a token for each byte; a high temperature leaves the round for any bytes.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest

from quire.engine.options import EngineOptions
from quire.text.tokenizer import REPLACEMENT, Tokenizer
from support import small_tokenizers
from support.cycle_model import write_cycle_model
from support.openai_server import Json, OpenAIServer, openai_server
from support.text_tokenizers import SMALL

ROUND = "日é😀ж stop"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WILD = {"temperature": 2.0, "max_tokens": 60}   # leaves the round about once in it
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 45},
    *({**WILD, "seed": seed} for seed in range(6)),
    {**WILD, "seed": 6, "n": 3},
    {**WILD, "seed": 7, "return_token_ids": True, "prompt_logprobs": 1},
    {**WILD, "seed": 8, "n": 2, "logprobs": 2, "return_token_ids": True},
    {**WILD, "seed": 9, "logprobs": 0, "stop": ["é😀", "stop"]},
    {**WILD, "seed": 10, "skip_special_tokens": False},
    {**WILD, "seed": 11, "max_tokens": 1},
]


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", "metaspace"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def server(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIServer]:
    folder = tmp_path_factory.mktemp(kind)
    small_tokenizers.save(SMALL[kind](), folder, chat_template=small_tokenizers.CHAT_TEMPLATE)
    tokenizer = Tokenizer.from_folder(folder)
    write_cycle_model(folder, tokenizer.vocab_size, [byte_token(tokenizer, byte) for byte in ROUND.encode()])
    with openai_server(EngineOptions(model=str(folder), num_kv_blocks=512)) as server:
        yield server
        server.wait_until(server.is_idle)


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    """Return the token of one byte: one of the alphabet, or SentencePiece's `<0xHH>`."""
    table = tokenizer.token_bytes(skip_special_tokens=False)
    if table is None:
        return tokenizer.encode(f"<0x{byte:02X}>", add_special_tokens=False)[-1]
    return next(token for token in range(tokenizer.vocab_size) if table[token] == bytes([byte]))


def asked(path: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a body whose prompt ends in a token of the round, so that greedy decoding goes on with it."""
    if path == COMPLETIONS:
        return {"prompt": ["a ж", "é ж"], **settings}
    logprobs = {} if "logprobs" not in settings else {"logprobs": True, "top_logprobs": settings["logprobs"]}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ж"}]
    return {"messages": messages, "continue_final_message": True, **settings, **logprobs}


def text_of(choice: Json) -> str:
    """Return the text of a choice or of a piece of one, in whichever form."""
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"]).get("content", ""))


def parts_of(choice: Json) -> Json:
    """Return what pieces of a choice add up to, by name: texts and lists."""
    logprobs = {f"logprobs.{name}": value for name, value in (choice["logprobs"] or {}).items() if value is not None}
    named = {"text": text_of(choice), "token_ids": choice.get("token_ids")} | logprobs
    return {name: value for name, value in named.items() if value is not None}


def ends_of(choice: Json) -> Json:
    """Return what only one piece of a choice tells."""
    names = ("finish_reason", "stop_reason", "prompt_token_ids", "prompt_logprobs")
    return {name: choice[name] for name in names if choice.get(name) is not None}


def joined(chunks: list[Json]) -> dict[int, Json]:
    """Return the choices that chunks add up to."""
    choices: dict[int, Json] = {}
    for chunk in chunks:
        (piece,) = chunk["choices"]
        choice = choices.setdefault(piece["index"], {})
        assert "finish_reason" not in choice, "a piece after the end"
        assert not choice.keys() & ends_of(piece).keys(), "told twice"
        choice |= {name: choice[name] + value if name in choice else value for name, value in parts_of(piece).items()}
        choice |= ends_of(piece)
    return choices


def check_chunks(chunks: list[Json], path: str) -> None:
    """Every piece says something, a message's first piece its role, and usage is null until the end."""
    begun = set()
    for chunk in chunks:
        (piece,) = chunk["choices"]
        begins = "role" in piece.get("delta", ())  # without words, where a later message has words before it
        assert text_of(piece) or piece["finish_reason"] or piece.get("token_ids") or piece["logprobs"] or begins
        assert chunk["usage"] is None
        if path == CHAT:
            assert begins == (piece["index"] not in begun)
        begun.add(piece["index"])
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT], ids=["completions", "chat"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_pieces_add_up_to_the_whole(server: OpenAIServer, path: str, settings: dict[str, Any]) -> None:
    body = asked(path, settings)
    whole = server.ask(path, **body)
    *chunks, last = server.stream(path, **body, stream_options={"include_usage": True})
    check_chunks(chunks, path)
    assert joined(chunks) == {choice["index"]: parts_of(choice) | ends_of(choice) for choice in whole["choices"]}
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert last["choices"] == []
    assert [last["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]
    for name in ("prompt_token_ids", "prompt_logprobs"):  # a chat tells them beside its choices
        told = [value for chunk in chunks if (value := chunk.get(name)) is not None]
        assert told == ([] if whole.get(name) is None else [whole[name]])


def test_characters_come_whole(server: OpenAIServer, kind: str) -> None:
    if kind == "metaspace":
        pytest.skip("this tokenizer decodes bytes of several characters as none of them")
    five_rounds = {"temperature": 0, "max_tokens": 5 * len(ROUND.encode()), "return_token_ids": True}
    for path in (COMPLETIONS, CHAT):
        chunks = server.stream(path, **asked(path, five_rounds))
        for index, choice in joined(chunks).items():
            assert choice["text"].count(ROUND) >= 3
            pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            check_whole_characters(pieces, choice["text"].encode())


def check_whole_characters(pieces: list[Json], encoded: bytes) -> None:
    """After each piece, however many tokens it has, all characters that they complete have been shown, and no more."""
    num_tokens, shown = 0, ""
    for piece in pieces:
        num_tokens += len(piece.get("token_ids") or ())
        shown += text_of(piece)
        assert shown == encoded[:num_tokens].decode(errors="ignore")
    assert num_tokens == len(encoded)


def test_character_that_is_never_completed_is_shown_at_the_end(server: OpenAIServer, kind: str) -> None:
    if kind == "metaspace":
        pytest.skip("this tokenizer decodes bytes of several characters as none of them")
    body = {"prompt": "a ж", "temperature": 0, "max_tokens": len(" stop日é".encode()) + 2}
    texts = [text_of(chunk["choices"][0]) for chunk in server.stream(COMPLETIONS, **body)]
    assert "".join(texts) == server.ask(COMPLETIONS, **body)["choices"][0]["text"] == " stop日é" + REPLACEMENT


@pytest.mark.parametrize(("path", "include"), list(product([COMPLETIONS, CHAT], [False, True])), ids=str)
def test_stop_strings_never_leak(server: OpenAIServer, kind: str, path: str, include: bool) -> None:
    """With four choices, over the border of tokens and chunks, and never a character too many or too few."""
    stops = ["é😀", "日é", "top"]
    num_stopped = 0
    for seed in range(5):
        settings = {**WILD, "n": 4, "seed": seed, "stop": stops, "include_stop_str_in_output": include}
        whole, chunks = server.ask(path, **asked(path, settings)), server.stream(path, **asked(path, settings))
        choices = joined(chunks)
        assert choices == {choice["index"]: parts_of(choice) | ends_of(choice) for choice in whole["choices"]}
        for choice in choices.values():
            is_stopped = choice["finish_reason"] == "stop" and "stop_reason" in choice
            num_stopped += is_stopped
            shown = choice["text"].removesuffix(choice["stop_reason"]) if include and is_stopped else choice["text"]
            assert not any(stop in shown for stop in stops)
            assert not include or not is_stopped or choice["text"] != shown
    assert num_stopped >= 10 or kind == "metaspace"


def test_streams_of_many_prompts_are_merged_as_they_come(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": [f"{ROUND} {i}ж" for i in range(8)], "n": 2, **WILD, "ignore_eos": True, "seed": 3}
    server.hand_on_each_output(monkeypatch)
    with ThreadPoolExecutor(1) as asking:
        with server.held():  # until it can begin all of them at once
            streaming = asking.submit(server.stream, COMPLETIONS, **body)
            server.wait_until(lambda: len(server.service.client._streams) == 8)
        chunks = streaming.result()
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    last_of_first, first_of_last = max(i for i, index in enumerate(order) if index == 0), order.index(15)
    assert first_of_last < last_of_first, "one after the other"
    whole = server.ask(COMPLETIONS, **body)
    assert joined(chunks) == {choice["index"]: parts_of(choice) | ends_of(choice) for choice in whole["choices"]}
    assert len(whole["choices"]) == 16
