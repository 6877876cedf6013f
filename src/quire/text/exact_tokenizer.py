"""Exact tokenizers: tokenizer.json without the normalizers that change what a text says.

A grammar forces bytes, and its tokens must spell these bytes. NFC, lower case, or spaces cut from the ends would spell
others. What only writes a text in the alphabet of the vocabulary stays: `▁` for spaces, and one in front.
"""

import json
from typing import Any

from tokenizers import Tokenizer as Backend


def exact_tokenizer_json(backend: Backend) -> str:
    """Return a tokenizer as the text of a tokenizer.json, without normalizers that change texts."""
    text: str = backend.to_str()
    if backend.normalizer is None:
        return text
    fields = json.loads(text)
    fields["normalizer"] = _exact(fields["normalizer"])
    return json.dumps(fields, ensure_ascii=False)


def _exact(normalizer: dict[str, Any]) -> dict[str, Any] | None:
    """Return what is kept of a normalizer."""
    match normalizer:
        case {"type": "Sequence", "normalizers": parts}:
            kept = [part for part in map(_exact, parts) if part is not None]
            return {"type": "Sequence", "normalizers": kept} if kept else None
        case {"type": "Prepend" | "ByteLevel"} | {"type": "Replace", "pattern": {"String": _}}:
            return normalizer
    return None
