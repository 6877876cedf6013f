"""Reader of the tokenizers of folders without tokenizer.json.

Their files say nothing of special tokens around a text, so tokenizer_config.json does.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from quire.core.errors import ModelError
from quire.text.text_settings import CONFIG_FILE, SENTENCEPIECE_FILE, TEKKEN_FILE, VOCAB_FILE, object_if_any, token_text
from quire.text.tokenizer_formats.piece_merges import read_byte_level_bpe
from quire.text.tokenizer_formats.sentencepiece import read_sentencepiece
from quire.text.tokenizer_formats.tekken import read_tekken

ADDED_TOKENS_FILE = "added_tokens.json"
_READERS: dict[str, Callable[[Path, dict[str, Any]], Tokenizer]] = {
    SENTENCEPIECE_FILE: read_sentencepiece, VOCAB_FILE: read_byte_level_bpe, TEKKEN_FILE: read_tekken
}  # fmt: skip


def read_tokenizer(folder: Path, name: str) -> Tokenizer:
    """Return the tokenizer in file `name` of `folder`, one of those that `tokenizer_file` returns but tokenizer.json.

    Raises ModelError, or what the `tokenizers` library raises for a broken file.
    """
    config = object_if_any(folder, CONFIG_FILE)
    tokenizer = _READERS[name](folder, config)
    _add_tokens(tokenizer, folder, config)
    _set_template(tokenizer, folder, config, adds_bos=name != VOCAB_FILE)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, folder: Path, config: dict[str, Any]) -> None:
    """Add the tokens that the folder's JSON files declare beside the vocabulary, under the ids that they declare."""
    by_id: dict[int, AddedToken] = {}
    for text, token_id in object_if_any(folder, ADDED_TOKENS_FILE).items():
        by_id[_id(token_id, folder, ADDED_TOKENS_FILE)] = AddedToken(text, normalized=False)
    declared = config.get("added_tokens_decoder")
    for key, entry in (declared if isinstance(declared, dict) else {}).items():
        content = token_text(entry)
        if content is None:
            raise ModelError(f"{folder / CONFIG_FILE}: added_tokens_decoder {key!r:.80} has no content")
        given = entry if isinstance(entry, dict) else {}
        flags = {flag: given.get(flag) is True for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        by_id[_id(int(key) if str(key).isdecimal() else key, folder, CONFIG_FILE)] = AddedToken(content, **flags)
    for token_id, token in sorted(by_id.items()):
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != token_id:
            raise ModelError(
                f"{folder}: added token {token.content!r:.80} has id {tokenizer.token_to_id(token.content)} after the "
                f"vocabulary, but is declared with id {token_id}"
            )


def _id(value: object, folder: Path, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise ModelError(f"{folder / name}: expected a token id, got {value!r:.80}")
    return value


def _set_template(tokenizer: Tokenizer, folder: Path, config: dict[str, Any], *, adds_bos: bool) -> None:
    """Put the special tokens around a text for which the config asks; `adds_bos`: a first one is the default."""
    named = object_if_any(folder, "special_tokens_map.json") | config
    first = token_text(named.get("bos_token")) or ("<s>" if adds_bos else None)
    last = token_text(named.get("eos_token"))
    flags = {"bos": config.get("add_bos_token", adds_bos) is True, "eos": config.get("add_eos_token") is True}
    for text in (first if flags["bos"] else None, last if flags["eos"] else None):
        if text is not None and tokenizer.token_to_id(text) is None:
            raise ModelError(f"{folder / CONFIG_FILE}: the special token {text!r:.80} is not in the vocabulary")
    put_around(tokenizer, first if flags["bos"] else None, last if flags["eos"] else None)


def put_around(tokenizer: Tokenizer, first: str | None, last: str | None) -> None:
    """Put special tokens, which are in the vocabulary, before and behind every text."""
    used = [text for text in (first, last) if text is not None]
    if used:
        parts = [*([first] if first else []), "$A", *([last] if last else [])]
        special = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys(used)]
        tokenizer.post_processor = TemplateProcessing(single=parts, special_tokens=special)
