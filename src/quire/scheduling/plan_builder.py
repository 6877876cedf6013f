"""Collects one step's plan, and which sequence each of its entries stands for."""

from typing import Any

from quire.cache.block_table import TableUpdate
from quire.core.plan import BlockCopy, NewRow, StepPlan
from quire.core.sequence import Request, Sequence


class PlanBuilder:
    """A plan under construction. `planned[i]` is the sequence of entry i, `sampled[j]` that of sample j.

    `forked`: sequences that begin with tokens of another's prompt, which is computed when the step is over.
    `resting`: sequences that sit it out: see run_ahead.py. `at`: whose turn it is while the plan is made. `admitted`,
    `swapped_out`: requests that come and go with this step, the last ones with their blocks. `preempted`: the ids of
    all that go.
    """

    def __init__(self) -> None:
        plan = self.plan = StepPlan()
        self.planned: list[Sequence] = []
        self.sampled: list[tuple[Request, Sequence]] = []
        self.forked: list[Sequence] = []
        self.resting: list[tuple[Request, Sequence]] = []
        self.at: Request | None = None
        self.admitted: list[Request] = []
        self.preempted: list[int] = []
        self.swapped_out: list[Request] = []
        self._growing: tuple[list[Any], ...] = (    # what a request adds to
            plan.new_rows, plan.table_rows, plan.table_columns, plan.table_blocks, plan.copies, plan.rows, plan.starts,
            plan.counts, plan.sample_rows, plan.sample_entries, plan.stored_entries, self.planned, self.sampled,
            self.forked,
        )  # fmt: skip

    def begin_row(
        self, request: Request, sequence: Sequence, block_ids: list[int], copy: BlockCopy | None = None
    ) -> None:
        """Tell the worker about a sequence that has just been given a row, and of the copy that it begins with."""
        if copy is not None:
            self.plan.copies.append(copy)
        self.plan.new_rows.append(
            NewRow(
                row=sequence.row,
                token_ids=list(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                block_ids=block_ids,
                params=request.params,
                seed=sequence.seed,
                eos_token_ids=request.eos_token_ids,
                bad_words_token_ids=request.bad_words_token_ids,
                beam=request.beam,
            )
        )

    def advance(
        self, sequence: Sequence, count: int, update: TableUpdate | None, start: int | None = None
    ) -> None:
        """Compute the next `count` tokens of a sequence, on the blocks that `update` adds to its table.

        They begin behind what is computed, or at `start`, where a step under way will have come.
        """
        plan, row = self.plan, sequence.row
        plan.rows.append(row)
        plan.starts.append(sequence.num_computed_tokens if start is None else start)
        plan.counts.append(count)
        self.planned.append(sequence)
        if update is not None:
            if update.copy is not None:
                plan.copies.append(update.copy)
            if update.is_stored:
                plan.stored_entries.append(len(self.planned) - 1)
            for column, block in enumerate(update.blocks, start=update.first_column):
                plan.table_rows.append(row)
                plan.table_columns.append(column)
                plan.table_blocks.append(block)

    def sample(self, request: Request, sequence: Sequence) -> None:
        """Draw the sequence's next token from the logits of the entry planned last."""
        self.plan.sample_rows.append(sequence.row)
        self.plan.sample_entries.append(len(self.planned) - 1)
        self.sampled.append((request, sequence))

    def rows(self) -> set[int]:
        """Return all rows that the worker may have touched when the step has failed."""
        plan = self.plan
        return {*plan.rows, *(new.row for new in plan.new_rows), *(fork.row for fork in plan.row_forks)}

    def mark(self) -> list[int]:
        """Remember how long the plan is now."""
        return [len(each) for each in self._growing]

    def cut(self, mark: list[int]) -> None:
        """Forget what a request was to compute since `mark`: it has been preempted within the same step."""
        for each, length in zip(self._growing, mark, strict=True):
            del each[length:]
