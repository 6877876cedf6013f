"""Recording of results: tokens, failures and logprobs of a step, applied to its sequences."""

from collections.abc import Callable, Mapping
from itertools import repeat

from quire.cache.manager import KVCacheManager
from quire.core.deltas import SequenceDelta, TokenLogprobs
from quire.core.plan import PromptLogprobsChunk, RowResult, StepResult
from quire.core.prompt_scores import SCORE_BYTES, width_of
from quire.core.sequence import Request, Sequence, SequenceStatus
from quire.core.task import BeamSearch
from quire.scheduling.parts import Searches
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.policies import ByPriority
from quire.scheduling.queues import RequestQueues
from quire.scheduling.row_results import late_sequences, row_results, sampled_alone, truncations
from quire.scheduling.stopping import append_tokens, check_stop

Finish = Callable[[Request, Sequence], None]


class ResultRecorder:
    """Applies results to sequences and collects their deltas.

    `finish` ends a sequence; `complete` ends one that has its last token, which a static batch keeps as padding.
    `deltas`: recorded and not taken; a record that fails leaves those before it.
    """

    def __init__(
        self, cache: KVCacheManager, queues: RequestQueues, order: ByPriority, finish: Finish, complete: Finish
    ) -> None:
        self._cache, self._queues, self._order = cache, queues, order
        self.searches: Searches | None = None           # None: there has been no beam search
        self._finish, self._complete = finish, complete
        self.deltas: list[SequenceDelta] = []

    def take_deltas(self) -> list[SequenceDelta]:
        """Return, once, the deltas that were recorded."""
        deltas, self.deltas = self.deltas, []
        return deltas

    def advance(self, step: PlanBuilder, result: StepResult, ahead: PlanBuilder | None) -> None:
        """Count what the step computed; take back what it planned and did not compute.

        `ahead`: the next step, if it was submitted; it starts behind all tokens that this one planned.
        """
        self._queues.advance(step.planned, step.plan.counts)
        for sequence in step.forked:
            self._queues.set_computed(sequence, sequence.num_prompt_tokens)
        for sequence, num_tokens in truncations(step, result) if result.rows else ():
            assert ahead is None or sequence not in ahead.planned, "the step in flight needs all planned tokens"
            self._queues.set_computed(sequence, sequence.num_computed_tokens - num_tokens)
            self._cache.truncate(sequence.seq_id, sequence.num_computed_tokens)
        for sequence in late_sequences(step, result) if result.rows else ():
            assert ahead is None or sequence not in ahead.planned, "the step in flight needs a token of each row"
            self._queues.set_computed(sequence, sequence.num_computed_tokens - 1)
            self._cache.rewind(sequence.seq_id)

    def record(self, step: PlanBuilder, result: StepResult, ahead: PlanBuilder | None) -> None:
        """Append tokens to sequences and candidates to beam searches. `ahead`: the next step, if it was submitted.

        If that raises, `step.at` is the request that was being recorded: it answers for the failure alone.
        """
        owners, token_ids, logprobs = step.sampled, result.token_ids, result.logprobs
        if result.rows or step.plan.drafts:
            self._record_rows(step, result, ahead)
            owners, token_ids, logprobs = sampled_alone(step, result)
        self._record_tokens(step, owners, token_ids, logprobs)
        if self.searches is not None:
            self._advance_searches(step, self.searches)
        step.at = None

    def _advance_searches(self, step: PlanBuilder, searches: Searches) -> None:
        """Advance the beam searches that this step has answered; finish those that are over."""
        for request in searches.take_answered():
            step.at = request
            if answers := searches.advance(request):
                for sequence in list(request.live):
                    self._finish(request, sequence)
                self.deltas += answers

    def _record_tokens(
        self, step: PlanBuilder, owners: list[tuple[Request, Sequence]], token_ids: list[int],
        logprobs: list[TokenLogprobs | None] | None,
    ) -> None:  # fmt: skip
        """Append one token to each sequence: those of most rows, which have no result of their own."""
        records, is_running = logprobs or repeat(None, len(token_ids)), SequenceStatus.RUNNING
        request: Request | None = None
        deltas, searches = self.deltas, self.searches
        self._order.charge_outputs(owners)
        try:
            for (request, sequence), token, candidates in zip(owners, token_ids, records, strict=True):
                if sequence.status is not is_running:
                    continue                                            # failed, aborted during the step, or padding
                if searches is not None and isinstance(request.task, BeamSearch):
                    searches.answer(request, sequence, candidates)
                    continue
                delta = check_stop(request, sequence, token, candidates)
                if delta.finish_reason is not None:
                    self._complete(request, sequence)
                sequence.token_ids.output.append(token)
                deltas.append(delta)
        except BaseException:
            step.at = request
            raise

    def _record_rows(self, step: PlanBuilder, result: StepResult, ahead: PlanBuilder | None) -> None:
        """Record the rows that have results of their own."""
        planned_ahead = set() if ahead is None else set(ahead.planned)
        num_drafts = {each.row: len(each.token_ids) for each in step.plan.drafts}
        assert num_drafts.keys() <= result.rows.keys(), "a row has drafts and no result of its own"
        for request, sequence, row in row_results(step, result, self._queues.running):
            step.at = request
            num_drafted, is_ahead = num_drafts.get(sequence.row, 0), sequence in planned_ahead
            self._record_row(request, sequence, row, num_drafted, is_ahead=is_ahead)
        step.at = None

    def _record_row(
        self, request: Request, sequence: Sequence, row: RowResult, num_drafts: int, *, is_ahead: bool
    ) -> None:
        """Append any number of tokens to a sequence; finish it at the first that ends it; store its drafts.

        `num_drafts`: that the step has verified for it. `is_ahead`: the next step was submitted, and computes the
        sequence.
        """
        if sequence.status is not SequenceStatus.RUNNING:
            return
        if self.searches is not None and isinstance(request.task, BeamSearch):
            if row.logprobs:
                self.searches.answer(request, sequence, row.logprobs[0])
            return
        num_known = sequence.num_tokens
        assert not row.token_ids or sequence.num_computed_tokens >= num_known, "a token behind uncomputed ones"
        delta = append_tokens(request, sequence, row)
        if num_drafts and row.token_ids:
            delta.num_draft_tokens, delta.num_accepted_tokens = num_drafts, min(len(row.token_ids) - 1, num_drafts)
        self._order.charge_outputs([(request, sequence)] * len(delta.token_ids))
        if delta.finish_reason is not None:
            self._queues.set_computed(sequence, min(sequence.num_computed_tokens, sequence.num_tokens))
            self._complete(request, sequence)
        else:
            assert not is_ahead or sequence.num_tokens == num_known + 1, "the step in flight needs rows of one token"
            assert sequence.num_computed_tokens < sequence.num_tokens, "a row without a token to compute"
            if row.drafts and not is_ahead:
                drafts = tuple(row.drafts[: request.max_tokens - sequence.num_output_tokens - 1])
                self._queues.set_drafts(sequence, drafts)
        if delta.token_ids or delta.finish_reason is not None or delta.pooled is not None:
            self.deltas.append(delta)

    def fail(self, failures: Mapping[int, str], at_fault: Mapping[int, str]) -> None:
        """Finish the requests that own these rows, for the reasons given; their blocks leave the prefix cache.

        `at_fault`: the fields of those requests that have failed by themselves.
        """
        for request in [r for r in self._queues.running if any(sequence.row in failures for sequence in r.live)]:
            index, row = next((s.index, s.row) for s in request.live if s.row in failures)
            for sequence in list(request.live):
                self._cache.invalidate(sequence.seq_id)
                self._queues.set_computed(sequence, 0)
                self._finish(request, sequence)
            delta = SequenceDelta(request.request_id, index, [], error=failures[row], param=at_fault.get(row))
            self.deltas.append(delta)

    def store_prompt_logprobs(self, chunk: PromptLogprobsChunk) -> None:
        """Store the logprobs of prompt positions that are not known yet: a recomputed prompt returns them again."""
        request = next((r for r in self._queues.running if any(s.row == chunk.row for s in r.live)), None)
        if request is None:
            return                                                      # aborted while the step ran
        known = 1 + len(request.prompt_logprobs)
        request.prompt_logprobs.extend(chunk.tokens[max(0, known - chunk.start) :])
        if chunk.scores:
            params = request.params
            first_row = max(0, chunk.start - 1 - (params.prompt_logprob_start or 0))
            begin = first_row * width_of(params.prompt_logprob_token_ids) * SCORE_BYTES
            request.prompt_scores += chunk.scores[max(0, len(request.prompt_scores) - begin) :]
