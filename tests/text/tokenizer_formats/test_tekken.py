"""tekken.json against a plain byte-pair encoder: lowest rank first, whole words at once, special tokens in front."""

import base64
import json
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ModelError
from quire.engine.formats import load_tokenizer
from quire.text.text_settings import TEKKEN_FILE
from quire.text.tokenizer_formats.folder_tokenizer import MAX_TOKEN_BYTES

NUM_SPECIAL = 30
PATTERN = r" ?\w+| ?[^\s\w]+|\s+"
CORPUS = "the cat and the hat, then a naïve 日本語 text; " * 3 + "aaaa aaa aa banana bandana\n\n\tthe 😀 end "
SPECIAL = [{"rank": rank, "token_str": text} for rank, text in enumerate(("<unk>", "<s>", "</s>", "[X]"))]


def trained(num_merges: int) -> list[bytes]:
    """Return the tokens of a small vocabulary: all bytes, then the most frequent pairs of the corpus."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = [[bytes([byte]) for byte in word.encode()] for word in re.findall(PATTERN, CORPUS)]
    while len(tokens) < 256 + num_merges:
        pairs = Counter(left + right for word in words for left, right in pairwise(word))
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        tokens.append(best)
        words = [merged_once(word, best) for word in words]
    return tokens


def merged_once(word: list[bytes], token: bytes) -> list[bytes]:
    parts: list[bytes] = []
    for part in word:
        if parts and parts[-1] + part == token:
            parts[-1] = token
        else:
            parts.append(part)
    return parts


def encoded(text: str, tokens: list[bytes]) -> list[int]:
    """Return the ids of a text by the format's rule, one merge at a time."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    ids: list[int] = []
    for word in re.findall(PATTERN, text):
        parts = [word.encode()] if word.encode() in ranks else [bytes([byte]) for byte in word.encode()]
        while True:
            found = [(ranks[left + right], at) for at, (left, right) in enumerate(pairwise(parts))
                     if left + right in ranks]  # fmt: skip
            if not found:
                break
            _, at = min(found)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [NUM_SPECIAL + ranks[part] for part in parts]
    return ids


def write(folder: Path, tokens: list[bytes], special: object = SPECIAL, **config: Any) -> Path:  # noqa: ANN401 (JSON)
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
             for rank, token in enumerate(tokens)]  # fmt: skip
    sizes = {"default_vocab_size": NUM_SPECIAL + len(tokens), "default_num_special_tokens": NUM_SPECIAL}
    given = {"config": {"pattern": PATTERN} | sizes | config, "vocab": vocab}
    if special is not None:
        given["special_tokens"] = special
    folder.mkdir(exist_ok=True)
    (folder / TEKKEN_FILE).write_text(json.dumps(given))
    return folder


@pytest.fixture(scope="module")
def tokens() -> list[bytes]:
    return trained(40)


def test_ids_are_those_of_the_rule(tokens: list[bytes], tmp_path: Path) -> None:
    tokenizer, rng = load_tokenizer(write(tmp_path, tokens)), random.Random(3)
    words = [*re.findall(PATTERN, CORPUS), " ban", "é", "\x00", "本", " x,"]
    texts = [CORPUS, "", *("".join(rng.choices(words, k=40)) for _ in range(200))]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == [1, *encoded(text, tokens)]
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]


def test_special_tokens_have_the_first_ids(tokens: list[bytes], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "listed", tokens))
    assert tokenizer.encode("[X]a</s><SPECIAL_29>") == [1, 3, NUM_SPECIAL + ord("a"), 2, 29]
    older = load_tokenizer(write(tmp_path / "older", tokens, special=None))
    assert older.encode("[INST]a[/INST]") == [1, 3, NUM_SPECIAL + ord("a"), 4]


def test_only_the_default_size_of_the_vocabulary_counts(tokens: list[bytes], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, tokens, default_vocab_size=NUM_SPECIAL + 260))
    assert tokenizer.encode(CORPUS) == [1, *encoded(CORPUS, tokens[:260])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {}}, "default_num_special_tokens"),
        ({"vocab": [{"rank": 0, "token_bytes": "*"}] * 300}, "not a tekken file"),
        ({"vocab": [{"rank": 1, "token_bytes": "AA=="}] * 300}, "ranks 0 to"),
        ({"vocab": [{"rank": rank, "token_bytes": "AA=="} for rank in range(300)]}, "there twice"),
        ({"vocab": [{"rank": rank, "token_bytes": "AAAA" * MAX_TOKEN_BYTES} for rank in range(300)]}, "1 to 512 bytes"),
        ({"vocab": 5}, "not a tekken file"),
        ({"special_tokens": [{"rank": 99, "token_str": "x"}]}, "ranks below 30"),
        ({"special_tokens": [5]}, "not a tekken file"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_file_that_is_none_is_refused(
    tokens: list[bytes], tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = write(tmp_path, tokens) / TEKKEN_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        load_tokenizer(tmp_path)


def test_pattern_that_is_none_is_refused(tokens: list[bytes], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pattern cannot be used"):
        load_tokenizer(write(tmp_path, tokens, pattern="("))
