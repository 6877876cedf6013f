"""Oracle drafter: drafts from known outputs, with mistakes, so that any share of them is accepted."""

import random
from collections.abc import Iterable, Mapping, Sequence

from quire import LLM
from quire.execution.batch import IntArray, PersistentBatch, StepInputs
from quire.execution.drafter import Drafter, DraftRows
from quire.execution.drafting.draft_model import DraftModel
from quire.execution.drafting.drafters import AdaptiveLength, LimitedDrafter, LookupDrafter, StepCost
from quire.execution.worker import Worker

FREE_ROWS = StepCost(rows_per_read=1e9)


class OracleDrafter:
    """Drafts of any length from whole token lists, prompt and output; three of ten drafts have a wrong token.

    `model`: a draft model that drafts as well, though its drafts are not used.
    """

    def __init__(
        self, batch: PersistentBatch, wholes: Iterable[Sequence[int]], mistake: int, model: DraftModel | None = None
    ) -> None:
        self._batch, self._mistake, self._model, self._rng = batch, mistake, model, random.Random(5)
        self._wholes = [list(whole) for whole in wholes]
        self.reads_hidden = model is not None and model.reads_hidden

    def draft(self, rows: DraftRows, limits: IntArray, step: StepInputs) -> Mapping[int, Sequence[int]]:
        """Return the continuation of the list that begins as the row, with mistakes; without one, a mistake."""
        if self._model is not None:
            self._model.draft(rows, limits, step)
        drafts = {}
        for row, num_tokens, limit in zip(rows.rows.tolist(), rows.num_tokens.tolist(), limits.tolist(), strict=True):
            if not limit:
                continue
            known = self._batch.token_ids[row, :num_tokens].tolist()
            whole = next((each for each in self._wholes if each[:num_tokens] == known), [])
            found = whole[num_tokens : num_tokens + self._rng.randint(1, limit)] or [self._mistake]
            if self._rng.random() < 0.3:
                found[self._rng.randrange(len(found))] = self._mistake
            drafts[row] = found
        return drafts


class CountedDrafter:
    """A drafter with counts of verified and accepted draft tokens."""

    def __init__(self, drafter: Drafter) -> None:
        self.apply, self.draft, self._drafter = drafter.apply, drafter.draft, drafter
        self.reads_hidden = drafter.reads_hidden
        self.num_verified = self.num_accepted = 0

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Count, and pass on."""
        self.num_verified += num_drafts
        self.num_accepted += num_accepted
        self._drafter.record(row, num_drafts, num_accepted)


def let_draft(
    llm: LLM, wholes: Iterable[Sequence[int]] | None = None, mistake: int = 3, num_drafts: int = 4
) -> CountedDrafter:
    """Make an engine draft in steps of any number of rows; with `wholes`, replace its drafter by an oracle's."""
    worker = llm._engine.engine.executor.worker  # type: ignore[attr-defined]
    worker = getattr(worker, "_worker", worker)   # rank 0's own
    assert isinstance(worker, Worker)
    drafter, batch = worker.compute.drafter, worker.compute.batch
    assert isinstance(drafter, LimitedDrafter | LookupDrafter)
    drafter._lengths = AdaptiveLength(FREE_ROWS, len(batch.token_ids))
    if wholes is not None:
        model = drafter._method if isinstance(drafter, LimitedDrafter) else None
        drafter = LimitedDrafter(OracleDrafter(batch, wholes, mistake, model), drafter._lengths, num_drafts, batch)
    worker.compute.drafter = counted = CountedDrafter(drafter)
    return counted
