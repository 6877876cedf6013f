"""Token bytes: the bytes of each token, for tokenizers whose decoder works token by token.

Two kinds of decoder do, and nearly every decoder-only model has one of them: byte-level BPE (Radford et al. 2019), with
tokens that spell bytes in a private alphabet, and SentencePiece's BPE with byte fallback (Kudo and Richardson 2018),
with tokens that are text or one byte written `<0xHH>`. A text is then the UTF-8 of the joined bytes, and a detokenizer
needs one look-up per token.
"""

import json
import re
from collections.abc import Callable, Collection
from itertools import chain
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend

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
    """How a decoder turns a token into bytes, and whether it drops one space from the beginning of a text."""

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
