"""Longest token of a vocabulary: a bound by which a prompt that is far too long is refused before it is tokenized.

Valid only if tokenizing drops no text. Two kinds of tokenizer keep all of it: byte-level BPE with a token for every
byte, and SentencePiece's BPE or Unigram with byte fallback, with tokens that are characters or single bytes of one.
Nothing before them may shrink the text either: no normalizer that cuts or composes (T5's and XLM-R's merge spaces), no
pre-tokenizer that drops its separators, no added token that absorbs spaces.
"""

import json
import re
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers

from quire.text.token_bytes import has_every_byte

MOST_COMPOSED = 3  # bytes of a text that become one by NFC: three Korean letters of three bytes each, one syllable
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_RARE = "\U0010fffd"  # for private use: no piece of any vocabulary
_SPLITS_THAT_KEEP_ALL = {
    b"ByteLevel", b"Metaspace", b"Sequence", b"Split", b"Digits",
    b"Isolated", b"Contiguous", b"MergedWithPrevious", b"MergedWithNext",
}  # fmt: skip


class LongestToken(NamedTuple):
    """The longest text of one token, in bytes (UTF-8) or in characters."""

    length: int
    in_bytes: bool


def longest_token(backend: Backend) -> LongestToken | None:
    """Return the bound of a tokenizer, or None if tokenizing may drop text, so that there is none."""
    split = b"" if backend.pre_tokenizer is None else backend.pre_tokenizer.__getstate__()
    splits = set(re.findall(rb'"(?:type|behavior)": ?"(\w+)"', split))
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added) or not splits <= _SPLITS_THAT_KEEP_ALL:
        return None
    vocabulary, normalizer = backend.get_vocab(), backend.normalizer
    if isinstance(backend.decoder, decoders.ByteLevel) and has_every_byte(vocabulary):
        keeps_all = normalizer is None or isinstance(normalizer, normalizers.NFC)
        longest = max(len(token.encode()) for token in vocabulary)
        return LongestToken(longest * MOST_COMPOSED, in_bytes=True) if keeps_all else None
    pieces = [token.value for token in backend.model.tokenize(_RARE)]
    if pieces == [_BYTES[byte] for byte in _RARE.encode()] and vocabulary.keys() >= set(_BYTES):
        keeps_all = normalizer is None or _keeps_length(json.loads(normalizer.__getstate__()))
        spelled = [token.content if normalizer is None else normalizer.normalize_str(token.content) for token in added]
        return LongestToken(max(map(len, [*vocabulary, *spelled])), in_bytes=False) if keeps_all else None
    return None


def _keeps_length(normalizer: dict[str, Any]) -> bool:
    """Return whether a normalizer, given as in tokenizer.json, never shortens a text."""
    match normalizer:
        case {"type": "Sequence", "normalizers": parts}:
            return all(map(_keeps_length, parts))
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(new) >= len(old)
    return bool(normalizer["type"] == "Prepend")
