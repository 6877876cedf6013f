"""Merges of pieces, against their meaning: every cut of every piece, looked up in a dictionary."""

import random

import pytest

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
