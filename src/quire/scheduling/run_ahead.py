"""Plan a step while the one before it still runs, for devices that work while the host thinks.

What the running step samples is not known yet, but where it will stand is: the next plan computes it as the row's next
token, and whoever runs the plan takes it from there. This is done only where nothing else can depend on it: everybody
who runs has just drawn a token, nobody who waits could be let in, and there is a free block for each. In all other
cases the next step is planned when the tokens are known. A sequence that ends by a token of the running step is
computed once more, for nothing. Who needs to see the tokens before the next draw sits out one step: beams, penalties,
bad words, logprobs.
"""

from quire.cache.manager import KVCacheManager
from quire.core.sequence import Request, Sequence, SequenceStatus
from quire.scheduling.plan_builder import PlanBuilder


def plan_ahead(current: PlanBuilder, num_seats: int, budget: int, cache: KVCacheManager) -> PlanBuilder | None:
    """Return the step after `current`, which has not been recorded; None where it has to wait for that.

    `num_seats`: unfinished sequences of running requests, all of which must have been at their last token.
    """
    drawn = [each for each in current.sampled if each[1].status is SequenceStatus.RUNNING]
    rested = [each for each in current.resting if each[1].status is SequenceStatus.RUNNING]
    num_candidates = len(drawn) + len(rested)
    is_steady = not current.forked and len(current.sampled) == len(current.planned) and num_candidates == num_seats
    if not is_steady or num_seats > min(budget, cache.num_free_blocks):
        return None
    ahead = PlanBuilder()
    for request, sequence in drawn:
        if must_see_tokens(request):
            ahead.resting.append((request, sequence))
        elif sequence.num_output_tokens + 1 < request.max_tokens:
            _advance(ahead, request, sequence, len(sequence.token_ids), cache)
    for request, sequence in rested:
        if sequence.is_computed:
            ahead.resting.append((request, sequence))  # a beam that waits for the others
        else:
            _advance(ahead, request, sequence, sequence.num_computed_tokens, cache)
    return None if ahead.plan.is_empty else ahead


def must_see_tokens(request: Request) -> bool:
    """Whether a draw of the request needs the token before it, or its result more than its token."""
    params = request.params
    return (
        request.beam is not None
        or params.logprobs is not None
        or bool(request.bad_words_token_ids)
        or (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
    )


def _advance(
    ahead: PlanBuilder, request: Request, sequence: Sequence, start: int, cache: KVCacheManager
) -> None:
    ahead.advance(sequence, 1, cache.append(sequence.seq_id, 1), start)
    ahead.sample(request, sequence)
