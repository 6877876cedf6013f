"""BadWords: token sequences that a row must not complete."""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray


class BadWords:
    """The bad words of one row, cut into what comes before and the last token, which is what a draw can forbid.

    Words of one length stand in one matrix, so a step makes one comparison for each length, and memory stays linear
    in the tokens given.
    """

    def __init__(self, words: tuple[tuple[int, ...], ...]) -> None:
        by_length: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in filter(None, words):
            by_length[len(word)].append(word)
        tables = [np.array(group, dtype=np.int64) for group in by_length.values()]  # [num_words, length] each
        self._groups = [(table[:, :-1], table[:, -1]) for table in tables]  # [num_words, length - 1], [num_words]

    def forbidden_next(self, output: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the tokens that would complete a bad word after `output`, the tokens [num_output] generated so far.

        A word that began in the prompt is not looked for (as in vLLM): it was not generated.
        """
        matches = [np.empty(0, dtype=np.int64)]
        for before, last in self._groups:
            length = before.shape[1]
            if length <= len(output):
                matches.append(last[(before == output[len(output) - length :]).all(axis=1)])
        return np.concatenate(matches)
