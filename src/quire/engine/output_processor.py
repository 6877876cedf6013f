"""The last stop of a request: token records become text, logprobs and finish reasons for the user.

The processor's cut is the truth: a stop string is text, so only here is it found, and text, token ids, logprobs and
finish_reason end with it even if the engine has gone on. Used by `LLM` and by the server, so it loads no torch.

Readers pull: a step says which requests have something new, and `output` hands it out when its reader is ready. What a
slow reader has left lying is joined to what comes later, so nothing piles up but the answer itself.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from quire.core.errors import RequestFailedError
from quire.core.outputs import (
    WAIT_REASONS,
    Admission,
    FinishReason,
    Logprob,
    Preemption,
    RequestMetrics,
    RequestOutput,
    SequenceDelta,
)
from quire.engine.branch_output import BranchOutput, logprob_dict
from quire.engine.input_processor import PreparedRequest
from quire.text.tokenizer import Tokenizer

# What `output` gives: all of a request at its end; all of it so far, step by step; what is new, step by step.
OutputKind = Literal["final", "cumulative", "delta"]


class EndedRequest(NamedTuple):
    """What a request was like, when its last branch has ended."""

    metrics: RequestMetrics
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reasons: list[FinishReason]


class ProcessedStep(NamedTuple):
    """What a step means to users, to the engine, and to whoever counts.

    `ready`: requests whose `output` has something new; a "final" one only at its end.
    `finish`: (request_id, index) of branches that a stop string ended and that the engine still runs.
    `begun`: requests that gave their first token. `gaps_s`: seconds between two tokens of a branch, for each pair.
    `num_output_tokens`: given to users in this step, so without those behind a stop string.
    `failed`: requests whose tokens could not be had or taken, and why; they are forgotten, and the engine may still run
    them.
    """

    ready: list[int]
    finish: list[tuple[int, int]]
    begun: list[tuple[RequestMetrics, int]]      # with the number of prompt tokens
    gaps_s: list[float]
    ended: list[EndedRequest]
    num_output_tokens: int = 0
    failed: Sequence[tuple[int, Exception]] = ()


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """A request whose last output has not been taken."""

    prepared: PreparedRequest
    external_id: str
    kind: OutputKind
    tokenizer: Tokenizer | None                  # None: no text
    metrics: RequestMetrics
    branches: list[BranchOutput]
    num_unfinished: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class OutputProcessor:
    """Holds what every request has given until its last output is taken. Without a tokenizer, text stays empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[int, _OpenRequest] = {}

    def __contains__(self, request_id: int) -> bool:
        """Whether a request has begun, and its last output has not been taken."""
        return request_id in self._requests

    def __len__(self) -> int:
        """Count the requests that are held."""
        return len(self._requests)

    def add(
        self, prepared: PreparedRequest, *, external_id: str, arrival_s: float, kind: OutputKind = "final"
    ) -> RequestMetrics:
        """Begin a request, and return where the times of its life are taken down. Its outputs carry `external_id`."""
        request, params = prepared.request, prepared.request.params
        assert request.request_id not in self._requests, f"request {request.request_id} added twice"
        tokenizer = self._tokenizer if params.detokenize else None
        assert tokenizer is not None or not params.stop, "stop strings are found in text, and there is none"
        branches = [BranchOutput(index, tokenizer, request.prompt_token_ids, params) for index in range(params.n)]
        metrics = RequestMetrics(arrival_s)
        opened = _OpenRequest(prepared, external_id, kind, tokenizer, metrics, branches, num_unfinished=params.n)
        self._requests[request.request_id] = opened
        return metrics

    def note_scheduled(self, preempted: Iterable[int], admissions: Iterable[Admission], now_s: float) -> None:
        """Take down who had to give way, and who began to run, or ran again: each return is an admission, too."""
        for request_id in preempted:
            if request_id in self._requests:
                preemptions = self._requests[request_id].metrics.preemptions
                _note_recovery(preemptions, now_s)
                preemptions.append(Preemption(now_s))
        for admission in admissions:
            if admission.request_id in self._requests:
                _note_admission(self._requests[admission.request_id].metrics, admission, now_s)

    def process(self, deltas: Iterable[SequenceDelta], now_s: float) -> ProcessedStep:
        """Take what a step added. Deltas of branches and requests that have ended are ignored.

        A fault in one request fails that request.
        """
        step = ProcessedStep([], [], [], [], [])
        touched: dict[int, _OpenRequest] = {}
        num_output_tokens, failed = 0, list[tuple[int, Exception]]()
        for delta in deltas:
            request = self._requests.get(delta.request_id)
            if request is None or not request.num_unfinished:
                continue
            if delta.error is None and request.branches[delta.index].finish_reason is not None:
                continue                            # but an error is one of the whole request
            try:
                num_output_tokens += _extend(request, delta, now_s, step)
            except Exception as error:
                failed.append((delta.request_id, error))
                touched.pop(delta.request_id, None)
                self.drop(delta.request_id)
                continue
            if request.branches[delta.index].finish_reason is not None:
                if delta.finish_reason is None:
                    step.finish.append((delta.request_id, delta.index))
                request.num_unfinished -= 1
                if not request.num_unfinished:
                    step.ended.append(_end(request, now_s))
            if request.kind != "final" or not request.num_unfinished:
                touched[delta.request_id] = request
        step.ready.extend(touched)
        return step._replace(num_output_tokens=num_output_tokens, failed=failed)

    def abort(self, request_id: int, now_s: float) -> EndedRequest | None:
        """End a request; its unfinished branches end with "abort". None if it has ended; KeyError if it is not here."""
        request = self._requests[request_id]
        if not request.num_unfinished:
            return None
        for branch in request.branches:
            if branch.finish_reason is None:
                with suppress(Exception):  # nobody wants its last text
                    branch.finish("abort")
        request.num_unfinished = 0
        return _end(request, now_s)

    def output(self, request_id: int) -> RequestOutput:
        """Return what a request has given: with "delta" only what is new. If it has ended, forget it."""
        request = self._requests[request_id]
        is_finished = request.num_unfinished == 0
        if is_finished:
            del self._requests[request_id]
        prompt_logprobs = request.prompt_logprobs
        if request.kind == "delta":
            outputs = [branch.take() for branch in request.branches if branch.has_news]
            request.prompt_logprobs = None
        else:
            outputs = [branch.snapshot() for branch in request.branches]
        return RequestOutput(
            request_id=request.external_id,
            prompt=request.prepared.prompt.text,
            prompt_token_ids=request.prepared.request.prompt_token_ids,
            outputs=outputs,
            finished=is_finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.metrics.num_cached_tokens,
            metrics=replace(request.metrics),
        )

    def drop(self, request_id: int) -> None:
        """Forget a request, whether it has ended or not, if it is here."""
        self._requests.pop(request_id, None)


