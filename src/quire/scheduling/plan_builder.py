"""Collects one step's plan, and which sequence each of its entries stands for."""

from typing import NamedTuple

from quire.cache.block_table import TableUpdate
from quire.core.plan import BlockCopy, NewRow, StepPlan
from quire.core.sequence import Request, Sequence


class Mark(NamedTuple):
    """How long the plan was at some moment."""

    new_rows: int
    tables: int
    copies: int
    entries: int
    samples: int
    stored: int
    forked: int


class PlanBuilder:
    """A plan under construction. `planned[i]` is the sequence of entry i, `sampled[j]` that of sample j.

    `forked`: sequences that begin with tokens of another's prompt, which is computed when the step is over.
    `swapped_out`: requests whose blocks go out in this step. `resting`: sequences that sit it out: see run_ahead.py.
    """

    def __init__(self) -> None:
        self.plan = StepPlan()
        self.planned: list[Sequence] = []
        self.sampled: list[tuple[Request, Sequence]] = []
        self.forked: list[Sequence] = []
        self.swapped_out: list[Request] = []
        self.resting: list[tuple[Request, Sequence]] = []

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

    def mark(self) -> Mark:
        """Remember how long the plan is now."""
        plan = self.plan
        return Mark(
            new_rows=len(plan.new_rows),
            tables=len(plan.table_rows),
            copies=len(plan.copies),
            entries=len(plan.rows),
            samples=len(plan.sample_rows),
            stored=len(plan.stored_entries),
            forked=len(self.forked),
        )

    def cut(self, mark: Mark) -> None:
        """Forget what a request was to compute since `mark`: it has been preempted within the same step."""
        plan = self.plan
        del plan.new_rows[mark.new_rows :], plan.copies[mark.copies :]
        del plan.table_rows[mark.tables :], plan.table_columns[mark.tables :], plan.table_blocks[mark.tables :]
        del plan.rows[mark.entries :], plan.starts[mark.entries :], plan.counts[mark.entries :]
        del plan.sample_rows[mark.samples :], plan.sample_entries[mark.samples :]
        del plan.stored_entries[mark.stored :]
        del self.planned[mark.entries :], self.sampled[mark.samples :], self.forked[mark.forked :]
