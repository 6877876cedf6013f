"""Row results: the rows of a step that gave more or less than one token, with their sequences.

Not used while every sampled row gives one token, which is most steps.
"""

from collections.abc import Iterable, Iterator
from itertools import compress

from quire.core.deltas import TokenLogprobs
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


def sampled_alone(
    step: PlanBuilder, result: StepResult
) -> tuple[list[tuple[Request, Sequence]], list[int], list[TokenLogprobs | None] | None]:
    """Return the owners, tokens and logprobs of the samples whose rows have no result of their own."""
    alone = [row not in result.rows for row in step.plan.sample_rows]
    logprobs = None if result.logprobs is None else list(compress(result.logprobs, alone))
    return list(compress(step.sampled, alone)), list(compress(result.token_ids, alone)), logprobs


def row_results(
    step: PlanBuilder, result: StepResult, running: Iterable[Request]
) -> Iterator[tuple[Request, Sequence, RowResult]]:
    """Yield the results of rows that have one of their own: sampled rows first, each in the order of the plan."""
    own = dict(result.rows)
    for row, (request, sequence) in zip(step.plan.sample_rows, step.sampled, strict=True):
        if row in own:
            yield request, sequence, own.pop(row)
    if own:
        assert own.keys() <= set(step.plan.rows), f"results for {list(own)}, which were not computed"
        owners = {sequence.seq_id: request for request in running for sequence in request.live}
        for row, sequence in zip(step.plan.rows, step.planned, strict=True):
            if row in own and sequence.seq_id in owners:
                yield owners[sequence.seq_id], sequence, own[row]
