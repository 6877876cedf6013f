"""Bad words: token sequences that a row must not complete.

A word is its last token, which a draw can forbid, and the tokens before it. The latter, reversed, are kept sorted:
those that the output ends with are prefixes of the reversed output, and one binary search finds the longest of them.
The cost per step does not depend on the number of words, except for those that the output ends with; most steps end
after one look-up of the last token. No state is kept between steps, so a preempted sequence needs none.
"""

from bisect import bisect_right
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

_TOKEN_TYPE = np.dtype(">i4")  # whole tokens compare as their bytes


class BadWords:
    """The bad words of one request. Memory is linear in the tokens given, 4 bytes each."""

    def __init__(self, words: tuple[tuple[int, ...], ...]) -> None:
        last_tokens = defaultdict[tuple[int, ...], list[int]](list)
        for word in filter(None, words):
            last_tokens[word[-2::-1] if len(word) > 1 else ()].append(word[-1])
        self._always = _ids(last_tokens.pop((), []))
        in_bytes = {np.array(before, dtype=_TOKEN_TYPE).tobytes(): _ids(ids) for before, ids in last_tokens.items()}
        self._befores = sorted(in_bytes)                           # reversed: the last token comes first
        self._completing = [in_bytes[before] for before in self._befores]
        self._shorter = _longest_prefixes(self._befores)
        self._ends = frozenset(before[0] for before in last_tokens)
        self._max_tokens = max(map(len, last_tokens), default=0)
        self._latest = -1, self._always                            # the branches of a request often have equal endings

    def forbidden_next(self, output: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the tokens that would complete a bad word after `output`, the tokens [num_output] generated so far.

        A word that starts in the prompt does not count (as in vLLM): it was not generated.
        """
        if not len(output) or int(output[-1]) not in self._ends:
            return self._always
        backwards = output[-self._max_tokens :][::-1].astype(_TOKEN_TYPE).tobytes()
        index = bisect_right(self._befores, backwards) - 1
        while index >= 0 and not backwards.startswith(self._befores[index]):
            index = self._shorter[index]
        if index != self._latest[0]:
            self._latest = index, self._all_completing(index)
        return self._latest[1]

    def _all_completing(self, index: int) -> NDArray[np.int64]:
        """Return the last tokens of words that begin with `_befores[index]`, or with an ending of it; -1: neither."""
        found = [self._always]
        while index >= 0:
            found.append(self._completing[index])
            index = self._shorter[index]
        return np.concatenate(found)


def _longest_prefixes(sorted_keys: list[bytes]) -> list[int]:
    """Return, for each key, the index of the longest other key that is its prefix; -1 if there is none."""
    prefixes = list[int]()
    for index, key in enumerate(sorted_keys):
        candidate = index - 1
        while candidate >= 0 and not key.startswith(sorted_keys[candidate]):
            candidate = prefixes[candidate]
        prefixes.append(candidate)
    return prefixes


def _ids(tokens: list[int]) -> NDArray[np.int64]:
    return np.array(sorted(set(tokens)), dtype=np.int64)
