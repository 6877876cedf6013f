"""No text has fewer tokens than its length says, for every kind of tokenizer that there is a bound for."""

import unicodedata
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.text.token_bytes import MOST_COMPOSED, WHITE_SPACE, longest_token
from quire.text.tokenizer import Tokenizer
from support import small_tokenizers
from support.text_tokenizers import REAL

KOREAN = unicodedata.normalize("NFD", "각힣" * 500)
MANY = small_tokenizers.CORPUS[3] * 50
SPACES = " " * 4000, " <mask> " * 500, " \u3000\n x" * 900
TEXTS = ("", "stop " * 1000, "日本語" * 300, "x" * 5000, KOREAN, MANY, "<s>" * 900, *SPACES)


def with_metaspace(backend: Backend) -> Backend:
    """Return a tokenizer like those of later Llamas: the spaces are replaced where words are split."""
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


def with_words(backend: Backend) -> Backend:
    """Return a tokenizer like Gemma's."""
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return backend


def with_normalized_token(backend: Backend) -> Backend:
    """Return one with a longest token that is searched for behind the normalizer, which makes it longer."""
    backend.add_tokens([AddedToken("x" * 50, normalized=True)])
    return backend


def dropping_spaces(backend: Backend, *parts: normalizers.Normalizer) -> Backend:
    """Return a tokenizer with a normalizer, and with an added token that absorbs the spaces beside it."""
    backend.normalizer = normalizers.Sequence(list(parts))
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    return backend


EDGES, RUNS = normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")
BOUNDED = {
    "byte-level": small_tokenizers.byte_level(),
    "SentencePiece": small_tokenizers.byte_fallback(),
    "Metaspace": with_metaspace(small_tokenizers.byte_fallback()),
    "words": with_words(small_tokenizers.byte_fallback()),
    "added": with_normalized_token(small_tokenizers.byte_fallback()),
    "Unigram": small_tokenizers.metaspace(),
    "spaces merged": dropping_spaces(
        small_tokenizers.byte_fallback(), EDGES, RUNS, normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    ),
    "spaces merged, Unigram": dropping_spaces(small_tokenizers.metaspace(), normalizers.Replace(Regex(r"\s+"), "▁")),
    "spaces stripped": dropping_spaces(small_tokenizers.byte_level(), normalizers.Strip(), normalizers.NFC()),
}


@pytest.mark.parametrize("kind", BOUNDED)
def test_least_tokens_is_a_bound_and_worth_something(tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer.from_folder(small_tokenizers.save(BOUNDED[kind], tmp_path))
    for text in TEXTS:
        assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.min_num_tokens("x" * 5000) > 50


def test_bound_holds_behind_a_normalizer_that_composes(tmp_path: Path) -> None:
    backend = small_tokenizers.byte_level()
    backend.normalizer = normalizers.NFC()
    tokenizer = Tokenizer.from_folder(small_tokenizers.save(backend, tmp_path))
    assert all(tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text)) for text in TEXTS)
    assert tokenizer.min_num_tokens("x" * 5000) > 50


@pytest.mark.parametrize("tokenizer_folder", REAL, indirect=True)
def test_bound_holds_for_real_tokenizers(tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    for text in TEXTS:
        assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_white_space_is_that_of_unicode() -> None:
    assert set(WHITE_SPACE) == {char for char in map(chr, range(0x110000)) if char.isspace()}


def test_no_character_is_composed_of_more_bytes_than_is_reckoned_with() -> None:
    ratios = []
    for char in map(chr, [*range(0xD800), *range(0xE000, 0x110000)]):
        composed = unicodedata.normalize("NFC", char)
        ratios.append(len(unicodedata.normalize("NFD", char).encode()) / len(composed.encode()))
    assert max(ratios) <= MOST_COMPOSED


def test_tokenizer_that_may_lose_some_of_a_text_has_no_bound() -> None:
    cutting = small_tokenizers.byte_level()
    cutting.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("x"), "removed"), pre_tokenizers.ByteLevel()]
    )
    shrinking = small_tokenizers.byte_fallback()
    shrinking.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace("▁▁", "▁")])
    spacing = small_tokenizers.byte_fallback()
    spacing.normalizer = normalizers.Sequence([normalizers.Replace("x", " "), normalizers.Replace(Regex(" +"), " ")])
    composing = small_tokenizers.byte_fallback()
    composing.normalizer = normalizers.NFKC()
    matching = small_tokenizers.byte_fallback()
    matching.normalizer = normalizers.Replace(Regex("x+"), "x")
    byteless = Backend.from_str(small_tokenizers.byte_fallback().to_str().replace("<0x41>", "<unused>"))
    fallback = '"byte_fallback":true', '"byte_fallback":false'
    unknown = Backend.from_str(small_tokenizers.metaspace().to_str().replace(*fallback))
    others = small_tokenizers.word_level(), unknown
    for backend in (cutting, shrinking, spacing, composing, matching, byteless, *others):
        assert longest_token(backend) is None
