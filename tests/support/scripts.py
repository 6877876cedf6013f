"""Texts of ten scripts, made of the letters, marks and digits that Unicode has of them: the same each time."""

import random
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache

SCRIPTS = ("LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "DEVANAGARI", "THAI", "HANGUL", "HIRAGANA", "CJK UNIFIED")
_SPACES = (" ", " ", " ", " ", " ", "  ", "   ", "\n", "\n\n", " \n", "\t", "\r\n", "\u00a0", "\u3000", " " * 18, "")
_PUNCTUATION = (*".,!?;:-'\"()[]/_#$%…。،", "...", "--")
_BETWEEN = (
    "'s", "'ll", "'RE", "n't", "3.14", "2026", "1234567", "²", "½", "Ⅻ", "👩‍👧", "🇫🇷", "😀", "\u200d", "\ufeff",
    "e\u0301", "ﬁ", "{}();", "==", "<|im_end|>", "<eos>", "<|im_start|>user\n", "<start_of_turn>", "<pad>", "</s>",
    "[INST]", "<0x0A>", "<unused7>",
)  # fmt: skip


@cache
def letters(script: str) -> str:
    """Return the assigned letters, marks and digits whose names begin with a script's, up to 3,000 of them."""
    points = (chr(n) for n in range(sys.maxunicode) if unicodedata.name(chr(n), "").startswith(script))
    return "".join(each for each in points if unicodedata.category(each)[0] in "LMN")[:3000]


def texts(script: str, count: int, seed: int = 0) -> Iterator[str]:
    """Yield texts of 1 to 40 words of a script, with other scripts, numbers, marks and blanks among them."""
    drawn = random.Random(f"{script} {seed}")
    for _ in range(count):
        yield "".join(_piece(drawn, script) for _ in range(drawn.randint(1, 40)))


def _piece(drawn: random.Random, script: str) -> str:
    """Return a word, in a tenth of the cases of another script, and what stands after it."""
    own = script if drawn.random() < 0.9 else drawn.choice(SCRIPTS)
    # Half of the words are of the first letters of a script, which are its most common ones.
    pool = letters(own)[: drawn.choice((60, 3000))]
    word = "".join(drawn.choice(pool) for _ in range(drawn.randint(1, 9)))
    after = (
        drawn.choice(_PUNCTUATION) if drawn.random() < 0.2 else drawn.choice(_BETWEEN) if drawn.random() < 0.1 else ""
    )
    return drawn.choice((word, word, word.title(), word.upper())) + after + drawn.choice(_SPACES)
