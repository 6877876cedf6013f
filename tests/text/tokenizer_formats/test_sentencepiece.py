"""BPE of SentencePiece: texts are cut as by its own algorithm, of merges with equal scores the leftmost."""

import random
from itertools import pairwise
from pathlib import Path

import pytest

from quire.engine.formats import load_tokenizer
from quire.text.text_settings import SENTENCEPIECE_FILE
from quire.text.tokenizer_formats.sentencepiece import BPE, NORMAL, UNKNOWN, SentencePieceModel, make_sentencepiece
from support.text_tokenizers import DATA

LENGTHS = {  # pieces of blanks of one score
    "Mistral": (2, 4, 8, 16, 5, 6, 10, 14, 12, 3, 9, 13, 7, 11),
    "powers of two": (2, 4, 8, 16),
    "no short ones": (2, 5, 8, 3, 13),
    "no pair": (3, 4, 6),
    "multiples": (2, 4, 6, 10, 12, 20, 3, 13),
}
WORDS = ("▁a", "▁b", "ab", "▁ab", "ba", "--", "----", "▁--")
MISTRAL = {  # measured with sentencepiece 0.2.3: pieces of "a", blanks, "b"
    3: [2, 2, 2], 17: [2, 16, 2], 18: [2, 16, 1, 2], 20: [2, 16, 3, 2], 24: [2, 16, 7, 2], 33: [2, 16, 16, 2],
}  # fmt: skip


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """Return the pieces of a text: the pair with the highest score is merged first, of equal ones the leftmost."""
    pieces = list(text)
    while True:
        pairs = [(-scores[a + b], at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not pairs:
            return pieces
        _, at = min(pairs)
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]


@pytest.mark.parametrize("score", [-1e9, 0.0, -3.5], ids=["after words", "before words", "between words"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_runs_of_blanks_are_cut_from_the_left(lengths: tuple[int, ...], score: float) -> None:
    scores = {"▁" * count: score for count in lengths}
    scores |= {word: -float(rank) for rank, word in enumerate(WORDS, 1)} | dict.fromkeys("▁ab-", -100.0)
    kinds = [UNKNOWN, *[NORMAL] * len(scores)]
    model = SentencePieceModel(
        ["<unk>", *scores], [0.0, *scores.values()], kinds, algorithm=BPE, joins_spaces=False
    )
    tokenizer = make_sentencepiece(model, "a model", is_legacy=True)
    chance = random.Random(len(lengths))
    for _ in range(60):
        parts = (chance.choice((" " * chance.randint(1, 45), "-" * chance.randint(1, 9), *"ab")) for _ in range(6))
        text = "".join(parts)
        assert tokenizer.encode(text).tokens == merged("▁" + text.replace(" ", "▁"), scores)


def test_runs_of_blanks_of_mistral_are_those_of_sentencepiece(tmp_path: Path) -> None:
    source = DATA / "tokenizers/mistral_v1" / SENTENCEPIECE_FILE
    if not source.is_file():
        pytest.skip("../shared/data is not here")
    (tmp_path / SENTENCEPIECE_FILE).write_bytes(source.read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    for count, expected in MISTRAL.items():
        ids = tokenizer.encode("a" + " " * count + "b", add_special_tokens=False)
        assert [len(tokenizer.token_text(token)) for token in ids] == expected
