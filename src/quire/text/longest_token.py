"""Longest token of a vocabulary: a bound by which a prompt that is far too long is refused before it is tokenized.

Valid only if tokenizing drops no text but white space. Two kinds of tokenizer keep all of it: byte-level BPE with a
token for every byte, and SentencePiece's BPE or Unigram with byte fallback, with tokens that are characters or single
bytes of one. Nothing before them may shrink the text either: no normalizer that composes (T5's), no pre-tokenizer that
drops separators. Where white space may be dropped (normalizers that merge spaces, added tokens that absorb
them), the rest of the text counts.
"""

import json
import re
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from quire.text.token_bytes import has_every_byte

MOST_COMPOSED = 3  # bytes of a text that become one by NFC: three Korean letters of three bytes each, one syllable
_WIDE_SPACES = "\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
WHITE_SPACE = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0" + _WIDE_SPACES
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_RARE = "\U0010fffd"  # for private use: no piece of any vocabulary
_SPLITS_THAT_KEEP_ALL = {
    b"ByteLevel", b"Metaspace", b"Sequence", b"Split", b"Digits",
    b"Isolated", b"Contiguous", b"MergedWithPrevious", b"MergedWithNext",
}  # fmt: skip
_SPLITS_THAT_DROP_SPACES = {b"Whitespace", b"WhitespaceSplit"}
_ONLY_SPACES = re.compile(r"(?:\\[AsZz]|[ ^$|+*]|\{\d+,?\d*\})+")  # regular expressions that match nothing else


class LongestToken(NamedTuple):
    """The longest text of one token, in bytes (UTF-8) or in characters."""

    length: int
    in_bytes: bool
    drops_spaces: bool  # white space may be in no token

    def min_num_tokens(self, text: str) -> int:
        """Return a lower bound of the tokens of a text."""
        length = len(text.encode(errors="replace")) if self.in_bytes else len(text)
        if self.drops_spaces:  # counted one by one: a split of 8 MB would hold the interpreter lock for 0.4 s
            length -= sum(text.count(space) * (len(space.encode()) if self.in_bytes else 1) for space in WHITE_SPACE)
        return length // self.length


def longest_token(backend: Backend) -> LongestToken | None:
    """Return the bound of a tokenizer, or None if tokenizing may drop text, so that there is none."""
    split = b"" if backend.pre_tokenizer is None else backend.pre_tokenizer.__getstate__()
    splits = set(re.findall(rb'"(?:type|behavior)": ?"(\w+)"', split))
    added = backend.get_added_tokens_decoder().values()
    if not splits <= _SPLITS_THAT_KEEP_ALL | _SPLITS_THAT_DROP_SPACES:
        return None
    vocabulary, normalizer = backend.get_vocab(), backend.normalizer
    parts = [] if normalizer is None else _parts(json.loads(normalizer.__getstate__()))
    drops_spaces = (
        any(token.lstrip or token.rstrip for token in added)
        or not splits.isdisjoint(_SPLITS_THAT_DROP_SPACES)
        or any(map(_drops_spaces, parts))
    )
    composing = [part for part in parts if not (_keeps_length(part) or _drops_spaces(part))]
    if isinstance(backend.decoder, decoders.ByteLevel) and has_every_byte(vocabulary):
        keeps_all = all(part["type"] == "NFC" for part in composing) and len(composing) <= 1
        longest = max(len(token.encode()) for token in vocabulary)
        return LongestToken(longest * MOST_COMPOSED, in_bytes=True, drops_spaces=drops_spaces) if keeps_all else None
    pieces = [token.value for token in backend.model.tokenize(_RARE)]
    if pieces == [_BYTES[byte] for byte in _RARE.encode()] and vocabulary.keys() >= set(_BYTES) and not composing:
        spelled = [token.content if normalizer is None else normalizer.normalize_str(token.content) for token in added]
        return LongestToken(max(map(len, [*vocabulary, *spelled])), in_bytes=False, drops_spaces=drops_spaces)
    return None


def _parts(normalizer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the steps of a normalizer, given as in tokenizer.json."""
    if normalizer["type"] == "Sequence":
        return [part for each in normalizer["normalizers"] for part in _parts(each)]
    return [normalizer]


def _keeps_length(part: dict[str, Any]) -> bool:
    """Return whether a step never shortens a text, nor makes white space of anything else."""
    match part:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(new) >= len(old) and (old.isspace() or not any(map(str.isspace, new)))
    return bool(part["type"] == "Prepend")


def _drops_spaces(part: dict[str, Any]) -> bool:
    """Return whether a step shortens a text, by nothing but white space."""
    match part:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(new) < len(old) and old.isspace()
        case {"type": "Replace", "pattern": {"Regex": str(pattern)}}:
            return _ONLY_SPACES.fullmatch(pattern) is not None
    return bool(part["type"] == "Strip")
