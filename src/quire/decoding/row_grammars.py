"""Grammars of rows: the protocol by which a worker has tokens masked, forced and ended. Structured output is behind it.

A step fills the masks of its samples while the forward pass runs. What a grammar allows is a function of the tokens of
the output, so nothing that a row's state holds has to outlive the row. A row with a mask that is not filled when the
forward pass is done is late: it is not sampled in this step, and another step of the row finds the mask.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import RowDrafts, StepPlan


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

    num_kept: int                    # of them; fewer than all only if the grammar has ended
    has_ended: bool = False          # the output is complete, and only an end of sequence could follow
    forced: tuple[int, ...] = ()     # the next tokens: each is the only one that its mask would allow
    failure: str | None = None       # why the row cannot continue
    is_at_fault: bool = False        # the grammar is


class StepGrammars(Protocol):
    """The grammars of one step, from its start until its tokens are recorded."""

    def finish_masks(self, is_computed: Callable[[], bool] = lambda: True) -> None:
        """Decide which rows are late. Call it once, when the forward pass is under way: waits until it `is_computed`.

        A step that computes other rows, without grammars, waits no longer; one of such rows alone as long as masks
        keep coming.
        """

    def masks(self) -> TokenMasks:
        """Return the masks of the samples of rows with grammars, after `finish_masks`."""

    def advance(self, row: int, token_ids: Sequence[int], max_forced: int) -> RowProgress | None:
        """Take the tokens that were sampled for a row, in order. None: the row has no mask in this step."""

    def num_allowed(self, row: int, drafts: Sequence[int]) -> int:
        """Return the number of leading drafts that are allowed after the tokens of a row's last `advance`."""


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
        computed_rows: NDArray[np.int64],
    ) -> StepGrammars | None:
        """Start to fill the masks of a step's samples; None if no sample has a grammar.

        rows and num_tokens int64 [num_samples]: the row of each sample and the tokens before it; token_ids
        [max_rows, max_len]: the tokens of every row, drafts included; computed_rows int64 [num_entries]: those that the
        step computes, sampled or not.
        """
