"""Comparison of the tokens of two models: a draft is a list of token ids, which must be the same tokens in both.

Vocabulary sizes are not enough: models of one family pad one tokenizer to different sizes, and different tokenizers can
have equal sizes. So the tokenizers are compared, token by token, unless their files are equal. How they split a text
does not matter.
"""

import logging
from pathlib import Path

from quire.core.errors import ConfigError
from quire.core.model_files import read_bytes
from quire.engine.formats import tokenizer_loader
from quire.text.tokenizer_files import TOKENIZER_FILE

log = logging.getLogger(__name__)


def require_same_tokens(target: Path, target_size: int, draft: Path, draft_size: int) -> None:
    """Raise ConfigError, which names both, if a token id means one token to one model and another to the other.

    `target` and `draft`: folders or files with the tokenizers; the sizes are of the models' vocabularies. A tokenizer
    that is missing is taken to be the other one's if the sizes are equal. An id that one tokenizer lacks may be a token
    of the other: added tokens differ within a family.
    """
    if _have_equal_files(target, draft):
        return
    load_target, load_draft = tokenizer_loader(target), tokenizer_loader(draft)
    if load_target is None or load_draft is None:
        missing = draft if load_draft is None else target
        if target_size != draft_size:
            raise ConfigError(
                f"its vocabulary has {draft_size} tokens, that of the model {target_size}, and {missing} has no "
                "tokenizer that could show that these are the same ones"
            )
        log.warning(
            "%s has no tokenizer; it is taken to be the other model's: both have %d tokens", missing, draft_size
        )
        return
    of_target, of_draft = load_target(), load_draft()
    for token_id in range(min(of_target.vocab_size, of_draft.vocab_size, target_size, draft_size)):
        expected, found = of_target.token_piece(token_id), of_draft.token_piece(token_id)
        if expected and found and expected != found:
            raise ConfigError(
                f"its tokenizer ({draft}) is not that of the model ({target}): token {token_id} is {found[:80]!r}, but "
                f"{expected[:80]!r} in the model's"
            )


def _have_equal_files(first: Path, second: Path) -> bool:
    """Return whether both are one folder or file, or folders with equal tokenizer.json."""
    if first.resolve() == second.resolve():
        return True
    if not all(path.is_dir() and (path / TOKENIZER_FILE).exists() for path in (first, second)):
        return False  # only tokenizer.json holds all of a tokenizer's tokens
    return read_bytes(first, TOKENIZER_FILE) == read_bytes(second, TOKENIZER_FILE)
