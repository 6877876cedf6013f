"""Beam search: surviving beams, kept hypotheses, end of the search (Kwon et al. 2023, section 4.4).

The rules are those of transformers' `_beam_search` (5.23) with `early_stopping=False`. Of the best continuations of all
beams, the first `beam_width` may end: by an end-of-sequence token, or all of them at max_tokens. The first `beam_width`
of the rest survive. Hypotheses that ended are kept apart, the `beam_width` best by score = sum of logprobs / (generated
tokens ** length_penalty), the one that ends a sequence among them. With that many kept, the search is over as soon as
the best survivor, scored at its present length, is not better than the worst of them.

A grammar may allow fewer outputs than there are beams. The search then ends without an answer: it fails.

A search runs on a sequence group of `beam_width` sequences. At first only one of them holds a beam.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from quire.cache.manager import KVCacheManager
from quire.core.deltas import FinishReason, SequenceDelta, TokenLogprobs
from quire.core.plan import RowFork
from quire.core.pooling import beam_params
from quire.core.sampling_params import BeamSearchParams
from quire.core.sequence import Request
from quire.core.sequence import Sequence as Branch
from quire.scheduling.queues import RequestQueues


class Continuation(NamedTuple):
    """One more token on a beam. `beam` is the index of its sequence, `logprob` the sum over all generated tokens."""

    logprob: float
    beam: int
    token_id: int


class Hypothesis(NamedTuple):
    """A beam that has ended."""

    score: float
    logprob: float
    token_ids: list[int]                # generated
    finish_reason: FinishReason


class BeamSearch:
    """The state of one search. It knows tokens and logprobs, and nothing of blocks and rows."""

    def __init__(self, params: BeamSearchParams, max_tokens: int, eos_token_ids: frozenset[int]) -> None:
        self._width, self._length_penalty = params.beam_width, params.length_penalty
        self._max_tokens, self._eos_token_ids = max_tokens, eos_token_ids
        self.logprobs = {0: 0.0}                        # key: index of a beam's sequence; the best first
        self.hypotheses: list[Hypothesis] = []          # the best first
        self._answers: dict[int, TokenLogprobs] = {}    # key: index of the sequence

    def answer(self, index: int, candidates: TokenLogprobs) -> None:
        """Take the likeliest next tokens of a sequence, behind the one that would be sampled. Twice is fine."""
        self._answers[index] = candidates

    @property
    def is_complete(self) -> bool:
        """Return whether there are as many hypotheses as beams."""
        return len(self.hypotheses) == self._width

    @property
    def has_all_answers(self) -> bool:
        """Return whether every beam has answered."""
        return self.logprobs.keys() <= self._answers.keys()

    def advance(self, branches: Sequence[Branch]) -> list[Continuation]:
        """Choose the continuations that survive, the best first; none when the search is over."""
        num_tokens = 1 + branches[next(iter(self.logprobs))].num_output_tokens
        ended, survivors = self._choose(is_last=num_tokens == self._max_tokens)
        self._answers.clear()
        self._keep(ended, branches, num_tokens)
        if not survivors or not self._may_improve(survivors[0], num_tokens):
            return []
        return survivors

    def conclude(self, branches: Sequence[Branch]) -> None:
        """Keep the beams as hypotheses of their present lengths: no token follows."""
        for index, logprob in self.logprobs.items():
            token_ids = list(branches[index].token_ids.output)
            score = logprob / math.pow(len(token_ids), self._length_penalty)
            self.hypotheses.append(Hypothesis(score, logprob, token_ids, "length"))
        self.hypotheses.sort(key=attrgetter("score"), reverse=True)
        del self.hypotheses[self._width :]

    def place(self, survivors: Iterable[Continuation]) -> list[tuple[int, Continuation]]:
        """Give each survivor a sequence: the first child of a beam its parent's, the rest those of losers."""
        parents = {each.beam for each in survivors}
        losers = deque(index for index in range(self._width) if index not in parents)
        placed = []
        for each in survivors:
            index = each.beam if each.beam in parents else losers.popleft()
            parents.discard(each.beam)
            placed.append((index, each))
        self.logprobs = {index: each.logprob for index, each in placed}
        return placed

    def _choose(self, *, is_last: bool) -> tuple[list[Continuation], list[Continuation]]:
        """Return the continuations that end and those that survive. Of equal ones, the better beam's comes first."""
        ended, survivors = list[Continuation](), list[Continuation]()
        ranked = merge(*map(self._continuations, self.logprobs), key=attrgetter("logprob"), reverse=True)
        for rank, each in enumerate(ranked):
            if is_last or each.token_id in self._eos_token_ids:
                if rank < self._width:
                    ended.append(each)
            elif len(survivors) < self._width:
                survivors.append(each)
            if rank + 1 >= self._width and (is_last or len(survivors) == self._width):
                break
        return ended, survivors

    def _continuations(self, beam: int) -> Iterator[Continuation]:
        """Yield a beam's, the likeliest first. Few are taken: of 64 beams, 130 of 4,160."""
        logprob, answer = self.logprobs[beam], self._answers[beam]
        for token_id, own in islice(zip(answer.token_ids, answer.logprobs, strict=True), 1, None):
            yield Continuation(logprob + own, beam, token_id)

    def _keep(self, ended: list[Continuation], branches: Sequence[Branch], num_tokens: int) -> None:
        for each in ended:
            parent = branches[each.beam]
            reason: FinishReason = "stop" if each.token_id in self._eos_token_ids else "length"
            token_ids = [*parent.token_ids.output, each.token_id]
            self.hypotheses.append(Hypothesis(self._score(each, num_tokens), each.logprob, token_ids, reason))
        self.hypotheses.sort(key=attrgetter("score"), reverse=True)
        del self.hypotheses[self._width :]

    def _may_improve(self, best: Continuation, num_tokens: int) -> bool:
        return len(self.hypotheses) < self._width or self._score(best, num_tokens) > self.hypotheses[-1].score

    def _score(self, each: Continuation, num_tokens: int) -> float:
        return each.logprob / math.pow(num_tokens, self._length_penalty)


