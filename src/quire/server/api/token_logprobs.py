"""Logprobs of tokens in JSON: names and bytes of tokens, and one object per token with the most likely ones beside it.

Encoded from packed tables in slices of positions: a slice is some 500 candidates, 1 to 3 ms.
"""

from collections.abc import Iterator, Sequence

import msgspec

from quire.core.logprob_table import Logprobs, Position
from quire.server.api.http_responses import encode
from quire.text.tokenizer import REPLACEMENT, Tokenizer

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
    """Texts of single tokens. A token may be a part of a character, which has no text. With `as_ids` they are ids."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids or tokenizer is None
        self._bytes = None if tokenizer is None else tokenizer.token_bytes(skip_special_tokens=False)

    def decoded(self, token_id: int) -> str | None:
        """Return the text of a token, None for a model without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def text(self, token_id: int) -> str:
        """Return the text of a token: U+FFFD for a part of a character, its id for a model without a tokenizer."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

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
        text = self.decoded(token_id)
        return None if text is None or REPLACEMENT in text else list(text.encode())


def slices_of(table: Logprobs) -> Iterator[tuple[int, int]]:
    """Yield ranges of positions with some SLICE_CANDIDATES candidates each."""
    num_positions = len(table)
    stride = max(1, SLICE_CANDIDATES * num_positions // max(1, table.num_candidates))
    for start in range(0, num_positions, stride):
        yield start, min(start + stride, num_positions)


def is_wide(table: Logprobs) -> bool:
    """Return whether a position has more candidates than a slice of work, such as the whole vocabulary."""
    return table.num_candidates > SLICE_CANDIDATES * len(table)


def token_logprob(names: TokenNames, position: Position, num_top: int | None) -> TokenLogprob:
    """Return the logprob of a token with the `num_top` most likely at its position, best first.

    With None, of tokens that the request names: all, the chosen token first.
    """
    token_ids, logprobs, _ = position
    top = _top_logprobs(names, position, _places(position, num_top))
    return TokenLogprob(names.text(token_ids[0]), logprobs[0], names.raw(token_ids[0]), top)


def wide_token_logprob(names: TokenNames, position: Position, num_top: int | None) -> Iterator[bytes]:
    """Yield the JSON of `token_logprob` in slices of work."""
    places = _places(position, num_top)
    yield encode(token_logprob(names, position, 0))[:-2]  # up to the elements of the empty list
    for start in range(0, len(places), SLICE_CANDIDATES):
        some = _top_logprobs(names, position, places[start : start + SLICE_CANDIDATES])
        yield (b"," if start else b"") + encode(some)[1:-1]
    yield b"]}"


def _places(position: Position, num_top: int | None) -> Sequence[int]:
    """Return the places of a position's candidates: behind the chosen token come the most likely, in order."""
    if num_top is not None:
        return range(1, min(num_top + 1, len(position[0])))
    chosen = position[0][0]
    return [0, *(place for place, token_id in enumerate(position[0]) if token_id != chosen)]


def _top_logprobs(names: TokenNames, position: Position, places: Sequence[int]) -> list[TopLogprob]:
    token_ids, logprobs, _ = position
    return [TopLogprob(names.text(token_ids[at]), logprobs[at], names.raw(token_ids[at])) for at in places]
