"""Logprobs of both forms: names, bytes and offsets of tokens, also where a token is a part of a character."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.core.logprob_table import LogprobTable, Position
from quire.server.api import token_logprobs
from quire.server.api.http_responses import JsonStream, encode_streamed
from quire.server.api.token_logprobs import TokenNames
from quire.server.apis.completions import openai_logprobs as logprobs
from quire.server.apis.completions.openai_logprobs import (
    CompletionLogprobs,
    LogprobPiece,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from quire.text.tokenizer import Tokenizer
from support.text_tokenizers import write_folder

TEXT = "naïve 中文 🙂ж\n"  # not what the byte-level tokenizer was trained on: its characters are in pieces


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", "metaspace", "word_level"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def byte_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(request.param, tmp_path_factory.mktemp(request.param)))


def candidates(*token_ids: int) -> Position:
    """Candidates that rank as they stand, the first of them chosen."""
    ranks = [*range(1, len(token_ids) + 1)]
    return [*token_ids], [-float(rank) for rank in ranks], ranks


def read(written: object) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(b"".join(encode_streamed(written)))
    return value


def written_by(writer: CompletionLogprobs, token_ids: Sequence[int], positions: Sequence[Position]) -> dict[str, Any]:
    return read(completion_logprobs([writer.piece(token_ids, LogprobTable.of(positions))]))


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
    written = written_by(CompletionLogprobs(None, [1], skip_special_tokens=True, start=0), [5], [candidates(5, 6)])
    assert written["tokens"] == ["token_id:5"]
    assert written["top_logprobs"] == [{"token_id:5": -1.0, "token_id:6": -2.0}]


def test_unknown_bytes_are_null(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder("metaspace", tmp_path))
    names, ids = TokenNames(tokenizer), tokenizer.encode("the 😀", add_special_tokens=False)
    assert names.raw(ids[0]) == list(names.text(ids[0]).encode())
    assert names.raw(ids[-1]) is None


def test_offsets_lead_into_the_text(tokenizer: Tokenizer) -> None:
    """From one token's offset to the next stands what the tokens in between completed."""
    prompt, ids = (tokenizer.encode(text, add_special_tokens=False) for text in ("the", f" the {TEXT}stop"))
    writer = CompletionLogprobs(tokenizer, prompt, skip_special_tokens=True, start=7)
    offsets = written_by(writer, ids, [candidates(token) for token in ids])["text_offset"]
    text = tokenizer.decode(prompt + ids).removeprefix(tokenizer.decode(prompt))
    assert offsets[0] == 7
    assert offsets == sorted(offsets)
    assert all(offset - 7 <= len(text) for offset in offsets)
    assert text[offsets[-1] - 7 :].endswith(tokenizer.token_text(ids[-1])[-1])


def test_pieces_are_the_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    positions = [candidates(token, token + 1) for token in ids]
    whole = written_by(CompletionLogprobs(tokenizer, [5], skip_special_tokens=True, start=0), ids, positions)
    writer, starts = CompletionLogprobs(tokenizer, [5], skip_special_tokens=True, start=0), range(0, len(ids), 2)
    pieces = [writer.piece(ids[i : i + 2], LogprobTable.of(positions[i : i + 2])) for i in starts]
    assert read(completion_logprobs(pieces)) == whole
    writer = CompletionLogprobs(tokenizer, [5], skip_special_tokens=True, start=0)
    parts = [written_by(writer, ids[i : i + 2], positions[i : i + 2]) for i in starts]
    assert {name: [entry for part in parts for entry in part[name]] for name in whole} == whole


