"""Token bytes and bounds of a tokenizer: bytes by token, the longest token, and exact normalization.

Two kinds of decoder do, and nearly every decoder-only model has one of them: byte-level BPE (Radford et al. 2019), with
tokens that spell bytes in a private alphabet, and SentencePiece's BPE with byte fallback (Kudo and Richardson 2018),
with tokens that are text or one byte written `<0xHH>`. A text is then the UTF-8 of the joined bytes, and a detokenizer
needs one look-up per token.

Valid only if tokenizing drops no text but white space. Two kinds of tokenizer keep all of it: byte-level BPE with a
token for every byte, and SentencePiece's BPE or Unigram with byte fallback, with tokens that are characters or single
bytes of one. Nothing before them may shrink the text either: no normalizer that composes (T5's), no pre-tokenizer that
drops separators. Where white space may be dropped (normalizers that merge spaces, added tokens that absorb
them), the rest of the text counts.

A grammar forces bytes, and its tokens must spell these bytes. NFC, lower case, or spaces cut from the ends would spell
others. What only writes a text in the alphabet of the vocabulary stays: `▁` for spaces, and one in front.
"""

import json
import re
from collections.abc import Callable, Collection
from itertools import chain
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet.

    Printable bytes of Latin-1 are their own characters; the rest map to U+0100 and up, in ascending order.
    """
    printable = set(chain(range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100)))
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_level_alphabet()


_CHAR_OF_BYTE = {byte: char for char, byte in _BYTE_OF_CHAR.items()}


def byte_level_text(token: bytes) -> str:
    """Return bytes in GPT-2's alphabet."""
    return "".join(map(_CHAR_OF_BYTE.__getitem__, token))


def has_every_byte(tokens: Collection[str]) -> bool:
    """Return whether there is a token for each single byte, so that tokenizing drops no text."""
    return all(char in tokens for char in _BYTE_OF_CHAR)


class DecodingRule(NamedTuple):
    """Conversion of tokens into bytes. The decoder may drop one space from the beginning of a text."""

    to_bytes: Callable[[str], bytes]
    drops_first_space: bool


class TokenBytesCache(dict[int, bytes]):
    """Bytes of each token id, filled on first use. Empty for ids that are not in the vocabulary, and for `hidden`."""

    def __init__(self, backend: Backend, to_bytes: Callable[[str], bytes], hidden: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._to_bytes = to_bytes
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._hidden else self._backend.id_to_token(token_id)
        piece = self[token_id] = b"" if token is None else self._to_bytes(token)
        return piece


def decoding_rule(backend: Backend) -> DecodingRule | None:
    """Return the rule of a tokenizer's decoder, or None when its tokens cannot be decoded one by one."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())  # its part of tokenizer.json
    if decoder["type"] == "ByteLevel":
        return DecodingRule(_byte_level, drops_first_space=False)
    if decoder["type"] == "Sequence":
        return _byte_fallback_rule(decoder["decoders"])
    return None


def _byte_level(token: str) -> bytes:
    """Return the bytes that a token spells. A token outside the alphabet (an added token) is its own UTF-8."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_fallback_rule(decoders: list[dict[str, Any]]) -> DecodingRule | None:
    """Return the rule of [Replace of a string]* [ByteFallback] Fuse [Strip of one leading space], else None."""
    parts = list(decoders)
    replaced: list[tuple[str, str]] = []
    while parts and parts[0]["type"] == "Replace" and parts[0]["pattern"].get("String"):
        replaced.append((parts[0]["pattern"]["String"], parts[0]["content"]))
        del parts[0]
    has_bytes = bool(parts) and parts[0]["type"] == "ByteFallback"
    del parts[:has_bytes]
    if not parts or parts.pop(0)["type"] != "Fuse":
        return None
    drops_first_space = parts == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    if parts and not drops_first_space:
        return None

    def to_bytes(token: str) -> bytes:
        for old, new in replaced:
            token = token.replace(old, new)
        byte = BYTE_TOKEN.fullmatch(token) if has_bytes else None
        return bytes.fromhex(byte[1]) if byte else token.encode()

    return DecodingRule(to_bytes, drops_first_space)


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


def exact_tokenizer_json(backend: Backend) -> str | None:
    """Return a tokenizer as the text of a tokenizer.json, without normalizers that change texts.

    None for one with tokens that cannot be decoded one by one.
    """
    has_rule = decoding_rule(backend) is not None
    decoder = None if has_rule else _inner_decoder(backend)
    if decoder is None and not has_rule:
        return None
    text: str = backend.to_str()
    if backend.normalizer is not None:
        given = json.loads(backend.normalizer.__getstate__())
        text = _with_part(text, "normalizer", given, _exact(given))
    return text if decoder is None else _with_part(text, "decoder", json.loads(backend.decoder.__getstate__()), decoder)


def _with_part(text: str, name: str, given: dict[str, Any], part: dict[str, Any] | None) -> str:
    """Return the text of a tokenizer.json with `part` in the place of the `given` object, which has that name.

    Without parsing all of it, which would hold the interpreter lock for 0.4 s with 151,646 tokens.
    """
    marker, start = f'"{name}":', 0
    while True:
        start = text.index(marker, start) + len(marker)
        found, end = json.JSONDecoder().raw_decode(text, start)
        if found == given:
            return text[:start] + json.dumps(part, ensure_ascii=False) + text[end:]


def _exact(normalizer: dict[str, Any]) -> dict[str, Any] | None:
    """Return what is kept of a normalizer."""
    match normalizer:
        case {"type": "Sequence", "normalizers": parts}:
            kept = [part for part in map(_exact, parts) if part is not None]
            return {"type": "Sequence", "normalizers": kept} if kept else None
        case {"type": "Prepend" | "ByteLevel"} | {"type": "Replace", "pattern": {"String": _}}:
            return normalizer
    return None


def _inner_decoder(backend: Backend) -> dict[str, Any] | None:
    """Return a decoder that decodes tokens one by one as a Metaspace decoder does behind the first token of a text.

    At the beginning of a text that one drops spaces; but a prompt is there. None for other decoders, and where tokens
    that are written like bytes are text, which the libraries of grammars cannot tell from bytes.
    """
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    match decoder.get("decoders", [decoder]):
        case [{"type": "ByteFallback"}, {"type": "Metaspace", "replacement": mark}, *rest]:
            pass
        case [{"type": "Metaspace", "replacement": mark}, *rest] if not any(
            re.fullmatch(BYTE_TOKEN, token) for token in backend.get_vocab()
        ):
            pass
        case _:
            return None
    if rest not in ([], [{"type": "Fuse"}]):
        return None
    space = {"type": "Replace", "pattern": {"String": mark}, "content": " "}
    return {"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}]}
