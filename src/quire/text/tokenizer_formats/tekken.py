"""Byte-level BPE from tekken.json, Mistral's own format: bytes and rank of each token, and the regex that cuts texts.

There is no list of merges: two tokens merge if their bytes together are a token, the lowest rank first. Ids begin with
the special tokens.
"""

import base64
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from quire.core.errors import ModelError
from quire.core.model_files import read_json_object
from quire.text.text_settings import TEKKEN_FILE
from quire.text.token_bytes import byte_level_text

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
