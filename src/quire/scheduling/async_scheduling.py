"""Async scheduling: plan step N + 1 while step N runs on the device.

The tokens that the running step samples are not known yet, but their positions are: the next plan computes each as its
row's next token, which the executor then has. Prompts continue with their next chunks. A step is planned ahead only if
nothing else in it can depend on the tokens: no waiting request fits, none forks, and there are free blocks for all
that is computed. In all other cases the next step is planned when the tokens are known. A sequence that ends by a token
of the running step is computed once more, for nothing. A request that needs the tokens before the next draw pauses for
one step: beams, penalties, bad words, grammars, logprobs.
"""

from collections.abc import Iterable
from typing import NamedTuple

from quire.cache.manager import KVCacheManager
from quire.core.pooling import BeamTask, Pool
from quire.core.sequence import NO_ROW, Request, Sequence, SequenceStatus
from quire.core.step_times import StepWork, chunk_work
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.time_budget import TimeBudget


class Chunk(NamedTuple):
    """Known tokens that a sequence computes in the next step. Behind the last one a token is drawn."""

    request: Request
    sequence: Sequence
    start: int
    num_tokens: int
    is_last: bool


def schedule_next(
    current: PlanBuilder, running: Iterable[Request], num_running_seqs: int, budget: int, cache: KVCacheManager,
    time: TimeBudget,
) -> PlanBuilder | None:  # fmt: skip
    """Return the step after `current`, which has not been recorded; None if it cannot be planned before that.

    `num_running_seqs`: unfinished sequences of `running`. Decodes come first, then prompts by what is left, of `budget`
    in tokens and of the step's time.
    """
    drawn = [each for each in current.sampled if each[1].status is SequenceStatus.RUNNING]
    rested = [each for each in current.resting if each[1].status is SequenceStatus.RUNNING if _num_missing(each[1]) < 2]
    ahead, chunks, num_met = PlanBuilder(), list[Chunk](), len(drawn) + len(rested)
    if num_met < num_running_seqs:
        seen = {sequence.seq_id for _, sequence in (*drawn, *rested)}
        time.start_step(lambda: _decode_work(drawn, rested))
        found = _chunks(current, running, ahead, seen, budget - num_met, time)
        if found is None:
            return None
        chunks = found
    if num_met > budget or num_met + _num_blocks(chunks, cache) > cache.num_free_blocks:
        return None
    requests, sequences, starts = list[Request](), list[Sequence](), list[int]()
    for each in drawn:
        request, sequence = each
        num_output = len(sequence.token_ids.output)
        if request.must_see_tokens:
            ahead.resting.append(each)
        elif num_output + 1 < request.max_tokens:
            requests.append(request)
            sequences.append(sequence)
            starts.append(sequence.num_prompt_tokens + num_output)
    _decode(ahead, cache, requests, sequences, starts)
    for request, sequence in rested:
        if sequence.is_computed:
            ahead.resting.append((request, sequence))  # a beam that waits for the other beams
        else:
            _advance(ahead, cache, request, sequence, sequence.num_computed_tokens)
    for chunk in chunks:
        _advance(ahead, cache, *chunk)
    return None if ahead.plan.is_empty else ahead


def must_see_tokens(request: Request) -> bool:
    """Return whether a draw of the request needs the token before it, or its result more than its token."""
    params = request.params
    return (
        isinstance(request.task, BeamTask)
        or params.logprobs is not None
        or params.structured_outputs is not None
        or bool(request.bad_words_token_ids)
        or (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
    )


def _chunks(
    current: PlanBuilder, running: Iterable[Request], ahead: PlanBuilder, seen: set[int], budget: int,
    time: TimeBudget,
) -> list[Chunk] | None:  # fmt: skip
    """Share the budget that decodes leave among the sequences that are not `seen`: prompts, most of them.

    None if branches of a request fork next, or wait for the end of a batch. Beams that have just forked rest.
    """
    counts = {each.seq_id: count for each, count in zip(current.planned, current.plan.counts, strict=True)}
    forked = {sequence.seq_id for sequence in current.forked}
    counts |= {sequence.seq_id: sequence.num_prompt_tokens for sequence in current.forked}
    left = list[tuple[int, Request, Sequence, int]]()
    for request in running:
        waits_to_fork = request.live[-1].row == NO_ROW
        for sequence in request.live[:1] if waits_to_fork else request.live:
            if sequence.status is not SequenceStatus.RUNNING:
                return None
            if sequence.seq_id in forked and isinstance(request.task, BeamTask):
                ahead.resting.append((request, sequence))
            elif sequence.seq_id not in seen:
                if request.images:
                    return None         # its encodings are planned with the step itself
                start = sequence.num_computed_tokens + counts.get(sequence.seq_id, 0)
                num_known = sequence.num_prompt_tokens if waits_to_fork else sequence.num_tokens
                if num_known > start or not isinstance(request.task, Pool):  # else it ends with the current step
                    left.append((num_known - start, request, sequence, start))
    chunks = list[Chunk]()
    for num_missing, request, sequence, start in sorted(left, key=lambda each: each[0]):
        if budget <= 0 or (count := min(num_missing, budget, time.most_tokens(start))) <= 0:
            break
        time.spend(start, count)
        is_last = count == num_missing
        if is_last and request.live[-1].row == NO_ROW:
            return None
        chunks.append(Chunk(request, sequence, start, count, is_last))
        budget -= count
    return chunks


def _num_blocks(chunks: Iterable[Chunk], cache: KVCacheManager) -> int:
    """Return the most blocks that chunks take: those that they fill, and a copy of the first if that is shared."""
    size = cache.block_size
    return sum((chunk.start + chunk.num_tokens) // size - chunk.start // size + 1 for chunk in chunks)


def _decode_work(*owners: Iterable[tuple[Request, Sequence]]) -> StepWork:
    """Return what these sequences compute: the token behind the known ones, which the running step samples."""
    return sum((chunk_work(sequence.num_tokens, 1, 1) for each in owners for _, sequence in each), StepWork())


def _num_missing(sequence: Sequence) -> int:
    return sequence.num_tokens - sequence.num_computed_tokens


def _decode(
    ahead: PlanBuilder, cache: KVCacheManager, requests: list[Request], sequences: list[Sequence], starts: list[int]
) -> None:
    """Compute the token that the running step samples for each of these, at `starts`, and draw the next."""
    full, updates = cache.append_where_room([sequence.seq_id for sequence in sequences])
    updates |= {place: cache.append(sequences[place].seq_id, 1, can_be_awaited=False) for place in full}
    ahead.decode(requests, sequences, starts, updates)


def _advance(
    ahead: PlanBuilder, cache: KVCacheManager, request: Request, sequence: Sequence, start: int, count: int = 1,
    is_last: bool = True,
) -> None:  # fmt: skip
    ahead.advance(sequence, count, cache.append(sequence.seq_id, count, can_be_awaited=False), start)
    if is_last and not isinstance(request.task, Pool):
        ahead.sample(request, sequence)