def _note_admission(metrics: RequestMetrics, admission: Admission, now_s: float) -> None:
    """Take down that a request begins to run, or runs again."""
    metrics.num_preemptions, metrics.num_cached_tokens = admission.num_preemptions, admission.num_cached_tokens
    counts = zip(WAIT_REASONS, admission.waited, strict=False)
    waited: dict[str, int] = {reason: count for reason, count in counts if count > 0}
    if metrics.first_scheduled_s is None:
        metrics.first_scheduled_s, metrics.waited_steps = now_s, waited
    elif metrics.preemptions and metrics.preemptions[-1].returned_s is None:
        last = metrics.preemptions[-1]
        last.returned_s, last.waited_steps = now_s, waited
        last.num_recomputed_tokens = admission.num_recomputed_tokens
        last.num_swapped_blocks = admission.num_swapped_blocks


def _note_recovery(preemptions: list[Preemption], now_s: float) -> None:
    """Take down that the last preemption, if any, costs no more."""
    if preemptions and preemptions[-1].recovered_s is None:
        preemptions[-1].recovered_s = now_s


def _extend(opened: _OpenRequest, delta: SequenceDelta, now_s: float, step: ProcessedStep) -> int:
    """Add a delta to its branch, and what rides on the first one to the request. Return how many tokens were taken.

    RequestFailedError if the delta says that there is nothing to add.
    """
    if delta.error is not None:
        raise RequestFailedError(delta.error)
    request, branch = opened.prepared.request, opened.branches[delta.index]
    if opened.metrics.first_token_s is None:
        opened.metrics.first_token_s = now_s
        step.begun.append((opened.metrics, len(request.prompt_token_ids)))
    if branch.last_token_s is not None:
        step.gaps_s.append(now_s - branch.last_token_s)
    elif delta.index == 0 and request.params.prompt_logprobs is not None:
        positions = delta.prompt_logprobs or []     # of all but the first token: nothing stands before that
        opened.prompt_logprobs = [None, *(logprob_dict(position, opened.tokenizer) for position in positions)]
    _note_recovery(opened.metrics.preemptions, now_s)
    branch.last_token_s = now_s
    num_before = branch.num_tokens
    branch.extend(delta)
    return branch.num_tokens - num_before


def _end(opened: _OpenRequest, now_s: float) -> EndedRequest:
    """Take down that a request's last branch has ended."""
    opened.metrics.finished_s = now_s
    reasons = [branch.finish_reason for branch in opened.branches if branch.finish_reason is not None]
    num_output_tokens = sum(branch.num_tokens for branch in opened.branches)
    return EndedRequest(opened.metrics, len(opened.prepared.request.prompt_token_ids), num_output_tokens, reasons)
