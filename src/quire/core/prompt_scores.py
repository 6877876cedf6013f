"""Token ids that a request asks to have scored at each position of its prompt, and the packed scores.

As vLLM's `prompt_logprob_token_ids`: row i has token ids that are scored as predictions of the prompt token at position
`prompt_logprob_start` + i + 1. The scores are a table of as many rows, as wide as the longest, padded by -inf.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.core.checks import MAX_INT, refuse
from quire.core.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np  # loaded where there are scores: the processes of sandboxes do without
    from numpy.typing import NDArray

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
