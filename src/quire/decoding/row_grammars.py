"""Grammars of rows: the protocol by which a worker has tokens masked, forced and ended. Structured output is behind it.

A step fills the masks of its samples while the forward pass runs. What a grammar allows is a function of the tokens of
the output, so nothing that a row's state holds has to outlive the row.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import RowDrafts, StepPlan


class TokenMasks(NamedTuple):
    """Masks of some samples of a step: samples int64 [num], ascending; bits uint32 [num, num_words], one per token.

    `failures`: samples without masks, which could not be computed, with the reason; theirs allow every token.
    """

    samples: NDArray[np.int64]
    bits: NDArray[np.uint32]
    failures: dict[int, str]

    def part(self, start: int, stop: int) -> "TokenMasks":
        """Return the masks of samples [start, stop), counted from `start`."""
        within = slice(*np.searchsorted(self.samples, [start, stop]))
        failures = {sample - start: why for sample, why in self.failures.items() if start <= sample < stop}
        return TokenMasks(self.samples[within] - start, self.bits[within], failures)


class RowProgress(NamedTuple):
    """What a grammar makes of the tokens that were sampled for its row."""

    num_kept: int                    # of them; fewer than all only if the grammar has ended
    has_ended: bool = False          # the output is complete, and only an end of sequence could follow
    forced: tuple[int, ...] = ()     # the next tokens: each is the only one that its mask would allow
    failure: str | None = None       # why the row cannot continue


class StepGrammars(Protocol):
    """The grammars of one step, from its start until its tokens are recorded."""

    def masks(self) -> TokenMasks:
        """Return the masks of the samples of rows with grammars; waits until they are filled."""

    def advance(self, row: int, token_ids: Sequence[int], max_forced: int) -> RowProgress | None:
        """Take the tokens that were sampled for a row, in order. None: the row has no grammar."""


class RowGrammars(Protocol):
    """The grammars of all rows of a worker."""

    def apply(self, plan: StepPlan) -> None:
        """Give each new row of a plan its grammar, or none."""

    def start_step(
        self,
        rows: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        drafts: Sequence[RowDrafts],
    ) -> StepGrammars | None:
        """Start to fill the masks of a step's samples; None if no sample has a grammar.

        rows and num_tokens int64 [num_samples]: the row of each sample and the tokens before it; token_ids
        [max_rows, max_len]: the tokens of every row, drafts included, not to be changed until `masks` has returned.
        """
