"""No text has fewer tokens than its length says, for every kind of tokenizer that there is a bound for."""

import unicodedata
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.text.longest_token import MOST_COMPOSED, longest_token
from quire.text.tokenizer import Tokenizer
from support import small_tokenizers
from support.text_tokenizers import REAL

KOREAN = unicodedata.normalize("NFD", "각힣" * 500)
MANY = small_tokenizers.CORPUS[3] * 50
TEXTS = ("", "stop " * 1000, " " * 4000, "日本語" * 300, "x" * 5000, KOREAN, MANY, "<s>" * 900)


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


BOUNDED = {
    "byte-level": small_tokenizers.byte_level(),
    "SentencePiece": small_tokenizers.byte_fallback(),
    "Metaspace": with_metaspace(small_tokenizers.byte_fallback()),
    "words": with_words(small_tokenizers.byte_fallback()),
    "added": with_normalized_token(small_tokenizers.byte_fallback()),
    "Unigram": small_tokenizers.metaspace(),
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


def test_no_character_is_composed_of_more_bytes_than_is_reckoned_with() -> None:
    ratios = []
    for char in map(chr, [*range(0xD800), *range(0xE000, 0x110000)]):
        composed = unicodedata.normalize("NFC", char)
        ratios.append(len(unicodedata.normalize("NFD", char).encode()) / len(composed.encode()))
    assert max(ratios) <= MOST_COMPOSED


def test_tokenizer_that_may_lose_some_of_a_text_has_no_bound() -> None:
    lossy = small_tokenizers.byte_level()
    lossy.normalizer = normalizers.Strip()
    greedy = small_tokenizers.byte_level()
    greedy.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    cutting = small_tokenizers.byte_level()
    cutting.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("x"), "removed"), pre_tokenizers.ByteLevel()]
    )
    shrinking = small_tokenizers.byte_fallback()
    shrinking.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace("  ", "▁")])
    composing = small_tokenizers.byte_fallback()
    composing.normalizer = normalizers.NFKC()
    matching = small_tokenizers.byte_fallback()
    matching.normalizer = normalizers.Replace(Regex("x+"), "x")
    byteless = Backend.from_str(small_tokenizers.byte_fallback().to_str().replace("<0x41>", "<unused>"))
    fallback = '"byte_fallback":true', '"byte_fallback":false'
    unknown = Backend.from_str(small_tokenizers.metaspace().to_str().replace(*fallback))
    cleaned = small_tokenizers.metaspace()
    cleaned.normalizer = normalizers.Replace(Regex(" {2,}"), "▁")
    others = small_tokenizers.word_level(), unknown, cleaned
    for backend in (lossy, greedy, cutting, shrinking, composing, matching, byteless, *others):
        assert longest_token(backend) is None
