"""Packed logprobs of consecutive positions, 16 bytes per candidate, of outputs and of scored prompts.

Crosses the process boundary as four byte strings, so that decoding a message costs a copy however many candidates it
has; a `Logprob` object per candidate takes ten times the memory, and seconds to make for a long prompt.

As vLLM's `prompt_logprob_token_ids`: row i has token ids that are scored as predictions of the prompt token at position
`prompt_logprob_start` + i + 1. The scores are a table of as many rows, as wide as the longest, padded by -inf.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from quire.core.checks import MAX_INT, refuse
from quire.core.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np  # loaded where there are scores: the processes of sandboxes do without
    from numpy.typing import NDArray

CANDIDATE_BYTES = 16  # a token id, a logprob and a rank
# Token ids, logprobs and ranks of one position, the token that stands there first: a TokenLogprobs is one.
Position = tuple[list[int], list[float], list[int]]


_NUM_RECENT = 16
_NUM_RECENT_CANDIDATES = 4096  # whole vocabularies would take long to pack together


class Logprobs(Protocol):
    """Candidates of consecutive positions, read a slice at a time."""

    def __len__(self) -> int:
        """Count the positions."""

    @property
    def num_candidates(self) -> int:
        """Candidates of all positions."""

    def positions(self, start: int, stop: int) -> list[Position]:
        """Return positions [start, stop), as far as there are any."""


class LogprobTable(msgspec.Struct, array_like=True):
    """Candidates of positions 0, 1, ... as arrays in the byte order of this machine.

    `ends`: int64, the number of candidates up to and including each position. `token_ids` and `ranks` are int32,
    `logprobs` float64.
    """

    ends: bytearray = msgspec.field(default_factory=bytearray)
    token_ids: bytearray = msgspec.field(default_factory=bytearray)
    logprobs: bytearray = msgspec.field(default_factory=bytearray)
    ranks: bytearray = msgspec.field(default_factory=bytearray)

    @classmethod
    def of(cls, positions: Iterable[Position]) -> "LogprobTable":
        """Return a table of these positions."""
        table = cls()
        table.extend(positions)
        return table

    def __len__(self) -> int:
        return len(self.ends) // 8

    @property
    def num_candidates(self) -> int:
        return len(self.token_ids) // 4

    def extend(self, positions: Iterable[Position]) -> None:
        added = list(positions)
        counts = (len(token_ids) for token_ids, _, _ in added)
        ends = accumulate(counts, initial=self.num_candidates)
        next(ends)  # where the first one begins
        self.ends += array("q", ends).tobytes()
        self.token_ids += array("i", chain.from_iterable(each[0] for each in added)).tobytes()
        self.logprobs += array("d", chain.from_iterable(each[1] for each in added)).tobytes()
        self.ranks += array("i", chain.from_iterable(each[2] for each in added)).tobytes()

    def positions(self, start: int, stop: int) -> list[Position]:
        """Return positions [start, stop), as far as there are any."""
        begin = memoryview(self.ends).cast("q")[start - 1] if start else 0
        ends = memoryview(self.ends).cast("q")[start:stop].tolist()
        last = ends[-1] if ends else begin
        token_ids = memoryview(self.token_ids).cast("i")[begin:last].tolist()
        logprobs = cast(list[float], memoryview(self.logprobs).cast("d")[begin:last].tolist())
        ranks = memoryview(self.ranks).cast("i")[begin:last].tolist()
        bounds = [0, *(end - begin for end in ends)]
        return [(token_ids[low:high], logprobs[low:high], ranks[low:high]) for low, high in pairwise(bounds)]


class LogprobBuffer:
    """Positions as steps append them: the last few as they came, because a stream reads them at once; others packed."""

    __slots__ = ("_recent", "_table", "num_candidates")

    def __init__(self) -> None:
        self._table: LogprobTable | None = None
        self._recent: list[Position] = []
        self.num_candidates = 0

    def __len__(self) -> int:
        return len(self._recent) + (0 if self._table is None else len(self._table))

    def extend(self, positions: Sequence[Position]) -> None:
        self._recent += positions
        for token_ids, _, _ in positions:
            self.num_candidates += len(token_ids)
        num_unpacked = self.num_candidates - (0 if self._table is None else self._table.num_candidates)
        if len(self._recent) > _NUM_RECENT or num_unpacked > _NUM_RECENT_CANDIDATES:
            self._table = self._table or LogprobTable()
            self._table.extend(self._recent)
            self._recent = []

    def positions(self, start: int, stop: int) -> list[Position]:
        """Return positions [start, stop), as far as there are any."""
        if self._table is None:
            return self._recent[start:stop]
        num_packed = len(self._table)
        packed = self._table.positions(start, stop) if start < num_packed else []
        return packed + self._recent[max(0, start - num_packed) : max(0, stop - num_packed)]


PADDING = -1            # a token id that is scored -inf
SCORE_BYTES = 4         # one float32

_EXPECTED = "rows of token ids, of which one or more are not empty: a list of lists, or an array of integers"


def check_token_rows(field: str, value: object) -> tuple[tuple[int, ...], ...]:
    """Return rows of token ids in [0, MAX_INT] or PADDING as tuples. InvalidRequestError names the wrong value."""
    if hasattr(value, "__array_interface__"):
        value = _rows_of(field, value)
    if not isinstance(value, list | tuple) or not all(isinstance(row, list | tuple) for row in value):
        refuse(field, value, _EXPECTED)
    if not any(value):
        refuse(field, value, _EXPECTED)
    for token in (token for row in value for token in row):
        if type(token) is not int or not PADDING <= token <= MAX_INT:
            refuse(field, token, f"rows of token ids from 0 to {MAX_INT}, or {PADDING} for padding")
    return tuple(map(tuple, value))


def _rows_of(field: str, value: Any) -> object:  # noqa: ANN401 (an array of anything)
    import numpy as np  # noqa: PLC0415 (see above)

    array = np.asarray(value)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        refuse(field, f"an array of {array.dtype} with shape {list(array.shape)}", _EXPECTED)
    return array.tolist()


def check_num_rows(rows: Sequence[object] | None, start: int, num_prompt_tokens: int) -> None:
    """Raise InvalidRequestError unless rows, if any, are as many as positions from `start` on but the last."""
    num_rows = max(num_prompt_tokens - 1 - start, 0)
    if rows is not None and len(rows) != num_rows:
        raise InvalidRequestError(
            f"prompt_logprob_token_ids must have {num_rows} scored rows, one for each of {num_prompt_tokens} prompt "
            f"tokens but the last, from prompt_logprob_start {start} on, got {len(rows)} rows",
            param="prompt_logprob_token_ids",
        )


def width_of(rows: Sequence[Sequence[int]] | None) -> int:
    """Return the length of the longest row, 0 without rows."""
    return max(map(len, rows or ()), default=0)


def padded(rows: Sequence[Sequence[int]]) -> "NDArray[np.int64]":
    """Return rows of token ids as an array [num_rows, width], shorter ones padded by PADDING."""
    import numpy as np  # noqa: PLC0415 (see above)

    ids = np.full((len(rows), width_of(rows)), PADDING, dtype=np.int64)
    for padded_row, row in zip(ids, rows, strict=True):
        padded_row[: len(row)] = row
    return ids


def unpacked(scores: bytes | None, width: int) -> "NDArray[np.float32] | None":
    """Return packed scores as an array [num_rows, width]; None if there are none."""
    import numpy as np  # noqa: PLC0415 (see above)

    return None if scores is None else np.frombuffer(scores, dtype=np.float32).reshape(-1, width)