@pytest.mark.parametrize("num_positions", [0, 1, 2, 3, 5, 50])
def test_slices_are_the_whole(num_positions: int, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may have any length: 3 candidates a position, in slices of 1, 2 and 1,024 positions."""
    ids = [5 + number for number in range(num_positions)]
    table, names = LogprobTable.of([candidates(token, token + 1, token + 2) for token in ids]), TokenNames(tokenizer)
    found = []
    for most in (1, 6, 3 * 1024):
        for module in (logprobs, token_logprobs):
            monkeypatch.setattr(module, "SLICE_CANDIDATES", most)
        writer = CompletionLogprobs(tokenizer, [], skip_special_tokens=True, start=0)
        completion = read(completion_logprobs([writer.piece([4, *ids], table)]))
        found.append([completion, read(chat_logprobs(names, table, 3)), read(prompt_logprobs(names, table))])
    assert found[0] == found[1] == found[2]
    completion, chat, prompt = found[0]
    assert all(len(entries) == 1 + num_positions for entries in (*completion.values(), prompt))
    assert completion["top_logprobs"][0] is prompt[0] is None
    assert len(chat["content"]) == num_positions
    assert [list(position) for position in prompt[1:]] == [[str(token + i) for i in range(3)] for token in ids]


def test_no_piece_has_more_than_a_slice_of_work(tokenizer: Tokenizer) -> None:
    """Many slices of positions, of candidates of positions, and of candidates of one position."""
    table, names = LogprobTable.of([candidates(5)] * (1 << 14)), TokenNames(tokenizer)
    wide = LogprobTable.of([candidates(*range(5, 26))] * (1 << 10))
    whole = LogprobTable.of([candidates(*(5 + number % 300 for number in range(1 << 12)))] * 2)
    writer = CompletionLogprobs(tokenizer, [], skip_special_tokens=True, start=0)
    for pieces in (
        completion_logprobs([LogprobPiece(names, [5] * (1 << 14), table, lambda token: token)]),
        completion_logprobs([writer.piece([5] * (1 << 10), wide)]),
        completion_logprobs([writer.piece([5] * 2, whole)]),
        chat_logprobs(names, table, 0), chat_logprobs(names, wide, 20), chat_logprobs(names, whole, 1 << 12),
        prompt_logprobs(names, table), prompt_logprobs(names, wide), prompt_logprobs(names, whole),
    ):  # fmt: skip
        assert isinstance(pieces, JsonStream)
        assert max(map(len, pieces.pieces)) < 128 * token_logprobs.SLICE_CANDIDATES


def test_nothing_is_known_of_a_first_token(tokenizer: Tokenizer) -> None:
    written = written_by(CompletionLogprobs(tokenizer, [], skip_special_tokens=True, start=0), [5], [])
    assert (written["token_logprobs"], written["top_logprobs"]) == ([None], [None])
    assert written["tokens"] == [TokenNames(tokenizer).key(5)]


def test_chosen_token_keeps_its_logprob_among_namesakes(byte_tokenizer: Tokenizer) -> None:
    names = TokenNames(byte_tokenizer)
    by_name: dict[str, list[int]] = {}
    for token in range(byte_tokenizer.vocab_size):
        by_name.setdefault(names.key(token), []).append(token)
    for namesakes in (same for same in by_name.values() if len(same) > 1):
        other, chosen = namesakes[:2]
        writer = CompletionLogprobs(byte_tokenizer, [], skip_special_tokens=True, start=0)
        written = written_by(writer, [chosen], [([chosen, other], [-2.0, -1.0], [2, 1])])
        assert written["top_logprobs"] == [{names.key(chosen): -2.0}]


def test_chat_shows_the_likeliest_and_always_the_chosen(byte_tokenizer: Tokenizer) -> None:
    names = TokenNames(byte_tokenizer)
    table = LogprobTable.of([([12, 10, 11], [-3.0, -1.0, -2.0], [3, 1, 2])])  # the token that was drawn stands first
    for num_top, shown in ((0, []), (1, [10]), (2, [10, 11]), (None, [12, 10, 11])):
        (entry,) = read(chat_logprobs(names, table, num_top))["content"]
        assert (entry["token"], entry["logprob"], entry["bytes"]) == (names.text(12), -3.0, names.raw(12))
        assert [top["token"] for top in entry["top_logprobs"]] == [names.text(token) for token in shown]
