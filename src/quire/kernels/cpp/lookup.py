"""Lookups of speculative decoding in C++ (csrc/lookup.hpp); the plain forms are in `quire.execution.drafting`.

Token ids are read by address in each call, so each lookup keeps their array.
"""

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import NewRow
from quire.extension import _kernels


class CppNgramLookup:
    """N-grams of `min_size` to `max_size` tokens in rows of token_ids, int32 [max_rows, max_len]."""

    def __init__(self, token_ids: NDArray[np.int32], max_drafts: int, min_size: int, max_size: int) -> None:
        self._token_ids = token_ids
        self._native = _kernels.NgramLookup(_rows(token_ids, max_drafts), min_size, max_size)
        self.draft = self._native.draft

    def reset(self, new: NewRow) -> None:
        """Forget the row's previous owner."""
        self._native.reset(new.row)


class CppSuffixTexts:
    """Suffixes of rows in the rows themselves and in texts of recent outputs; `rules`: of `_kernels.SuffixRules`."""

    def __init__(self, token_ids: NDArray[np.int32], max_drafts: int, rules: tuple[float, ...]) -> None:
        self._token_ids = token_ids
        native = _kernels.SuffixLookup(_rows(token_ids, max_drafts), _kernels.SuffixRules(*rules))  # type: ignore[arg-type]
        self.reset, self.clear, self.draft = native.reset, native.clear, native.draft


def _rows(token_ids: NDArray[np.int32], max_drafts: int) -> _kernels.Rows:
    assert token_ids.dtype == np.int32, f"token ids of {token_ids.dtype}"
    assert token_ids.flags.c_contiguous, "rows of token ids have gaps"
    max_rows, max_len = token_ids.shape
    return _kernels.Rows(token_ids.ctypes.data, max_rows, max_len, max_drafts)
