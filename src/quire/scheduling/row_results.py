"""Row results: what a step gave each of its rows, where some gave more or less than one token.

Not used while every sampled row gives one token, which is most steps.
"""

from collections.abc import Iterable, Iterator
from itertools import repeat

from quire.core.plan import RowResult, StepResult
from quire.core.sequence import Request, Sequence
from quire.scheduling.plan_builder import PlanBuilder


def truncations(step: PlanBuilder, result: StepResult) -> Iterator[tuple[Sequence, int]]:
    """Yield the sequences that still hold their rows and computed fewer tokens than planned, with how many fewer."""
    for row, sequence, count in zip(step.plan.rows, step.planned, step.plan.counts, strict=True):
        own = result.rows.get(row)
        if own is not None and own.num_computed is not None and sequence.row == row:
            assert 0 <= own.num_computed <= count, f"{own.num_computed} of {count} tokens computed"
            if own.num_computed < count:
                yield sequence, count - own.num_computed


def late_sequences(step: PlanBuilder, result: StepResult) -> Iterator[Sequence]:
    """Yield the sequences that still hold their rows and were not sampled, for their masks were late."""
    sampled = dict(zip(step.plan.sample_rows, step.sampled, strict=True))
    for row, own in result.rows.items():
        if own.is_late and sampled[row][1].row == row:
            yield sampled[row][1]


def row_results(
    step: PlanBuilder, result: StepResult, running: Iterable[Request]
) -> Iterator[tuple[Request, Sequence, RowResult]]:
    """Yield the result of each row that has samples or a result of its own, in the order of the plan."""
    plan, own = step.plan, dict(result.rows)
    drafted = {each.row for each in plan.drafts}
    logprobs = result.logprobs or repeat(None, len(result.token_ids))
    samples = zip(plan.sample_rows, step.sampled, result.token_ids, logprobs, strict=True)
    for row, (request, sequence), token, record in samples:
        if row in own:
            yield request, sequence, own.pop(row)
        elif row not in result.rows:
            assert row not in drafted, f"row {row} has drafts and no result of its own"
            yield request, sequence, RowResult([token], None if record is None else [record])
    if own:
        assert own.keys() <= set(plan.rows), f"results for {list(own)}, which were not computed"
        owners = {sequence.seq_id: request for request in running for sequence in request.live}
        for row, sequence in zip(plan.rows, step.planned, strict=True):
            if row in own and sequence.seq_id in owners:
                yield owners[sequence.seq_id], sequence, own[row]
