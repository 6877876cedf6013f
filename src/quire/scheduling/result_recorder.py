"""Recording of results: tokens, failures and logprobs of a step, applied to its sequences.

Most rows give one token each; the rows of `StepResult.rows` give more or fewer. End-of-sequence and stop tokens, and
max_tokens, are checked here. Stop strings are found in text, by the engine.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, compress, repeat

from quire.cache.manager import KVCacheManager
from quire.core.deltas import SequenceDelta, TokenLogprobs
from quire.core.logprob_table import SCORE_BYTES, LogprobTable, width_of
from quire.core.plan import PromptLogprobsChunk, RowResult, StepResult
from quire.core.pooling import BeamTask
from quire.core.sampling_params import RepetitionDetector, SamplingParams
from quire.core.sequence import Request, Sequence, SequenceStatus
from quire.scheduling.beam_search import BeamSearches
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.queues import RequestQueues
from quire.scheduling.waiting_lines import ByPriority

REPETITION_DETECTED = "repetition_detected"
Finish = Callable[[Request, Sequence], None]


class ResultRecorder:
    """Applies results to sequences and collects their deltas.

    `finish` ends a sequence; `complete` ends one that has its last token, which a static batch keeps as padding.
    `deltas`: recorded and not taken; a record that fails leaves those before it.
    """

    def __init__(
        self, cache: KVCacheManager, queues: RequestQueues, order: ByPriority, searches: BeamSearches, finish: Finish,
        complete: Finish,
    ) -> None:  # fmt: skip
        self._cache, self._queues, self._order, self._searches = cache, queues, order, searches
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
        for sequence, num_tokens in _truncations(step, result) if result.rows else ():
            assert ahead is None or sequence not in ahead.planned, "the step in flight needs all planned tokens"
            self._queues.set_computed(sequence, sequence.num_computed_tokens - num_tokens)
            self._cache.truncate(sequence.seq_id, sequence.num_computed_tokens)
        for sequence in _late_sequences(step, result) if result.rows else ():
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
            owners, token_ids, logprobs = _sampled_alone(step, result)
        self._record_tokens(step, owners, token_ids, logprobs)
        if self._searches.answered:
            self._advance_searches(step)
        step.at = None

    def _advance_searches(self, step: PlanBuilder) -> None:
        """Advance the beam searches that this step has answered; finish those that are over."""
        searches = self._searches
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
        """Append one token to each sequence: those of most rows, which have no result of their own.

        Most tokens end nothing, have no logprobs, and are not the first: they are recorded without a call for each.
        """
        records, is_running = logprobs or repeat(None, len(token_ids)), SequenceStatus.RUNNING
        request: Request | None = None
        deltas, goes_on = self.deltas, not step.plan.drafts
        if self._order.orders_running:
            self._order.charge_outputs(owners)
        try:
            for (request, sequence), token, candidates in zip(owners, token_ids, records, strict=True):
                if sequence.status is not is_running:
                    goes_on = False
                    continue                                            # failed, aborted during the step, or padding
                output = sequence.token_ids.output
                if (
                    0 < len(output) < request.max_tokens - 1 and request.is_plain and candidates is None
                    and token not in request.end_token_ids
                ):  # fmt: skip
                    delta = SequenceDelta(request.request_id, sequence.index, [token])
                    output.append(token)
                    deltas.append(delta)
                else:
                    goes_on = False
                    self._record_token(request, sequence, token, candidates)
            step.goes_on = goes_on and len(owners) == len(step.sampled)
        except BaseException:
            step.at = request
            raise

    def _record_token(
        self, request: Request, sequence: Sequence, token: int, candidates: TokenLogprobs | None
    ) -> None:
        """Append one token to a sequence, or its candidates to a beam search, with everything that may end it."""
        if isinstance(request.task, BeamTask):
            self._searches.answer(request, sequence, candidates)
            return
        delta = _check_stop(request, sequence, token, candidates)
        if delta.finish_reason is not None:
            self._complete(request, sequence)
        sequence.token_ids.output.append(token)
        self.deltas.append(delta)

    def _record_rows(self, step: PlanBuilder, result: StepResult, ahead: PlanBuilder | None) -> None:
        """Record the rows that have results of their own."""
        planned_ahead = set() if ahead is None else set(ahead.planned)
        num_drafts = {each.row: len(each.token_ids) for each in step.plan.drafts}
        assert num_drafts.keys() <= result.rows.keys(), "a row has drafts and no result of its own"
        for request, sequence, row in _row_results(step, result, self._queues.running):
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
        if isinstance(request.task, BeamTask):
            if row.logprobs:
                self._searches.answer(request, sequence, row.logprobs[0])
            return
        num_known = sequence.num_tokens
        assert not row.token_ids or sequence.num_computed_tokens >= num_known, "a token behind uncomputed ones"
        delta = _append_tokens(request, sequence, row)
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
        if request.prompt_logprobs is None:
            request.prompt_logprobs = LogprobTable()
        known = 1 + len(request.prompt_logprobs)
        request.prompt_logprobs.extend(chunk.tokens[max(0, known - chunk.start) :])
        if chunk.scores:
            params = request.params
            first_row = max(0, chunk.start - 1 - (params.prompt_logprob_start or 0))
            begin = first_row * width_of(params.prompt_logprob_token_ids) * SCORE_BYTES
            stored = request.prompt_scores or bytearray()
            stored += chunk.scores[max(0, len(stored) - begin) :]
            request.prompt_scores = stored


# --- stop checks --------------------------------------------------------------------------------------------------

def _check_stop(request: Request, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> SequenceDelta:
    """Return the delta of a sequence's next token; `finish_reason` is set if the token ends the sequence.

    One of the request's stop tokens ends it with its id as the stop_reason, the end-of-sequence token with none;
    neither counts before params.min_tokens. The token itself stays in the output.
    """
    num_output_tokens = len(sequence.token_ids.output) + 1
    delta = SequenceDelta(request.request_id, sequence.index, [token])
    if logprobs is not None:
        delta.logprobs = [logprobs]
    if num_output_tokens == 1 and sequence.index == 0:
        delta.prompt_logprobs = request.prompt_logprobs or None
        delta.prompt_scores = bytes(request.prompt_scores or b"") or None
    if num_output_tokens >= request.max_tokens:
        delta.finish_reason = "length"
    is_stop = token in request.stop_token_ids
    if (is_stop or token in request.eos_token_ids) and num_output_tokens >= request.params.min_tokens:
        delta.finish_reason, delta.stop_reason = "stop", token if is_stop else None
    detection = request.params.repetition_detection
    if detection is not None and delta.finish_reason is None and _repeats(request.params, sequence, token):
        delta.finish_reason, delta.stop_reason = "repetition", REPETITION_DETECTED
    return delta


def _repeats(params: SamplingParams, sequence: Sequence, token: int) -> bool:
    """Take the next token of a sequence; return whether a pattern has repeated, not before params.min_tokens."""
    assert params.repetition_detection is not None, "the request asks for it"
    if sequence.repetitions is None:
        sequence.repetitions = RepetitionDetector(params.repetition_detection)
    output = sequence.token_ids.output
    return sequence.repetitions.append(output, token) and len(output) + 1 >= params.min_tokens


def _append_tokens(request: Request, sequence: Sequence, row: RowResult) -> SequenceDelta:
    """Append a row's tokens to its sequence up to the first that ends it, and return them as one delta.

    A row that has ended with its last token ends by "stop", also where that token is the last of max_tokens.
    """
    asks_logprobs = request.params.logprobs is not None
    assert not (asks_logprobs and row.forced), "a forced token has no logprobs"
    assert not asks_logprobs or len(row.logprobs or ()) == len(row.token_ids), "a token without logprobs"
    whole = SequenceDelta(request.request_id, sequence.index, [], pooled=row.pooled)
    logprobs = chain(row.logprobs or (), repeat(None))
    for token, record in zip(chain(row.token_ids, row.forced), logprobs, strict=False):
        delta = _check_stop(request, sequence, token, record)
        sequence.token_ids.output.append(token)
        whole.token_ids.append(token)
        whole.prompt_logprobs = whole.prompt_logprobs or delta.prompt_logprobs
        whole.prompt_scores = whole.prompt_scores or delta.prompt_scores
        if delta.logprobs is not None:
            whole.logprobs = (whole.logprobs or []) + delta.logprobs
        if delta.finish_reason is not None:
            whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
            break
    is_whole = len(whole.token_ids) == len(row.token_ids) + len(row.forced)
    if row.has_ended and is_whole and whole.finish_reason != "stop":
        whole.finish_reason, whole.ends_with_text = "stop", True
    return whole


# --- rows with results of their own -------------------------------------------------------------------------------

def _truncations(step: PlanBuilder, result: StepResult) -> Iterator[tuple[Sequence, int]]:
    """Yield the sequences that still hold their rows and computed fewer tokens than planned, with how many fewer."""
    for row, sequence, count in zip(step.plan.rows, step.planned, step.plan.counts, strict=True):
        own = result.rows.get(row)
        if own is not None and own.num_computed is not None and sequence.row == row:
            assert 0 <= own.num_computed <= count, f"{own.num_computed} of {count} tokens computed"
            if own.num_computed < count:
                yield sequence, count - own.num_computed


def _late_sequences(step: PlanBuilder, result: StepResult) -> Iterator[Sequence]:
    """Yield the sequences that still hold their rows and were not sampled, for their masks were late."""
    sampled = dict(zip(step.plan.sample_rows, step.sampled, strict=True))
    for row, own in result.rows.items():
        if own.is_late and sampled[row][1].row == row:
            yield sampled[row][1]


def _sampled_alone(
    step: PlanBuilder, result: StepResult
) -> tuple[list[tuple[Request, Sequence]], list[int], list[TokenLogprobs | None] | None]:
    """Return the owners, tokens and logprobs of the samples of rows without a result of their own."""
    alone = [row not in result.rows for row in step.plan.sample_rows]
    logprobs = None if result.logprobs is None else list(compress(result.logprobs, alone))
    return list(compress(step.sampled, alone)), list(compress(result.token_ids, alone)), logprobs


def _row_results(
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
