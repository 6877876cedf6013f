"""Output processing: token records become text, logprobs and finish reasons, branch by branch of a request.

Stop strings are found here, in the text. Text, token ids, logprobs and finish_reason end with the stop string, even if
the engine has computed more tokens. Used by `LLM` and by the server, so it loads no torch.

Readers pull: a processed step names the requests with new output, and `output` returns it when the reader is ready.
Output that was not read is joined to later output, so memory is bounded by the answers themselves.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from msgspec import structs

from quire.core.deltas import WAIT_REASONS, Admission, FinishReason, SequenceDelta, TokenLogprobs
from quire.core.errors import DeadlineExceededError, InvalidRequestError, RequestFailedError
from quire.core.logprob_table import LogprobBuffer, LogprobTable, Position, unpacked, width_of
from quire.core.outputs import (
    MAX_CHUNKS_KEPT,
    MAX_PREEMPTIONS_KEPT,
    CompletionOutput,
    Logprob,
    Preemption,
    PromptChunk,
    RequestMetrics,
    RequestOutput,
)
from quire.core.sampling_params import SamplingParams
from quire.engine.requests.input_processor import PreparedRequest
from quire.engine.requests.reasoning_gate import ReasoningMarkers
from quire.engine.requests.stop_strings import StopMatcher, StopStringFinder
from quire.text.tokenizer import IncrementalDetokenizer, Tokenizer, incremental_detokenizer


class CompletionBuilder:
    """One choice of a request, extended by deltas until it ends; later deltas are ignored.

    `tokenizer` is None where no text is wanted or possible. Text that may begin a stop string is not yet in `text`.
    Read it by `snapshot` or by `drain`, never by both. `matcher` is that of the request's stop strings, shared by its
    branches; None if it has none. With `packs_logprobs`, outputs have `packed_logprobs` instead of `logprobs`. Special
    tokens among `kept_token_ids` are text in any case. Stop strings are looked for behind the `reasoning`.
    """

    def __init__(
        self, index: int, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams,
        matcher: StopMatcher | None, *, packs_logprobs: bool, kept_token_ids: frozenset[int] = frozenset(),
        reasoning: ReasoningMarkers | None = None,
    ) -> None:  # fmt: skip
        self.index = index
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = incremental_detokenizer(
                tokenizer, prompt_token_ids, params.skip_special_tokens, kept_token_ids
            )
        self._stops: StopStringFinder | None = None
        if matcher is not None:
            include = params.include_stop_str_in_output
            self._stops = StopStringFinder(matcher, include=include, reasoning=reasoning)
        self.num_tokens = 0                             # all tokens, drained or not
        self.last_token_s: float | None = None          # set by the caller of `extend`
        self.has_new_output = False                     # since the last drain
        self._cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        has_logprobs = params.logprobs is not None
        self._logprobs: list[dict[int, Logprob]] | None = [] if has_logprobs and not packs_logprobs else None
        self._packed: LogprobBuffer | None = LogprobBuffer() if has_logprobs and packs_logprobs else None

    def extend(self, delta: SequenceDelta) -> None:
        """Append the tokens of a step, up to the one that completes a stop string."""
        self.has_new_output = True
        if self._stops is None:
            self._append_tokens(delta.token_ids, delta.logprobs)
            visible = delta.token_ids if delta.finish_reason is None else self._text_tokens(delta)
            if self._detokenizer is not None and visible:
                self._pieces.append(self._detokenizer.append(visible))
        else:
            self._extend_to_stop(delta)
        if delta.cumulative_logprob is not None:
            self._cumulative_logprob = delta.cumulative_logprob
        if delta.finish_reason is not None and self.finish_reason is None:
            self.finish(delta.finish_reason, delta.stop_reason)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the branch. Text that was held back is appended, unless it completes a stop string."""
        self.finish_reason, self._stop_reason, self.has_new_output = reason, stop_reason, True
        if self._detokenizer is None:
            return
        text = self._detokenizer.finish()
        if self._stops is None:
            self._pieces.append(text)
            return
        if not self._find_stop(self._stops, text, is_last=True):
            self._pieces.append(self._stops.flush())

    def snapshot(self) -> CompletionOutput:
        """Return the whole output so far, in new lists except for packed logprobs.

        Linear in the length of the output.
        """
        self._pieces = ["".join(self._pieces)]
        return self._output(self._token_ids.copy(), None if self._logprobs is None else self._logprobs.copy())

    def drain(self) -> CompletionOutput:
        """Return the output since the last drain; `cumulative_logprob` is that of all tokens."""
        output = self._output(self._token_ids, self._logprobs)
        self._pieces, self._token_ids, self.has_new_output = [], [], False
        self._logprobs = None if self._logprobs is None else []
        self._packed = None if self._packed is None else LogprobBuffer()
        return output

    def _output(self, token_ids: list[int], logprobs: list[dict[int, Logprob]] | None) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text="".join(self._pieces),
            token_ids=token_ids,
            cumulative_logprob=self._cumulative_logprob,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            packed_logprobs=self._packed,
        )

    def _append_tokens(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """Append tokens and, if requested, their logprobs."""
        self._token_ids += token_ids
        self.num_tokens += len(token_ids)
        if self._cumulative_logprob is None:
            return
        assert logprobs is not None, "logprobs were requested and are missing"
        assert len(logprobs) == len(token_ids), f"{len(logprobs)} logprobs for {len(token_ids)} tokens"
        for position in logprobs:
            self._cumulative_logprob += position.logprobs[0]
        if self._packed is not None:
            self._packed.extend(logprobs)
        elif self._logprobs is not None:
            self._logprobs += [logprob_dict(position, self._tokenizer) for position in logprobs]

    def _text_tokens(self, delta: SequenceDelta) -> list[int]:
        """Return the tokens that become text: all but a stop token, unless include_stop_str_in_output is set."""
        has_stop_token = delta.finish_reason == "stop" and not delta.ends_with_text
        if has_stop_token and not self._params.include_stop_str_in_output:
            return delta.token_ids[:-1]
        return delta.token_ids

    def _extend_to_stop(self, delta: SequenceDelta) -> None:
        """Append tokens one by one, up to the one that completes a stop string."""
        assert self._detokenizer is not None, "stop strings are found in text"
        assert self._stops is not None, "there are stop strings"
        num_visible = len(self._text_tokens(delta))
        for position, token_id in enumerate(delta.token_ids):
            logprobs = None if delta.logprobs is None else delta.logprobs[position : position + 1]
            self._append_tokens([token_id], logprobs)
            if position < num_visible:
                self._find_stop(self._stops, self._detokenizer.append([token_id]))
            if self.finish_reason is not None:
                return

    def _find_stop(self, stops: StopStringFinder, text: str, *, is_last: bool = False) -> bool:
        """Append the text of the last token, or end before (or after) the stop string that it completes, if any.

        As with stop tokens, the first token that may end the branch is the `min_tokens`-th. Reasoning is not searched.
        """
        may_stop = self.num_tokens >= self._params.min_tokens
        certain, stop = stops.feed(text, may_stop=may_stop, is_last=is_last)
        self._pieces.append(certain)
        if stop is not None:
            self.finish_reason, self._stop_reason = "stop", stop
        return stop is not None


def logprob_dict(position: Position, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Return the candidates of one position by token id, the token of that position first."""
    return {
        token_id: Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(token_id))
        for token_id, logprob, rank in zip(*position, strict=True)
    }


# What `output` returns: the whole output at the end; the output so far, per step; the new output, per step.
OutputKind = Literal["final", "cumulative", "delta"]

# Work per slice: a stream with 20 candidates per token is 37 units and 0.1 ms, sending included, so a slice takes 3 to
# 5 ms of the event loop.
SLICE_UNITS = 1024
PART_TOKENS = 512
_DELTA_UNITS = 16


class FinishedRequest(NamedTuple):
    """Figures of a request at the end of its last branch."""

    metrics: RequestMetrics
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reasons: list[FinishReason]
    max_tokens: int = 1          # limit of each answer, resolved
    num_gaps: int = 0            # between two tokens of an answer
    num_late_gaps: int = 0       # longer than the target
    met_deadline: bool | None = None  # None: the request had none


@dataclass(slots=True)
class ProcessedStep:
    """Results of a step, or of a slice of it, for readers, for the engine and for metrics.

    `ready`: requests with new `output`; those of kind "final" only at their end.
    `stopped`: (request_id, index) of branches ended by a stop string that the engine still runs.
    `first_tokens`: requests that got their first token. `itl_s`: inter-token latencies, in seconds.
    `num_output_tokens`: without those after a stop string.
    `failed`: requests without an output, with the error; they are dropped, and the engine may still run
    them.
    """

    ready: list[int] = field(default_factory=list)
    stopped: list[tuple[int, int]] = field(default_factory=list)
    first_tokens: list[RequestMetrics] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0                   # sum over the requests in `first_tokens`
    failed: list[tuple[int, Exception]] = field(default_factory=list)
    is_last: bool = True                         # the last slice of the step

    def add(self, later: "ProcessedStep") -> None:
        """Append the results of a later slice of the same step."""
        self.ready += later.ready
        self.stopped += later.stopped
        self.first_tokens += later.first_tokens
        self.itl_s += later.itl_s
        self.finished += later.finished
        self.num_output_tokens += later.num_output_tokens
        self.num_prompt_tokens += later.num_prompt_tokens
        self.failed += later.failed


@dataclass(slots=True, eq=False)
class _RequestState:
    """A request with a last output that has not been read."""

    prepared: PreparedRequest
    external_id: str
    kind: OutputKind
    tokenizer: Tokenizer | None                  # None: no text
    packs_logprobs: bool
    metrics: RequestMetrics
    num_unfinished: int
    prompt_token_ids: list[int]                  # as outputs have them
    branches: dict[int, CompletionBuilder] = field(default_factory=dict)  # branches with a token, by index
    matcher: StopMatcher | None = None           # shared by all branches, once there is one
    prompt_logprobs: LogprobTable | None = None
    prompt_scores: bytes | None = None           # float32, of params.prompt_logprob_token_ids
    pooled: bytes | None = None                  # float32 vector
    num_gaps: int = 0                            # between two tokens of a branch
    num_late_gaps: int = 0
    is_late: bool = False                        # its deadline has passed

    def branch(self, index: int) -> CompletionBuilder:
        """Return a branch; it is created with its first token, so a waiting request holds none."""
        branch = self.branches.get(index)
        if branch is None:
            request, params = self.prepared.request, self.prepared.request.params
            if params.stop and self.matcher is None:
                self.matcher = StopMatcher(params.stop)
            branch = self.branches[index] = CompletionBuilder(
                index, self.tokenizer, request.prompt_token_ids, params, self.matcher,
                packs_logprobs=self.packs_logprobs, kept_token_ids=self.prepared.kept_token_ids,
                reasoning=self.prepared.reasoning,
            )  # fmt: skip
        return branch

    def whole_outputs(self) -> list[CompletionOutput]:
        """Return the output of every branch in order; a branch without a token ends with the request."""
        outputs = []
        for index in range(self.prepared.request.params.n):
            branch = self.branches.get(index) or self.branch(index)
            if branch.finish_reason is None and not self.num_unfinished:
                branch.finish("abort")
            outputs.append(branch.snapshot())
        return outputs


class OutputProcessor:
    """Outputs of every request until the last one has been read. Without a tokenizer, text is empty.

    With `is_packed`, for a server, outputs have tables of logprobs instead of dictionaries: `packed_logprobs` and
    `packed_prompt_logprobs`. Their `prompt_token_ids` are empty: a list of them would be held while a request waits.
    Gaps between tokens that are longer than `itl_target_s` are counted, by request.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, is_packed: bool = False, itl_target_s: float = math.inf
    ) -> None:
        self._tokenizer, self._is_packed, self._itl_target_s = tokenizer, is_packed, itl_target_s
        self._requests: dict[int, _RequestState] = {}

    def __contains__(self, request_id: int) -> bool:
        """True if a request was added, and its last output has not been read."""
        return request_id in self._requests

    def __len__(self) -> int:
        """Count the requests that are held."""
        return len(self._requests)

    def add(
        self, prepared: PreparedRequest, *, external_id: str, arrival_s: float, kind: OutputKind = "final"
    ) -> RequestMetrics:
        """Add a request; return its metrics, which are kept up to date. Its outputs carry `external_id`."""
        request, params = prepared.request, prepared.request.params
        assert request.request_id not in self._requests, f"request {request.request_id} added twice"
        tokenizer = self._tokenizer if params.detokenize else None
        assert tokenizer is not None or not params.stop, "stop strings are found in text, and there is none"
        metrics = prepared.metrics or RequestMetrics(arrival_s)
        packs = self._is_packed
        token_ids = [] if packs else prepared.prompt.token_ids.tolist()
        opened = _RequestState(prepared, external_id, kind, tokenizer, packs, metrics, params.n, token_ids)
        self._requests[request.request_id] = opened
        return metrics

    def record_scheduled(self, preempted: Iterable[int], admissions: Iterable[Admission], now_s: float) -> None:
        """Record preempted requests, and those admitted: for the first time or after a preemption."""
        for request_id in preempted:
            if request_id in self._requests:
                _record_preemption(self._requests[request_id].metrics, now_s)
        for admission in admissions:
            if admission.request_id in self._requests:
                _record_admission(self._requests[admission.request_id].metrics, admission, now_s)

    def record_chunks(self, chunks: Iterable[tuple[int, int]], now_s: float) -> None:
        """Record steps of prompts that are computed in several: request ids, and tokens that are computed now."""
        for request_id, num_computed in chunks:
            if request_id in self._requests:
                kept = self._requests[request_id].metrics.chunks
                if len(kept) < MAX_CHUNKS_KEPT and (not kept or kept[-1].num_computed_tokens != num_computed):
                    kept.append(PromptChunk(now_s, num_computed))

    def process(self, deltas: Iterable[SequenceDelta], now_s: float) -> ProcessedStep:
        """Process the deltas of a step. Deltas of branches and requests that have ended are ignored.

        An error in one request fails that request only.
        """
        slices = self.process_in_slices(deltas, now_s)
        whole = next(slices)
        for step in slices:
            whole.add(step)
        whole.is_last = True
        whole.ready = [request_id for request_id in dict.fromkeys(whole.ready) if request_id in self._requests]
        return whole

    def process_in_slices(self, deltas: Iterable[SequenceDelta], now_s: float) -> Iterator[ProcessedStep]:
        """As `process`, in slices of SLICE_UNITS: between two of them requests may end and be added."""
        step, num_units = ProcessedStep(), 0
        touched: dict[int, _RequestState] = {}
        for delta in deltas:
            is_short = len(delta.token_ids) <= PART_TOKENS
            for part, is_first in ((delta, True),) if is_short else _parts(delta):
                if num_units >= SLICE_UNITS:
                    step.ready.extend(touched)
                    step.is_last = False
                    yield step
                    step, num_units, touched = ProcessedStep(), 0, {}
                num_units += _DELTA_UNITS + len(part.token_ids) if part.logprobs is None else work_units(part)
                self._process(part, is_first, now_s, step, touched)
        step.ready.extend(touched)
        yield step

    def _process(
        self, delta: SequenceDelta, is_first: bool, now_s: float, step: ProcessedStep, touched: dict[int, _RequestState]
    ) -> None:
        """Add a delta, or a part of one, to its request, and its results to `step`."""
        request = self._requests.get(delta.request_id)
        if request is None or not request.num_unfinished:
            return
        try:
            branch = request.branches.get(delta.index) or request.branch(delta.index)
            if delta.error is None and branch.finish_reason is not None:
                return                              # but an error concerns the whole request
            num_gaps = len(step.itl_s)
            step.num_output_tokens += _extend(request, branch, delta, is_first, now_s, step)
            if len(step.itl_s) > num_gaps:
                request.num_gaps += 1
                request.num_late_gaps += step.itl_s[-1] > self._itl_target_s
        except Exception as error:
            step.failed.append((delta.request_id, error))
            touched.pop(delta.request_id, None)
            self.drop(delta.request_id)
            return
        if branch.finish_reason is not None:
            request.is_late |= delta.is_late
            if delta.finish_reason is None:
                step.stopped.append((delta.request_id, delta.index))
            request.num_unfinished -= 1
            if not request.num_unfinished:
                step.finished.append(_end(request, now_s))
        if request.kind != "final" or not request.num_unfinished:
            touched[delta.request_id] = request

    def abort(self, request_id: int, now_s: float) -> FinishedRequest | None:
        """End a request; its unfinished branches end with "abort". None if it has ended; KeyError if unknown."""
        request = self._requests[request_id]
        if not request.num_unfinished:
            return None
        for branch in request.branches.values():
            if branch.finish_reason is None:
                with suppress(Exception):  # its last text is dropped
                    branch.finish("abort")
        request.num_unfinished = 0
        return _end(request, now_s)

    def output(self, request_id: int) -> RequestOutput:
        """Return the output of a request, only the new part if its kind is "delta". Drops a request that has ended."""
        request = self._requests[request_id]
        params = request.prepared.request.params
        is_finished = request.num_unfinished == 0
        if is_finished:
            del self._requests[request_id]
        prompt_logprobs, prompt_scores = request.prompt_logprobs, request.prompt_scores
        if request.kind == "delta":
            branches = [branch for _, branch in sorted(request.branches.items()) if branch.has_new_output]
            outputs = [branch.drain() for branch in branches]
            request.prompt_logprobs = request.prompt_scores = None
        else:
            outputs = request.whole_outputs()
        return RequestOutput(
            request_id=request.external_id,
            prompt=request.prepared.prompt.text,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            finished=is_finished,
            prompt_logprobs=(
                None if self._is_packed or prompt_logprobs is None else _unpacked(prompt_logprobs, request.tokenizer)
            ),
            packed_prompt_logprobs=prompt_logprobs if self._is_packed else None,
            prompt_token_id_logprobs=(
                None if prompt_scores is None else unpacked(prompt_scores, width_of(params.prompt_logprob_token_ids))
            ),
            num_cached_tokens=request.metrics.num_cached_tokens,
            metrics=request.metrics if self._is_packed else replace(request.metrics),
            pooled=None if request.pooled is None else array("f", request.pooled),
        )

    def drop(self, request_id: int) -> None:
        """Drop a request, ended or not; unknown ones are ignored."""
        self._requests.pop(request_id, None)


def _record_preemption(metrics: RequestMetrics, now_s: float) -> None:
    """Count a preemption, and record it among the last MAX_PREEMPTIONS_KEPT."""
    _record_recovery(metrics.preemptions, now_s)
    metrics.num_preemptions += 1
    metrics.preemptions.append(Preemption(now_s))
    del metrics.preemptions[:-MAX_PREEMPTIONS_KEPT]


def _record_admission(metrics: RequestMetrics, admission: Admission, now_s: float) -> None:
    """Record the first admission of a request, or its return after a preemption."""
    metrics.num_preemptions, metrics.num_cached_tokens = admission.num_preemptions, admission.num_cached_tokens
    metrics.num_disk_tokens, metrics.num_peer_tokens = admission.num_disk_tokens, admission.num_peer_tokens
    metrics.num_stateless_tokens = admission.num_stateless_tokens
    counts = zip(WAIT_REASONS, admission.waited, strict=False)
    waited: dict[str, int] = {reason: count for reason, count in counts if count > 0}
    if metrics.first_scheduled_s is None:
        metrics.first_scheduled_s, metrics.waited_steps = now_s, waited
    elif metrics.preemptions and metrics.preemptions[-1].returned_s is None:
        last = metrics.preemptions[-1]
        last.returned_s, last.waited_steps = now_s, waited
        last.num_recomputed_tokens = admission.num_recomputed_tokens
        last.num_swapped_blocks = admission.num_swapped_blocks


def _record_recovery(preemptions: list[Preemption], now_s: float) -> None:
    """Record when the last preemption was made up for."""
    if preemptions and preemptions[-1].recovered_s is None:
        preemptions[-1].recovered_s = now_s


def work_units(delta: SequenceDelta) -> int:
    """Return the work of processing, writing and sending a delta, in units of one logprob candidate."""
    num_units = _DELTA_UNITS + len(delta.token_ids)
    if delta.logprobs is not None:
        num_units += sum(len(position.token_ids) for position in delta.logprobs)
    return num_units


def _parts(delta: SequenceDelta) -> Iterator[tuple[SequenceDelta, bool]]:
    """Yield a long delta in parts of at most PART_TOKENS tokens, each with whether it is the first.

    A beam search returns whole answers in one delta. The finish reason is in the last part.
    """
    num_tokens = len(delta.token_ids)
    for begin in range(0, num_tokens, PART_TOKENS):
        end = begin + PART_TOKENS
        token_ids, logprobs = delta.token_ids[begin:end], delta.logprobs and delta.logprobs[begin:end]
        if end >= num_tokens:
            rest = structs.replace(delta, token_ids=token_ids, logprobs=logprobs)
            rest.prompt_logprobs = rest.prompt_scores = None
            yield rest, False
        else:
            prompt_logprobs = None if begin else delta.prompt_logprobs
            part = SequenceDelta(delta.request_id, delta.index, token_ids, logprobs, prompt_logprobs)
            part.prompt_scores = None if begin else delta.prompt_scores
            yield part, not begin


def _extend(
    opened: _RequestState, branch: CompletionBuilder, delta: SequenceDelta, is_first: bool, now_s: float,
    step: ProcessedStep,
) -> int:  # fmt: skip
    """Add a delta to its branch, and the prompt logprobs of the first one to the request; return the tokens appended.

    `is_first`: not the continuation of a delta in parts. RequestFailedError if the delta carries an error,
    InvalidRequestError if that is the fault of a field of the request, DeadlineExceededError if it is too late.
    """
    if delta.error is not None:
        if delta.is_late:
            raise DeadlineExceededError(delta.error, param=delta.param)
        if delta.param is not None:
            raise InvalidRequestError(delta.error, param=delta.param)
        raise RequestFailedError(delta.error)
    request = opened.prepared.request
    if opened.metrics.first_token_s is None:
        opened.metrics.first_token_s = now_s
        step.first_tokens.append(opened.metrics)
        step.num_prompt_tokens += len(request.prompt_token_ids)
    if branch.last_token_s is None:
        if delta.index == 0 and request.params.prompt_logprobs is not None:
            opened.prompt_logprobs = delta.prompt_logprobs or LogprobTable()
        opened.prompt_scores = opened.prompt_scores or delta.prompt_scores
    elif is_first and delta.token_ids:
        step.itl_s.append(now_s - branch.last_token_s)
    if opened.metrics.preemptions:
        _record_recovery(opened.metrics.preemptions, now_s)
    opened.metrics.num_draft_tokens += delta.num_draft_tokens
    opened.metrics.num_accepted_tokens += delta.num_accepted_tokens
    opened.pooled = delta.pooled or opened.pooled
    branch.last_token_s = now_s
    num_before = branch.num_tokens
    branch.extend(delta)
    return branch.num_tokens - num_before


def _unpacked(table: LogprobTable, tokenizer: Tokenizer | None) -> list[dict[int, Logprob] | None]:
    """Return the logprobs of a prompt as dictionaries; None for its first token."""
    return [None, *(logprob_dict(position, tokenizer) for position in table.positions(0, len(table)))]


def _end(opened: _RequestState, now_s: float) -> FinishedRequest:
    """Record the end of a request's last branch."""
    opened.metrics.finished_s = now_s
    request = opened.prepared.request
    num_output_tokens = 0
    reasons: list[FinishReason] = ["abort"] * request.params.n
    for index, branch in opened.branches.items():
        num_output_tokens += branch.num_tokens
        reasons[index] = branch.finish_reason or "abort"
    num_prompt_tokens = len(request.prompt_token_ids)
    return FinishedRequest(
        opened.metrics, num_prompt_tokens, num_output_tokens, reasons, request.max_tokens, opened.num_gaps,
        opened.num_late_gaps, not opened.is_late if request.has_deadline else None,
    )  # fmt: skip