class BeamSearches:
    """The searches of all beam requests of a scheduler: collects answers, forks sequences and tables."""

    def __init__(self, cache: KVCacheManager, queues: RequestQueues) -> None:
        self._cache, self._queues = cache, queues
        self._searches: dict[int, BeamSearch] = {}      # key: request id
        self.answered: dict[int, Request] = {}          # requests with answers in the step under way
        self.row_forks: list[RowFork] = []              # for the next plan

    def add(self, request: Request) -> None:
        """Add a new request, a beam search."""
        params = beam_params(request.task)
        assert params is not None, f"request {request.request_id} is no beam search"
        self._searches[request.request_id] = BeamSearch(params, request.max_tokens, request.eos_token_ids)

    def remove(self, request: Request) -> None:
        """Remove a request, beam search or not."""
        self._searches.pop(request.request_id, None)
        self.answered.pop(request.request_id, None)

    def take_row_forks(self) -> list[RowFork]:
        """Return, once, the forks for the next plan."""
        forks, self.row_forks = self.row_forks, []
        return forks

    def answer(self, request: Request, sequence: Branch, candidates: TokenLogprobs | None) -> None:
        """Take a sequence's answer in this step."""
        assert candidates is not None, f"sequence {sequence.seq_id} has brought no candidates"
        self._searches[request.request_id].answer(sequence.index, candidates)
        self.answered[request.request_id] = request

    def take_answered(self) -> list[Request]:
        """Return, once, the requests with answered sequences in this step."""
        answered, self.answered = self.answered, {}
        return list(answered.values())

    def advance(self, request: Request) -> list[SequenceDelta]:
        """Advance a search if all its beams have answered; return its answers if it is over.

        One that was preempted when some had answered waits until all is computed again. One that fails in here is over
        without an answer.
        """
        search = self._searches[request.request_id]
        if not search.has_all_answers or not all(branch.is_computed for branch in request.live):
            return []
        survivors = search.advance(request.live)
        if not survivors:
            return _deltas(request, search) if search.is_complete else [_failure(request, search)]
        self._fork(request, search.place(survivors))
        return []

    def conclude(self, request: Request) -> list[SequenceDelta]:
        """Return the answers of a search with a token that ends before it is over; the caller removes it.

        A grammar may have left fewer beams than answers: the rest are empty.
        """
        search = self._searches[request.request_id]
        search.conclude(request.live)
        missing = range(len(search.hypotheses), request.params.n)
        empty = [SequenceDelta(request.request_id, index, [], finish_reason="length") for index in missing]
        return _deltas(request, search) + empty

    def _fork(self, request: Request, placed: list[tuple[int, Continuation]]) -> None:
        """Give the survivors their tokens and tables: one that replaces a loser takes over what the two do not share.

        No block is allocated: sequences grow in a later step.
        """
        cache, live = self._cache, request.live
        moved = [(live[index], live[each.beam], each) for index, each in placed if index != each.beam]
        for child, parent, each in moved:
            token_ids = parent.token_ids.fork()
            cache.refork(parent.seq_id, child.seq_id, token_ids)
            child.token_ids = token_ids
            self._queues.set_computed(child, parent.num_computed_tokens)
            blocks = cache.block_array(child.seq_id)
            self.row_forks.append(RowFork(child.row, parent.row, child.num_tokens, each.token_id, blocks))
        for index, each in placed:
            if index == each.beam:
                row = live[index].row
                self.row_forks.append(RowFork(row, row, live[index].num_tokens, each.token_id, []))
        for index, each in placed:
            live[index].token_ids.append(each.token_id)

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that exactly the beam requests among `requests` have a search, each with all of its sequences."""
        beams = {request.request_id: request for request in requests if beam_params(request.task)}
        assert beams.keys() == self._searches.keys(), f"requests {beams.keys()}, searches {self._searches.keys()}"
        for request_id, request in beams.items():
            assert [branch.index for branch in request.live] == list(range(request.params.n))
            lengths = {request.live[index].num_tokens for index in self._searches[request_id].logprobs}
            assert len(lengths) == 1, f"beams of {lengths} tokens"


def _deltas(request: Request, search: BeamSearch) -> list[SequenceDelta]:
    """Return the answers, the best first."""
    return [
        SequenceDelta(
            request.request_id, index, each.token_ids, finish_reason=each.finish_reason,
            cumulative_logprob=each.logprob,
        )
        for index, each in enumerate(search.hypotheses)
    ]


def _failure(request: Request, search: BeamSearch) -> SequenceDelta:
    """Return the end of a search with fewer outputs than beams."""
    allowed, asked = len(search.hypotheses), request.params.n
    error = f"structured_outputs allows {allowed} outputs that end within max_tokens, fewer than the {asked} beams"
    return SequenceDelta(request.request_id, 0, [], error=error, param="structured_outputs")
