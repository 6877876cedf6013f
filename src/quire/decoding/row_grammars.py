"""Masks of a step, and the progress of rows with grammars, as `quire.decoding.grammars` gives them to a worker.

A step fills the masks of its samples while the forward pass runs. What a grammar allows is a function of the tokens of
the output, so nothing that a row's state holds has to outlive the row. A row with a mask that is not filled when the
forward pass is done is late: it is not sampled in this step, and another step of the row finds the mask.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenMasks(NamedTuple):
    """Masks of some samples of a step: samples int64 [num], ascending; bits uint32 [num, num_words], one per token.

    `failures`: samples without masks, which could not be computed, with the reason; theirs allow every token. `late`:
    samples of late rows, which are not among `samples`; what is drawn for them is dropped. `at_fault`: failures for
    which the request's grammar is at fault itself.
    """

    samples: NDArray[np.int64]
    bits: NDArray[np.uint32]
    failures: dict[int, str]
    late: frozenset[int] = frozenset()
    at_fault: frozenset[int] = frozenset()

    def part(self, start: int, stop: int) -> "TokenMasks":
        """Return the masks of samples [start, stop), counted from `start`."""
        within = slice(*np.searchsorted(self.samples, [start, stop]))
        failures = {sample - start: why for sample, why in self.failures.items() if start <= sample < stop}
        late = frozenset(sample - start for sample in self.late if start <= sample < stop)
        return TokenMasks(self.samples[within] - start, self.bits[within], failures, late)


class RowProgress(NamedTuple):
    """What a grammar makes of the tokens that were sampled for its row."""

    num_kept: int                    # tokens kept; fewer than all only if the grammar has ended
    has_ended: bool = False          # the output is complete, and only an end of sequence could follow
    forced: tuple[int, ...] = ()     # the next tokens: each is the only one that its mask would allow
    failure: str | None = None       # why the row cannot continue
    is_at_fault: bool = False        # the grammar is
