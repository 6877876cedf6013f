"""Exact tokenizers: tokenizer.json without the normalizers that change what a text says.

A grammar forces bytes, and its tokens must spell these bytes. NFC, lower case, or spaces cut from the ends would spell
others. What only writes a text in the alphabet of the vocabulary stays: `▁` for spaces, and one in front.
"""

import json
import re
from typing import Any

from tokenizers import Tokenizer as Backend

from quire.text.token_bytes import BYTE_TOKEN, decoding_rule


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
