"""Merges of pieces, against their meaning: every cut of every piece, looked up in a dictionary."""

import random

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from quire.extension.isas import usable_isas
from quire.formats.gguf.gguf_tokenizer import needed_merges
from quire.text.tokenizer_formats import piece_merges as module
from quire.text.tokenizer_formats.piece_merges import piece_merges


def reference(texts: list[str], scores: list[float], is_result: list[bool]) -> list[tuple[str, str]]:
    ids = {text: index for index, text in enumerate(texts)}
    ranked = []
    for index, (text, score, result) in enumerate(zip(texts, scores, is_result, strict=True)):
        cuts = ((text[:cut], text[cut:]) for cut in range(1, len(text)) if result)
        ranked += [(-score, -len(text), len(a), index, a, b) for a, b in cuts if a in ids and b in ids]
    return [(a, b) for *_, a, b in sorted(ranked)]


@pytest.mark.parametrize("alphabet", ["ab", "▁aé", "\0\U0010ffffx"], ids=["ascii", "words", "ends of Unicode"])
@pytest.mark.parametrize("num_scores", [1, 7, 1000])
@pytest.mark.parametrize("table_bits", [3, 22])
def test_merges_are_all_pairs_of_pieces_that_are_a_piece(
    alphabet: str, num_scores: int, table_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TABLE_BITS", table_bits)  # 3: many rounds of few slots
    draw = random.Random(num_scores)
    texts = ["".join(draw.choices(alphabet, k=draw.randrange(9))) for _ in range(400)]  # some twice, some empty
    scores = [-float(draw.randrange(num_scores)) for _ in texts]
    is_result = [draw.random() < 0.9 for _ in texts]
    expected = reference(texts, scores, is_result)
    assert len(expected) > 50
    assert piece_merges(texts, scores, is_result) == expected


@pytest.mark.parametrize("texts", [[], ["a"], ["", ""], ["a", "b"]], ids=["none", "one", "empty", "no pair"])
def test_vocabularies_without_a_merge(texts: list[str]) -> None:
    assert piece_merges(texts, [0.0] * len(texts), [True] * len(texts)) == []


ATOMS = ["<0x61>", "<0xC3>", "<0xA9>"]  # no results, and no characters: what a text also begins as
EXTRA = {"none": [], "a byte in a piece": ["b<0xC3>", "<0xC3>b", "b"], "a text twice": ["ab", "ab"]}


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.parametrize("extra", EXTRA.values(), ids=EXTRA.keys())
@pytest.mark.parametrize("num_scores", [1, 3, 1000])
def test_merges_that_are_needed_give_every_text_the_same_pieces(num_scores: int, extra: list[str]) -> None:
    draw, num_fewer = random.Random(num_scores), 0
    for _ in range(30):
        drawn = {"".join(draw.choices("aé▁", k=draw.randrange(1, 7))) for _ in range(60)} | {"", "a"}
        texts = ["<unk>", *ATOMS, *sorted(drawn - {"é"}), *extra]
        scores = [-float(draw.randrange(num_scores)) for _ in texts]
        is_result = np.array([text not in ["<unk>", *ATOMS] and draw.random() < 0.95 for text in texts])
        every, needed = (find(texts, scores, is_result) for find in (piece_merges, needed_merges))
        assert [pair for pair in every if pair in set(needed)] == needed
        num_fewer += len(every) - len(needed)
        vocabulary = {text: index for index, text in enumerate(texts)}
        settings = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
        one, other = (Tokenizer(models.BPE(vocabulary, merges, **settings)) for merges in (every, needed))
        for _ in range(100):
            text = "".join(draw.choices("aaé▁▁b\n", k=draw.randrange(30)))
            assert one.encode(text).ids == other.encode(text).ids, (texts, scores, text)
    assert (num_fewer > 100) == (not extra)
