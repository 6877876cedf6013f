"""Logprobs of both forms: names, bytes and offsets of tokens, also where a token is a part of a character."""

from pathlib import Path

import pytest

from quire.core.outputs import Logprob
from quire.server.openai.logprobs import CompletionLogprobsWriter, TokenNames, chat_logprobs
from quire.text.tokenizer import Tokenizer
from support.text_tokenizers import write_folder

TEXT = "naïve 中文 🙂ж\n"  # not what the byte-level tokenizer was trained on: its characters are in pieces


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", "metaspace", "word_level"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def byte_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(request.param, tmp_path_factory.mktemp(request.param)))


def candidates(*token_ids: int) -> dict[int, Logprob]:
    """Candidates that rank as they stand, each half as likely as the one before."""
    return {token: Logprob(-float(rank), rank, None) for rank, token in enumerate(token_ids, start=1)}


def test_bytes_of_tokens_join_to_the_text(byte_tokenizer: Tokenizer) -> None:
    names = TokenNames(byte_tokenizer)
    ids = byte_tokenizer.encode(TEXT, add_special_tokens=False)
    raw = [names.raw(token) for token in ids]
    assert bytes(byte for piece in raw for byte in piece or []).decode().strip(" ") == TEXT
    assert any("\ufffd" in names.text(token) for token in ids)


def test_part_of_a_character_has_a_name_of_its_own(byte_tokenizer: Tokenizer) -> None:
    names = TokenNames(byte_tokenizer)
    ids = byte_tokenizer.encode(TEXT, add_special_tokens=False)
    parts = {names.key(token) for token in ids if "\ufffd" in names.text(token)}
    assert {r"bytes:\x99", r"bytes:\x82"} <= parts
    assert all(part.startswith("bytes:\\x") for part in parts)


def test_without_a_tokenizer_tokens_are_ids() -> None:
    names = TokenNames(None)
    assert (names.text(5), names.key(5), names.raw(5)) == ("token_id:5", "token_id:5", None)
    written = CompletionLogprobsWriter(None, [1], skip_special_tokens=True, start=0).write([5], [candidates(5, 6)])
    assert written.tokens == ["token_id:5"]
    assert written.top_logprobs == [{"token_id:5": -1.0, "token_id:6": -2.0}]


def test_unknown_bytes_are_null(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder("metaspace", tmp_path))
    names, ids = TokenNames(tokenizer), tokenizer.encode("the 😀", add_special_tokens=False)
    assert names.raw(ids[0]) == list(names.text(ids[0]).encode())
    assert names.raw(ids[-1]) is None


def test_offsets_lead_into_the_text(tokenizer: Tokenizer) -> None:
    """From one token's offset to the next stands what the tokens in between completed."""
    prompt, ids = (tokenizer.encode(text, add_special_tokens=False) for text in ("the", f" the {TEXT}stop"))
    writer = CompletionLogprobsWriter(tokenizer, prompt, skip_special_tokens=True, start=7)
    written = writer.write(ids, [candidates(token) for token in ids])
    text = tokenizer.decode(prompt + ids).removeprefix(tokenizer.decode(prompt))
    assert written.text_offset[0] == 7
    assert written.text_offset == sorted(written.text_offset)
    assert all(offset - 7 <= len(text) for offset in written.text_offset)
    assert text[written.text_offset[-1] - 7 :].endswith(tokenizer.token_text(ids[-1])[-1])


def test_pieces_are_the_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    positions = [candidates(token, token + 1) for token in ids]
    whole = CompletionLogprobsWriter(tokenizer, [5], skip_special_tokens=True, start=0).write(ids, positions)
    writer = CompletionLogprobsWriter(tokenizer, [5], skip_special_tokens=True, start=0)
    pieces = [writer.write(ids[i : i + 2], positions[i : i + 2]) for i in range(0, len(ids), 2)]
    joined = pieces[0]
    for piece in pieces[1:]:
        joined = joined + piece
    assert joined == whole


def test_nothing_is_known_of_a_first_token(tokenizer: Tokenizer) -> None:
    written = CompletionLogprobsWriter(tokenizer, [], skip_special_tokens=True, start=0).write([5], [None])
    assert (written.token_logprobs, written.top_logprobs) == ([None], [None])
    assert written.tokens == [TokenNames(tokenizer).key(5)]


def test_chosen_token_keeps_its_logprob_among_namesakes(byte_tokenizer: Tokenizer) -> None:
    names = TokenNames(byte_tokenizer)
    by_name: dict[str, list[int]] = {}
    for token in range(byte_tokenizer.vocab_size):
        by_name.setdefault(names.key(token), []).append(token)
    for namesakes in (same for same in by_name.values() if len(same) > 1):
        other, chosen = namesakes[:2]
        writer = CompletionLogprobsWriter(byte_tokenizer, [], skip_special_tokens=True, start=0)
        written = writer.write([chosen], [candidates(other, chosen)])
        assert written.top_logprobs == [{names.key(chosen): -2.0}]


def test_chat_shows_the_likeliest_and_always_the_chosen(byte_tokenizer: Tokenizer) -> None:
    names = TokenNames(byte_tokenizer)
    ranked = candidates(10, 11, 12)
    position = {12: ranked[12], 10: ranked[10], 11: ranked[11]}  # the token that was drawn stands first
    for num_top, shown in ((0, []), (1, [10]), (2, [10, 11]), (3, [10, 11, 12])):
        (entry,) = chat_logprobs(names, [12], [position], num_top).content
        assert (entry.token, entry.logprob, entry.bytes) == (names.text(12), -3.0, names.raw(12))
        assert [top.token for top in entry.top_logprobs] == [names.text(token) for token in shown]
