"""Token by token, the text is what decoding everything at once would show, and no piece holds half a character."""

import random
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.text.tokenizer import ByteDetokenizer, Tokenizer, WindowDetokenizer, incremental_detokenizer
from support.small_tokenizers import byte_fallback, byte_level, metaspace, save, word_level
from support.text_tokenizers import REAL, SMALL

TEXTS = [
    "Hello world, 12345 times",
    "naïve café \u65e5\u672c\u8a9e \u4f60\u597d\uff0c\u4e16\u754c",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f1eb\U0001f1f7 e\u0301 \u0e01\u0e33 \u0928\u093f",
    "  two  spaces\n\n\tdef f(x):\n        return x**2",
    "a \ufffd that is really there \ufffd",
]
BYTE_LEVEL = ("byte_level", "gpt2", "gpt_neox_20b", "dolma2", "qwen2")
BYTE_FALLBACK = ("byte_fallback", "mistral_v1", "stories260K")
NUM_RANDOM_RUNS = 150


def pieces_of(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip_special_tokens: bool = True
) -> list[str]:
    """Detokenize one token at a time; the last piece is what `finish` gave."""
    detokenizer = incremental_detokenizer(tokenizer, prompt, skip_special_tokens)
    return [*(detokenizer.append([token]) for token in output), detokenizer.finish()]


def added_text(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip: bool = True) -> str:
    """Return what the output adds to the prompt's text when everything is decoded at once."""
    before, both = tokenizer.decode(prompt, skip), tokenizer.decode([*prompt, *output], skip)
    return after(before, both)


def after(before: str, both: str) -> str:
    """Return `both` from where it departs from `before`: at its end, or where a character of it was unfinished."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, both, strict=False))
    return both[sum(1 for _ in same) :]


def byte_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that are one byte above ASCII: the stuff that broken text is made of."""
    table = tokenizer.token_bytes(skip_special_tokens=True)
    return [token for token in range(tokenizer.vocab_size) if table[token] and table[token][0] > 0x7F]


