"""Logprobs of tokens in JSON: names and bytes of tokens, and one object per token with the most likely ones beside it.

Encoded from packed tables in slices of positions: a slice is some 500 candidates, 1 to 3 ms.
"""

from collections.abc import Iterator

import msgspec

from quire.core.logprob_table import Logprobs, Position
from quire.text.detokenizer import REPLACEMENT
from quire.text.tokenizer import Tokenizer

SLICE_CANDIDATES = 512


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens at a position. `bytes` is null if the tokenizer cannot map the token to bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of a message, and the most likely ones at its position."""

    top_logprobs: list[TopLogprob]


class TokenNames:
    """Texts of single tokens. A token may be a part of a character, which has no text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes = None if tokenizer is None else tokenizer.token_bytes(skip_special_tokens=False)

    def decoded(self, token_id: int) -> str | None:
        """Return the text of a token, None for a model without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def text(self, token_id: int) -> str:
        """Return the text of a token: U+FFFD for a part of a character, its id for a model without a tokenizer."""
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def key(self, token_id: int) -> str:
        r"""Return a token as OpenAI's completions write it: `bytes:\xe6\x97` for a part of a character."""
        text = self.text(token_id)
        if self._bytes is None or REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._bytes[token_id])

    def raw(self, token_id: int) -> list[int] | None:
        """Return the bytes of a token, or None if they are not known."""
        if self._bytes is not None:
            return list(self._bytes[token_id])
        text = self.text(token_id)
        return None if self._tokenizer is None or REPLACEMENT in text else list(text.encode())


def slices_of(table: Logprobs) -> Iterator[tuple[int, int]]:
    """Yield ranges of positions with some SLICE_CANDIDATES candidates each."""
    num_positions = len(table)
    stride = max(1, SLICE_CANDIDATES * num_positions // max(1, table.num_candidates))
    for start in range(0, num_positions, stride):
        yield start, min(start + stride, num_positions)


def token_logprob(names: TokenNames, position: Position, num_top: int) -> TokenLogprob:
    """Return the logprob of a token with the `num_top` most likely at its position, best first."""
    token_ids, logprobs, ranks = position
    top = []
    if num_top:
        unique = dict(zip(token_ids, zip(ranks, logprobs, strict=True), strict=True))  # may have the chosen one twice
        likeliest = sorted(unique, key=unique.__getitem__)[:num_top]
        top = [TopLogprob(names.text(other), unique[other][1], names.raw(other)) for other in likeliest]
    return TokenLogprob(names.text(token_ids[0]), logprobs[0], names.raw(token_ids[0]), top)
