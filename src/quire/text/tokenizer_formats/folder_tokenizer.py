"""Reader of the tokenizers of folders without tokenizer.json.

Their files say nothing of special tokens around a text, so tokenizer_config.json does. tekken.json, Mistral's own
format, has a byte-level BPE: bytes and rank of each token, and the regex that cuts texts. It has no list of merges: two
tokens merge if their bytes together are a token, the lowest rank first. Ids begin with the special tokens.
"""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from quire.core.errors import ModelError
from quire.core.model_files import read_json_object
from quire.text.text_settings import CONFIG_FILE, SENTENCEPIECE_FILE, TEKKEN_FILE, VOCAB_FILE, object_if_any, token_text
from quire.text.token_bytes import byte_level_text
from quire.text.tokenizer_formats.piece_merges import read_byte_level_bpe
from quire.text.tokenizer_formats.sentencepiece import read_sentencepiece

MAX_TOKEN_BYTES = 512   # tokens are tried at every cut
_SPECIAL = (            # tokens of files without a list: those up to version v7
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


def read_tekken(folder: Path, _config: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of tekken.json, with its special tokens. ModelError for a file that is none."""
    given: dict[str, Any] = read_json_object(folder, TEKKEN_FILE)
    try:
        config = given["config"]
        num_special = int(config["default_num_special_tokens"])
        special = _special_tokens(given.get("special_tokens"), num_special)
        tokens = _tokens(given["vocab"], int(config["default_vocab_size"]) - num_special)
        split = pre_tokenizers.Split(Regex(config["pattern"]), behavior="isolated")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{folder / TEKKEN_FILE}: not a tekken file: {error!r:.200}") from error
    except Exception as error:  # the library has no class of its own for a regex that is none
        raise ModelError(f"{folder / TEKKEN_FILE}: the pattern cannot be used: {error!r:.200}") from error
    vocabulary = {text: rank for rank, text in enumerate(special)}
    vocabulary |= {byte_level_text(token): num_special + rank for rank, token in enumerate(tokens)}
    if len(vocabulary) != len(special) + len(tokens):
        raise ModelError(f"{folder / TEKKEN_FILE}: a token is there twice")
    tokenizer = Tokenizer(models.BPE(vocabulary, _merges(tokens), ignore_merges=True))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _special_tokens(given: list[dict[str, Any]] | None, number: int) -> list[str]:
    """Return the texts of the special tokens; those without a text of their own are named by their ids."""
    named = dict(enumerate(_SPECIAL)) if given is None else {entry["rank"]: entry["token_str"] for entry in given}
    if not all(isinstance(rank, int) and 0 <= rank < number and isinstance(named[rank], str) for rank in named):
        raise ValueError(f"special tokens must be texts with ranks below {number}")
    return [named.get(rank, f"<SPECIAL_{rank}>") for rank in range(number)]


def _tokens(given: list[dict[str, Any]], number: int) -> list[bytes]:
    """Return the bytes of the first tokens, by rank."""
    tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in given[:number]]
    if [entry["rank"] for entry in given[:number]] != list(range(number)):
        raise ValueError(f"vocab must have the ranks 0 to {number - 1} in order")
    if not all(0 < len(token) <= MAX_TOKEN_BYTES for token in tokens):
        raise ValueError(f"tokens must have 1 to {MAX_TOKEN_BYTES} bytes")
    return tokens


def _merges(tokens: list[bytes]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that are a token together, by its rank."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(ranks[left], ranks[right]) for left, right in cuts if left in ranks and right in ranks]
        merges += [(byte_level_text(tokens[left]), byte_level_text(tokens[right])) for left, right in sorted(pairs)]
    return merges


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