def random_texts(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Return the tokens of whole texts."""
    return tokenizer.encode(" ".join(rng.choices(TEXTS[:4], k=rng.randint(1, 3))), add_special_tokens=False)


def random_tokens(tokenizer: Tokenizer, high_bytes: list[int], rng: random.Random) -> list[int]:
    """Return pieces of texts, cut anywhere, among random tokens and runs of random bytes."""
    tokens = []
    for _ in range(rng.randint(1, 5)):
        kind = rng.random()
        if kind < 0.5:
            ids = tokenizer.encode(rng.choice(TEXTS), add_special_tokens=False)
            start = rng.randrange(len(ids))
            tokens += ids[start : start + rng.randint(1, 12)]
        elif kind < 0.75:
            tokens += rng.choices(range(tokenizer.vocab_size), k=rng.randint(1, 4))
        else:
            tokens += rng.choices(high_bytes, k=rng.randint(1, 6))
    return tokens


def load(name: str, folder: Path) -> Tokenizer:
    made = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace, "word_level": word_level}
    return Tokenizer.from_folder(save(made[name](), folder))


# --- any tokenizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [*SMALL, *REAL], indirect=True)
def test_real_text_comes_out_whole_and_never_half_a_character(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for cut in range(len(ids)):
            before, both = tokenizer.decode(ids[:cut]), tokenizer.decode(ids)
            if not both.startswith(before):
                continue  # inside a character: see below
            pieces = pieces_of(tokenizer, ids[:cut], ids[cut:])
            assert "".join(pieces) == both.removeprefix(before)
            assert pieces[-1] == "" or "\ufffd" in text, "the window waits for more after a U+FFFD"


@pytest.mark.parametrize("tokenizer", [*SMALL, *REAL], indirect=True)
def test_several_tokens_at_once_give_the_same_text(tokenizer: Tokenizer) -> None:
    prompt, output = tokenizer.encode("Once"), tokenizer.encode("\n".join(TEXTS), add_special_tokens=False)
    one_by_one = "".join(pieces_of(tokenizer, prompt, output))
    at_once = incremental_detokenizer(tokenizer, prompt, skip_special_tokens=True)
    assert at_once.append(output) + at_once.finish() == one_by_one


@pytest.mark.parametrize("tokenizer", [*SMALL, *REAL], indirect=True)
@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_or_skipped(tokenizer: Tokenizer, skip: bool) -> None:
    prompt, words = tokenizer.encode("the"), tokenizer.encode("a stop", add_special_tokens=False)
    special = min(tokenizer.special_token_ids)
    for output in ([special, *words], [*words, special], [special, special], [words[0], special, *words[1:]]):
        text = "".join(pieces_of(tokenizer, prompt, output, skip))
        assert text == added_text(tokenizer, prompt, output, skip)
        assert (tokenizer.token_text(special) in text) == (not skip)


# --- byte tables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", BYTE_LEVEL, indirect=True)
def test_random_tokens_equal_decoding_at_once_at_every_step(tokenizer: Tokenizer) -> None:
    rng, high_bytes = random.Random(0), byte_tokens(tokenizer)
    for _ in range(NUM_RANDOM_RUNS):
        prompt, output = (random_tokens(tokenizer, high_bytes, rng) for _ in range(2))
        skip = rng.random() < 0.5
        pieces = pieces_of(tokenizer, prompt, output, skip)
        for done in range(1, len(output) + 1):  # nothing is held back but the bytes of an unfinished character
            text, expected = "".join(pieces[:done]), added_text(tokenizer, prompt, output[:done], skip)
            assert expected in (text, text + "\ufffd")
        assert "".join(pieces) == added_text(tokenizer, prompt, output, skip)


@pytest.mark.parametrize("tokenizer", BYTE_FALLBACK, indirect=True)
def test_random_sentencepiece_tokens_equal_decoding_at_once(tokenizer: Tokenizer) -> None:
    rng, high_bytes = random.Random(0), byte_tokens(tokenizer)
    for _ in range(NUM_RANDOM_RUNS):
        prompt, output = (random_tokens(tokenizer, high_bytes, rng) for _ in range(2))
        assert "".join(pieces_of(tokenizer, prompt, output)) == sentencepiece_text(tokenizer, prompt, output)
        prompt, output = (random_texts(tokenizer, rng) for _ in range(2))
        assert "".join(pieces_of(tokenizer, prompt, output)) == added_text(tokenizer, prompt, output)


def sentencepiece_text(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    """Return what the output adds when each run of byte tokens is decoded by itself, as leniently as Python can."""

    def whole(tokens: list[int]) -> str:
        text, run = "", b""
        for token in [*tokens, None]:
            shown = None if token is None else tokenizer.token_text(token)
            byte = None if token is None else tokenizer.token_bytes(skip_special_tokens=True)[token]
            if token in tokenizer.special_token_ids:
                continue
            if byte is not None and shown != byte.decode(errors="replace").replace("\u2581", " "):
                raise AssertionError(f"token {token} reads {shown!r} but has the bytes {byte!r}")
            is_part = byte is not None and len(byte) == 1 and byte[0] > 0x7F
            run += byte if is_part else b""
            if not is_part:
                text, run = text + run.decode(errors="replace") + (shown or ""), b""
        return text.removeprefix(" ")

    before, both = whole(prompt), whole(prompt + output)
    return after(before, both)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_invalid_bytes_without_end_are_not_held_back(tmp_path: Path, name: str) -> None:
    tokenizer = load(name, tmp_path)
    table = tokenizer.token_bytes(skip_special_tokens=True)
    by_byte = {table[token]: token for token in byte_tokens(tokenizer)}
    continuation, lead = by_byte[b"\x80"], by_byte[b"\xf0"]
    assert pieces_of(tokenizer, [], [continuation] * 50) == ["\ufffd"] * 50 + [""]
    assert pieces_of(tokenizer, [], [lead] * 50) == ["", *["\ufffd"] * 50]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_character_begun_in_the_prompt_belongs_to_the_output(tmp_path: Path, name: str) -> None:
    tokenizer = load(name, tmp_path)
    ids = tokenizer.encode("the \U0001f98a", add_special_tokens=False)
    word = tokenizer.encode("stop", add_special_tokens=False)
    *most, last = ids
    assert pieces_of(tokenizer, most, [last]) == ["\U0001f98a", ""]
    assert "\ufffd" not in "".join(pieces_of(tokenizer, most, word)), "it stands in the prompt's text already"
    assert pieces_of(tokenizer, most, []) == [""]


def test_first_space_is_dropped_only_where_a_text_begins(tmp_path: Path) -> None:
    tokenizer = load("byte_fallback", tmp_path)
    bos, *the = tokenizer.encode("the")
    assert "".join(pieces_of(tokenizer, [], the)) == "the"
    assert "".join(pieces_of(tokenizer, [bos], the)) == "the"
    assert "".join(pieces_of(tokenizer, [bos], the, skip_special_tokens=False)) == " the"
    assert "".join(pieces_of(tokenizer, [bos, *the, bos], the)) == " the"
    assert "".join(pieces_of(tokenizer, [bos], [bos, *the, *the])) == "the the"


def test_ids_out_of_the_vocabulary_are_no_text(tmp_path: Path) -> None:
    for name in SMALL:
        tokenizer = load(name, tmp_path / name)
        words = tokenizer.encode("the stop", add_special_tokens=False)
        with_unknown = [10**6, *words, tokenizer.vocab_size]
        assert "".join(pieces_of(tokenizer, words, with_unknown)) == "".join(pieces_of(tokenizer, words, words))


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=40), st.integers(0, 40))
@example(b"\xed\xa0", 2)
@example(b"\xed\xa0\x80", 2)
def test_any_bytes_decode_as_in_one_go(stream: bytes, cut: int) -> None:
    table = {byte: bytes([byte]) for byte in range(256)}
    prompt, output = list(stream[:cut]), list(stream[cut:])
    detokenizer = ByteDetokenizer(table, prompt, drops_first_space=False)
    text = "".join([*(detokenizer.append([token]) for token in output), detokenizer.finish()])
    before, both = stream[:cut].decode(errors="replace"), stream.decode(errors="replace")
    assert text == after(before, both)


# --- the window -------------------------------------------------------------------------------------------------------


class RecordingTokenizer(Tokenizer):
    """Remembers how many tokens it was asked to decode at a time."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.most_decoded = max(getattr(self, "most_decoded", 0), len(token_ids))
        return super().decode(token_ids, skip_special_tokens)


@pytest.mark.parametrize("tokenizer_folder", ["metaspace", "byte_level"], indirect=True)
def test_window_is_bounded_whatever_comes(tokenizer_folder: Path) -> None:
    tokenizer, rng = RecordingTokenizer.from_folder(tokenizer_folder), random.Random(0)
    broken = tokenizer.encode("\U0001f98a", add_special_tokens=False)[0]
    empty = min(tokenizer.special_token_ids)
    detokenizer = WindowDetokenizer(tokenizer, [empty] * 100, tokenizer.special_token_ids)
    for token in [broken] * 100 + [empty] * 100 + [tokenizer.vocab_size] * 100 + rng.choices(range(260), k=300):
        detokenizer.append([token])
    assert tokenizer.most_decoded <= 16


@pytest.mark.parametrize("tokenizer", ["byte_level", "byte_fallback"], indirect=True)
def test_window_agrees_with_the_byte_table_on_real_text(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        prompt, output = tokenizer.encode("the fox"), tokenizer.encode(text, add_special_tokens=False)
        window = WindowDetokenizer(tokenizer, prompt, tokenizer.special_token_ids)
        by_window = [*(window.append([token]) for token in output), window.finish()]
        assert "".join(by_window) == "".join(pieces_of(tokenizer, prompt, output))


def test_window_gives_up_on_a_character_that_never_ends(tmp_path: Path) -> None:
    tokenizer = load("metaspace", tmp_path)
    half = tokenizer.encode("\U0001f98a", add_special_tokens=False)[-4]
    pieces = pieces_of(tokenizer, [], [half] * 40)
    assert any(pieces[:10])
    assert len("".join(pieces)) == 40
