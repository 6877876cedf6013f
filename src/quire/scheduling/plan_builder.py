"""Collects one step's plan, and the sequence of each of its entries."""

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from quire.cache.block_table import TableUpdate
from quire.core.plan import BlockCopy, BlockIds, NewRow, RowDrafts, StepPlan
from quire.core.pooling import beam_params, pool_of
from quire.core.sequence import Request, Sequence
from quire.core.token_ids import TokenIds

NO_TOKEN = -1
_ROW = attrgetter("row")


class PlannedDrafts(NamedTuple):
    """Drafts of a row at positions from `start` on, and the update of its block table for them."""

    start: int
    token_ids: list[int]
    update: TableUpdate | None


class PlanBuilder:
    """A plan under construction. `planned[i]` is the sequence of entry i, `sampled[j]` that of sample j.

    `now_s`: when the step is planned, by the clock of requests. `is_planned`: the plan is complete.

    `forked`: sequences that share the prompt of another, computed once the step is over. `resting`: sequences that run
    and that the step leaves out: see async_scheduling.py. `at`: the request that is being planned or recorded; None
    between requests. `order`: the running requests in planning order, the next victim of a preemption last. `admitted`,
    `swapped_out`: requests that this step admits, or swaps out. `preempted`: the ids of all that it preempts.
    `decoding`: the requests of the last `decode`. `goes_on`: the step was recorded, and gave each sequence that it
    sampled one token that ends nothing.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self.is_planned = False
        self.plan = StepPlan()
        self.num_tokens = 0
        self.planned: list[Sequence] = []
        self.sampled: list[tuple[Request, Sequence]] = []
        self.forked: list[Sequence] = []
        self.resting: list[tuple[Request, Sequence]] = []
        self.at: Request | None = None
        self.order: list[Request] = []
        self.admitted: list[Request] = []
        self.preempted: list[int] = []
        self.swapped_out: list[Request] = []
        self.decoding: list[Request] = []
        self.goes_on = False

    def repeated_by(self, requests: list[Request]) -> bool:
        """Return whether the step that computes for these, in this order, decodes the same sequences once more."""
        return self.goes_on and self.decoding == requests and len(self.planned) == len(requests)

    def begin_row(
        self, request: Request, sequence: Sequence, block_ids: BlockIds, copy: BlockCopy | None = None
    ) -> None:
        """Add a sequence that has just been given a row, and the copy that it starts with."""
        if copy is not None:
            self.plan.copies.append(copy)
        self.plan.new_rows.append(
            NewRow(
                row=sequence.row,
                token_ids=sequence.token_ids.fork() if not request.images else _real_tokens(request, sequence),
                num_prompt_tokens=sequence.num_prompt_tokens,
                block_ids=block_ids,
                params=request.params,
                seed=sequence.seed,
                eos_token_ids=request.eos_token_ids,
                bad_words_token_ids=request.bad_words_token_ids,
                beam=beam_params(request.task),
                pool=pool_of(request.task),
                scope=request.scope,
                images=() if not request.images else tuple(image.span for image in request.images),
            )
        )

    def advance(
        self, sequence: Sequence, count: int, update: TableUpdate | None, start: int | None = None
    ) -> None:
        """Compute the next `count` tokens of a sequence, on the blocks that `update` adds to its table.

        `start`: position of the first one; None: behind the computed tokens. A step that is planned while another runs
        starts behind the tokens of that one.
        """
        plan = self.plan
        plan.rows.append(sequence.row)
        plan.starts.append(sequence.num_computed_tokens if start is None else start)
        plan.counts.append(count)
        self.num_tokens += count
        self.planned.append(sequence)
        if update is not None:
            self._change_table(len(self.planned) - 1, update)

    def sample(self, request: Request, sequence: Sequence) -> None:
        """Sample the sequence's next token behind the last token of the entry planned last."""
        self.plan.sample_rows.append(sequence.row)
        self.plan.sample_tokens.append(self.num_tokens - 1)
        self.sampled.append((request, sequence))

    def verify_drafts(self, drafts: Mapping[int, PlannedDrafts]) -> None:
        """Append drafts to the entries of their sequences, by row, and sample after each draft token.

        The tokens of later entries move towards the end of the flat batch.
        """
        plan = self.plan
        for entry, row in enumerate(plan.rows):
            if (own := drafts.get(row)) is not None:
                plan.drafts.append(RowDrafts(row, own.start, own.token_ids))
                plan.counts[entry] += len(own.token_ids)
                if own.update is not None:
                    self._change_table(entry, own.update)
        old = list(zip(plan.sample_tokens, plan.sample_rows, self.sampled, strict=True))
        for each in (plan.sample_tokens, plan.sample_rows, self.sampled):
            each.clear()
        num_before = num_drafts = 0                                     # drafts: of earlier entries, and with this one
        last = NO_TOKEN
        for token, row, owner in old:                                   # samples behind one token are of forks
            num_before, last = num_before if token == last else num_drafts, token
            num_own = len(drafts[row].token_ids) if row in drafts else 0
            num_drafts += num_own
            plan.sample_tokens.extend(range(token + num_before, token + num_before + 1 + num_own))
            plan.sample_rows.extend([row] * (1 + num_own))
            self.sampled.extend([owner] * (1 + num_own))
        self.num_tokens += num_drafts

    def decode(
        self, requests: list[Request], sequences: list[Sequence], starts: Iterable[int],
        updates: dict[int, TableUpdate | None],
    ) -> None:  # fmt: skip
        """Compute the token at `starts[i]` of each sequence, and draw the next one; `updates` by places of `sequences`.

        `advance` and `sample` for many at once: lists are made as wholes, for this is most of what plans have.
        """
        plan, first_entry, self.decoding = self.plan, len(self.planned), requests
        rows = list(map(_ROW, sequences))
        plan.rows.extend(rows)
        plan.starts.extend(starts)
        plan.counts.extend([1] * len(rows))
        plan.sample_rows.extend(rows)
        plan.sample_tokens.extend(range(self.num_tokens, self.num_tokens + len(rows)))
        self.num_tokens += len(rows)
        self.planned += sequences
        self.sampled.extend(zip(requests, sequences, strict=True))
        for place, update in updates.items():
            if update is not None:
                self._change_table(first_entry + place, update)

    def _change_table(self, entry: int, update: TableUpdate) -> None:
        """Add the changes of an entry's block table."""
        plan, row = self.plan, self.plan.rows[entry]
        if update.copy is not None:
            plan.copies.append(update.copy)
        if update.is_stored:
            plan.stored_entries.append(entry)
        for column, block in enumerate(update.blocks, start=update.first_column):
            plan.table_rows.append(row)
            plan.table_columns.append(column)
            plan.table_blocks.append(block)

    def mark(self) -> list[int]:
        """Return the lengths of the plan's lists, for `cut`."""
        return [len(each) for each in self._growing()]

    def cut(self, mark: list[int]) -> None:
        """Remove what was planned since `mark`: its request was preempted within the same step."""
        for each, length in zip(self._growing(), mark, strict=True):
            del each[length:]
        self.num_tokens = sum(self.plan.counts)

    def _growing(self) -> tuple[list[Any], ...]:
        """Return the lists that grow as a request is planned."""
        plan = self.plan
        return (
            plan.new_rows, plan.table_rows, plan.table_columns, plan.table_blocks, plan.copies, plan.rows, plan.starts,
            plan.counts, plan.sample_rows, plan.sample_tokens, plan.stored_entries, self.planned, self.sampled,
            self.forked, plan.drafts,
        )  # fmt: skip


def _real_tokens(request: Request, sequence: Sequence) -> TokenIds:
    """Return the tokens of a sequence as the model reads them, with image tokens at placeholders."""
    return TokenIds(request.prompt_token_ids, sequence.token_ids.output)
