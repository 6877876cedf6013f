"""Logprobs in OpenAI's JSON: parallel lists for completions, one object per token for chats."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.core.logprob_table import PADDING, Logprobs, Position
from quire.server.api.http_responses import JsonStream, array, encode
from quire.server.api.token_logprobs import (
    SLICE_CANDIDATES,
    TokenLogprob,
    TokenNames,
    is_wide,
    slices_of,
    token_logprob,
    wide_token_logprob,
)
from quire.text.tokenizer import IncrementalDetokenizer, Tokenizer, incremental_detokenizer


class PromptLogprob(msgspec.Struct):
    """One candidate at a position of a prompt."""

    logprob: float
    rank: int
    decoded_token: str | None


class WholeChatLogprobs(msgspec.Struct):
    """Logprobs of a short piece of a message."""

    content: list[TokenLogprob]
    refusal: None = None


class WholeCompletionLogprobs(msgspec.Struct):
    """Logprobs of a short piece of a completion. `text_offset` is in characters."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionLogprobs:
    """Encodes the logprobs of one choice, piece by piece: parallel lists, one entry per token in each.

    `start`: offset of its text in characters; negative if the text of its first tokens is not shown.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool, start: int,
        names: TokenNames | None = None,
    ) -> None:  # fmt: skip
        self._names = names or TokenNames(tokenizer)
        self._end = start
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = incremental_detokenizer(tokenizer, prompt_token_ids, skip_special_tokens)

    def piece(self, token_ids: Sequence[int], table: Logprobs) -> "LogprobPiece":
        """Return the logprobs of the next tokens. First tokens without a position in `table` get null."""
        return LogprobPiece(self._names, token_ids, table, self._offset)

    def _offset(self, token_id: int) -> int:
        """Return the offset of the first character of the next token, in characters of the text.

        Tokens that a stop string cut off have offsets too.
        """
        offset = max(0, self._end)
        if self._detokenizer is not None:
            self._end += len(self._detokenizer.append([token_id]))
        return offset


class LogprobPiece:
    """Consecutive tokens of a completion. Each of the four lists is encoded in slices."""

    def __init__(
        self, names: TokenNames, token_ids: Sequence[int], table: Logprobs, offset: Callable[[int], int]
    ) -> None:
        self._names, self._token_ids, self._table, self._offset = names, token_ids, table, offset
        self._num_unknown = len(token_ids) - len(table)  # 1 for a prompt: its first token has no logprob

    @property
    def is_short(self) -> bool:
        """True if `whole` is at most one slice of work."""
        return not self._num_unknown and self._table.num_candidates <= SLICE_CANDIDATES

    def whole(self) -> WholeCompletionLogprobs:
        """Return all four lists."""
        positions = self._table.positions(0, len(self._table))
        return WholeCompletionLogprobs(
            [self._offset(token_id) for token_id in self._token_ids],
            [logprobs[0] for _, logprobs, _ in positions],
            [self._names.key(token_id) for token_id in self._token_ids],
            [self._top(position) for position in positions],
        )

    def offsets(self) -> Iterator[bytes]:
        """Yield slices of `text_offset`. To be read once, before those of later pieces."""
        for start in range(0, len(self._token_ids), SLICE_CANDIDATES):
            yield encode([self._offset(token_id) for token_id in self._token_ids[start : start + SLICE_CANDIDATES]])

    def token_logprobs(self) -> Iterator[bytes]:
        """Yield slices of `token_logprobs`."""
        yield from self._unknown()
        for start, stop in slices_of(self._table):
            yield encode([logprobs[0] for _, logprobs, _ in self._table.positions(start, stop)])

    def tokens(self) -> Iterator[bytes]:
        """Yield slices of `tokens`."""
        for start in range(0, len(self._token_ids), SLICE_CANDIDATES):
            yield encode([self._names.key(token_id) for token_id in self._token_ids[start : start + SLICE_CANDIDATES]])

    def top_logprobs(self) -> Iterator[bytes | Iterator[bytes]]:
        """Yield slices of `top_logprobs`."""
        yield from self._unknown()
        for start, stop in slices_of(self._table):
            positions = self._table.positions(start, stop)
            if is_wide(self._table):
                yield from map(self._wide_top, positions)
            else:
                yield encode([self._top(position) for position in positions])

    def _unknown(self) -> Iterator[bytes]:
        if self._num_unknown:
            yield encode([None] * self._num_unknown)

    def _top(self, position: Position) -> dict[str, float]:
        key = self._names.key
        token_ids, logprobs, _ = position
        top = {key(token_id): logprob for token_id, logprob in zip(token_ids, logprobs, strict=True)}
        top[key(token_ids[0])] = logprobs[0]  # two tokens may have the same text
        return top

    def _wide_top(self, position: Position) -> Iterator[bytes]:
        """Yield the JSON of `_top` in slices of work; they are empty while names are collected."""
        token_ids, logprobs, _ = position
        top: dict[str, float] = {}
        for start in range(0, len(token_ids), SLICE_CANDIDATES):
            some = slice(start, start + SLICE_CANDIDATES)
            top |= zip(map(self._names.key, token_ids[some]), logprobs[some], strict=True)
            yield b""
        top[self._names.key(token_ids[0])] = logprobs[0]
        yield from _wide_object(top.items())


def completion_logprobs(pieces: Sequence[LogprobPiece]) -> JsonStream | WholeCompletionLogprobs:
    """Return the logprobs of consecutive pieces as one object."""
    if len(pieces) == 1 and pieces[0].is_short:
        return pieces[0].whole()
    lists: dict[bytes, Iterable[Iterator[bytes | Iterator[bytes]]]] = {
        b'{"text_offset":': (piece.offsets() for piece in pieces),
        b',"token_logprobs":': (piece.token_logprobs() for piece in pieces),
        b',"tokens":': (piece.tokens() for piece in pieces),
        b',"top_logprobs":': (piece.top_logprobs() for piece in pieces),
    }
    written = (chain((name,), array(chain.from_iterable(slices))) for name, slices in lists.items())
    return JsonStream(chain(chain.from_iterable(written), (b"}",)))


def _wide_object(items: Iterable[tuple[Any, Any]]) -> Iterator[bytes]:
    """Yield the JSON of an object with many members, a slice of them at a time."""
    rest, between = iter(items), b"{"
    while some := dict(islice(rest, SLICE_CANDIDATES)):
        yield between + encode(some)[1:-1]
        between = b","
    yield b"}"


def chat_logprobs(names: TokenNames, table: Logprobs, num_top: int | None) -> JsonStream | WholeChatLogprobs:
    """Return the logprobs of tokens with the `num_top` most likely at their position, best first; see above."""
    if table.num_candidates <= SLICE_CANDIDATES:
        positions = table.positions(0, len(table))
        return WholeChatLogprobs([token_logprob(names, position, num_top) for position in positions])

    def slices() -> Iterator[bytes | Iterator[bytes]]:
        for start, stop in slices_of(table):
            positions = table.positions(start, stop)
            if is_wide(table):
                yield from (wide_token_logprob(names, position, num_top) for position in positions)
            else:
                yield encode([token_logprob(names, position, num_top) for position in positions])

    return JsonStream(chain((b'{"content":',), array(slices()), (b',"refusal":null}',)))


def prompt_logprobs(names: TokenNames, table: Logprobs) -> JsonStream:
    """Return the candidates of each position of a prompt by token id; its first token has none."""

    def slices() -> Iterator[bytes | Iterator[bytes]]:
        yield b"[null]"
        for start, stop in slices_of(table):
            positions = table.positions(start, stop)
            if is_wide(table):
                yield from (_wide_object(_by_token_id(names, position)) for position in positions)
            else:
                yield encode([dict(_by_token_id(names, position)) for position in positions])

    return JsonStream(array(slices()))


def prompt_scores(rows: Sequence[Sequence[int]], scores: NDArray[np.float32]) -> JsonStream:
    """Return the `scores` [num_rows, width] of rows of token ids, null for padding inside a row."""
    num_rows = max(1, SLICE_CANDIDATES // scores.shape[1])

    def slices() -> Iterator[bytes]:
        for start in range(0, len(rows), num_rows):
            some = zip(rows[start : start + num_rows], scores[start : start + num_rows].tolist(), strict=True)
            yield encode([_scores_of(*row) for row in some])

    return JsonStream(array(slices()))


def _scores_of(ids: Sequence[int], scores: list[float]) -> list[float | None]:
    """Return the scores of one row, without what pads it to the width of all."""
    return [None if token == PADDING else score for token, score in zip(ids, scores, strict=False)]


def _by_token_id(names: TokenNames, position: Position) -> Iterator[tuple[int, PromptLogprob]]:
    """Yield the candidates of a position by token id, each once."""
    seen = set[int]()
    for token_id, logprob, rank in zip(*position, strict=True):
        if token_id not in seen:
            seen.add(token_id)
            yield token_id, PromptLogprob(logprob, rank, names.decoded(token_id))
