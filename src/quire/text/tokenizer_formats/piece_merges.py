"""Merges of two kinds of BPE: byte-level, and SentencePiece's (Kudo and Richardson 2018), from pairs of pieces.

A vocabulary of 262,144 pieces has 1.2 million places where a piece can be cut. Both sides of all cuts are looked up at
once, by 64-bit hashes of their characters: 0.4 s, where a dictionary takes 1.5 s.

SentencePiece merges the pair with the highest score, of equal scores the leftmost in the text; the tokenizers library
has one rank for each pair instead. Their order gives the same pieces where scores of different pieces are equal in runs
of one character, like blanks in Llama and Mistral: there a merge leaves none to its left but those with the new piece,
so the longest result comes first, and of equal ones that with the shortest left side.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire.core.errors import ModelError
from quire.core.model_files import read_json_object, read_text
from quire.text.text_settings import MERGES_FILE, VOCAB_FILE

MAX_PIECES = 1 << 21     # a rank below it and two lengths make one number of 63 bits
_TABLE_BITS = 22
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)

Hashes = NDArray[np.uint64]


def piece_merges(
    texts: Sequence[str], scores: Sequence[float], is_result: Sequence[bool] | NDArray[np.bool_]
) -> list[tuple[str, str]]:
    """Return the pairs of pieces with texts that together are that of a piece that may be the result of a merge.

    The pair of the piece with the highest score comes first; among equal scores that of the longest piece, then that
    with the shortest first side. At most MAX_PIECES pieces; of equal texts the last piece counts.
    """
    assert len(texts) <= MAX_PIECES, f"{len(texts)} pieces"
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    prefixes = _Prefixes("".join(texts))
    stops = np.cumsum(lengths)
    starts = stops - lengths
    whole = prefixes.hashes(starts, stops)
    num_cuts = np.where(np.asarray(is_result, bool), np.maximum(lengths - 1, 0), 0)
    result = np.repeat(np.arange(len(texts)), num_cuts)                                # text of each cut
    cut = np.arange(len(result)) - (np.cumsum(num_cuts) - num_cuts - starts - 1)[result]
    first = _find(whole, prefixes.hashes(starts[result], cut))
    kept = np.flatnonzero(first >= 0)
    first, result, cut = first[kept], result[kept], cut[kept]
    second = _find(whole, prefixes.hashes(cut, stops[result]))
    kept = np.flatnonzero(second >= 0)
    first, second, result = first[kept], second[kept], result[kept]
    return merges_in_order(texts, lengths, score_ranks(scores), result, first, second)


def score_ranks(scores: Sequence[float]) -> NDArray[np.int64]:
    """Return the rank of each score, 0 for the highest; equal scores have the same."""
    return np.unique(-np.asarray(scores, np.float64), return_inverse=True)[1]


def merges_in_order(
    texts: Sequence[str], lengths: NDArray[np.int64], ranks: NDArray[np.int64], result: NDArray[np.int64],
    first: NDArray[np.int64], second: NDArray[np.int64],
) -> list[tuple[str, str]]:  # fmt: skip
    """Return pairs of pieces, given as places in `texts` as their results are, in the order of `piece_merges`."""
    longest = int(lengths.max(initial=0))
    keys = (ranks[result] * (longest + 1) + longest - lengths[result]) * (longest + 1) + lengths[first]
    order = np.argsort(keys, kind="stable")  # pairs with the same key stay in the order of their results
    text_of = texts.__getitem__
    return list(zip(map(text_of, first[order].tolist()), map(text_of, second[order].tolist()), strict=True))


class _Prefixes:
    """Hashes of all beginnings of a text: polynomials in _BASE modulo 2^64, from which those of its parts follow."""

    def __init__(self, text: str) -> None:
        characters = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint64) + np.uint64(1)
        powers = _powers(_BASE, len(characters))
        self._sums = np.zeros(len(characters) + 1, np.uint64)
        np.cumsum(characters * powers, out=self._sums[1:])
        self._inverses = _powers(pow(_BASE, -1, 1 << 64), len(characters) + 1)

    def hashes(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Hashes:
        """Return the hashes of the parts [start, stop) of the text."""
        return (self._sums[stops] - self._sums[starts]) * self._inverses[starts]


def _powers(base: int, count: int) -> Hashes:
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _find(hashes: Hashes, wanted: Hashes) -> NDArray[np.int64]:
    """Return the place in `hashes` of each hash that is wanted, the last one of equal ones; -1: it has none.

    Every round has a table, in which those are that share a slot with no later one; the others wait for the next.
    """
    found = np.full(len(wanted), -1, np.int64)
    left = np.arange(len(hashes))
    while len(left):
        hashes, wanted = _mixed(hashes), _mixed(wanted)
        table, shift = np.full(1 << _TABLE_BITS, -1, np.int32), np.uint64(64 - _TABLE_BITS)
        slots = hashes[left] >> shift
        table[slots] = left
        place = table[wanted >> shift]
        hit = np.flatnonzero((place >= 0) & (hashes[place] == wanted))
        found[hit] = place[hit]
        left = left[hashes[table[slots]] != hashes[left]]
    return found


def _mixed(hashes: Hashes) -> Hashes:
    """Return other numbers, of each hash its own."""
    mixed = (hashes ^ (hashes >> _HALF)) * _MULTIPLIER
    return mixed ^ (mixed >> _HALF)


QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_byte_level_bpe(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of the two files, without special tokens; `config` is tokenizer_config.json's object.

    Raises ModelError for a file that is not what its name says.
    """
    model = models.BPE(_vocabulary(folder), _merges(folder))
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    adds_space = config.get("add_prefix_space") is True
    if str(config.get("tokenizer_class")).startswith("Qwen2Tokenizer"):
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
        spell = pre_tokenizers.ByteLevel(add_prefix_space=adds_space, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spell])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    return tokenizer


def _vocabulary(folder: Path) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for token, token_id in read_json_object(folder, VOCAB_FILE).items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**32:
            raise ModelError(f"{folder / VOCAB_FILE}: {token!r:.80} must have a token id, got {token_id!r:.80}")
        vocabulary[token] = token_id
    return vocabulary


def _merges(folder: Path) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(read_text(folder, MERGES_FILE).split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        first, _, second = line.rstrip("\r").partition(" ")
        if not first or not second or " " in second:
            raise ModelError(f"{folder / MERGES_FILE}, line {number}: expected two tokens, got {line!r:.80}")
        merges.append((first, second))
    return merges
