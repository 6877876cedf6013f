"""The last stop of a request: token records become text, logprobs and finish reasons for the user.

The processor's cut is the truth: a stop string is text, so only here is it found, and text, token ids, logprobs and
finish_reason end with it even if the engine has gone on. Used by `LLM` and by the server, so it loads no torch.

Cost: a token is looked at once. A request that is not streamed is put together when it ends; a streamed one is put
together at each step that touched it, which is linear in its length.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.core.outputs import Logprob, RequestMetrics, RequestOutput, SequenceDelta, TokenLogprobs
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.engine.branch_output import BranchOutput, logprob_dict
from quire.text.tokenizer import Tokenizer


class ProcessedStep(NamedTuple):
    """What a step means to users, and to the engine.

    `outputs`: of requests that ended, and of streamed ones that the step touched; each is complete and independent.
    `finish`: (request_id, index) of branches that a stop string ended and that the engine still runs.
    """

    outputs: list[RequestOutput]
    finish: list[tuple[int, int]]


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """A request that has not ended."""

    external_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    stream: bool
    tokenizer: Tokenizer | None                  # None: no text
    metrics: RequestMetrics
    branches: list[BranchOutput]
    num_unfinished: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class OutputProcessor:
    """Holds what every unfinished request has given so far. Without a tokenizer, text stays empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[int, _OpenRequest] = {}

    def __contains__(self, request_id: int) -> bool:
        """Whether a request has begun and not ended."""
        return request_id in self._requests

    def add(
        self,
        request_id: int,
        *,
        external_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival_s: float,
        stream: bool = False,
    ) -> None:
        """Begin a request. `external_id` is what its outputs carry; with `stream` each step gives one."""
        assert request_id not in self._requests, f"request {request_id} added twice"
        tokenizer = self._tokenizer if params.detokenize else None
        assert tokenizer is not None or not params.stop, "stop strings are found in text, and there is none"
        branches = [BranchOutput(index, tokenizer, prompt_token_ids, params) for index in range(params.n)]
        metrics = RequestMetrics(arrival_s)
        self._requests[request_id] = _OpenRequest(
            external_id, prompt, prompt_token_ids, params, stream, tokenizer, metrics, branches, params.n
        )

    def note_admitted(self, requests: Iterable[Request], now_s: float) -> None:
        """Take down when requests first ran, and how often they have been preempted: each return is an admission."""
        for request in requests:
            opened = self._requests.get(request.request_id)
            if opened is not None:
                opened.metrics.num_preemptions = request.num_preemptions
                if opened.metrics.first_scheduled_s is None:
                    opened.metrics.first_scheduled_s = now_s

    def process(self, deltas: Iterable[SequenceDelta], now_s: float) -> ProcessedStep:
        """Take what a step added. Deltas of branches and requests that have ended are ignored."""
        touched: dict[int, _OpenRequest] = {}
        finish: list[tuple[int, int]] = []
        for delta in deltas:
            request = self._requests.get(delta.request_id)
            if request is None or request.branches[delta.index].finish_reason is not None:
                continue
            _extend(request, delta, now_s)
            if request.branches[delta.index].finish_reason is not None:
                request.num_unfinished -= 1
                if delta.finish_reason is None:
                    finish.append((delta.request_id, delta.index))
            if request.stream or not request.num_unfinished:
                touched[delta.request_id] = request
        outputs = [self._output(request_id, request, now_s) for request_id, request in touched.items()]
        return ProcessedStep(outputs, finish)

    def abort(self, request_id: int, now_s: float) -> RequestOutput:
        """End a request; its unfinished branches end with "abort". KeyError if it has ended or never began."""
        request = self._requests[request_id]
        for branch in request.branches:
            if branch.finish_reason is None:
                branch.finish("abort")
        request.num_unfinished = 0
        return self._output(request_id, request, now_s)

    def _output(self, request_id: int, request: _OpenRequest, now_s: float) -> RequestOutput:
        """Put together what a request has given; forget the request if that was all."""
        is_finished = request.num_unfinished == 0
        if is_finished:
            request.metrics.finished_s = now_s
            del self._requests[request_id]
        return RequestOutput(
            request_id=request.external_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[branch.snapshot() for branch in request.branches],
            finished=is_finished,
            prompt_logprobs=request.prompt_logprobs,
            metrics=replace(request.metrics),
        )


def _extend(request: _OpenRequest, delta: SequenceDelta, now_s: float) -> None:
    """Add a delta to its branch, and what rides on the first one to the request."""
    if request.metrics.first_token_s is None:
        request.metrics.first_token_s = now_s
    if request.params.prompt_logprobs is not None and request.prompt_logprobs is None and delta.index == 0:
        request.prompt_logprobs = _prompt_logprobs(delta.prompt_logprobs or [], request.tokenizer)
    request.branches[delta.index].extend(delta)


def _prompt_logprobs(
    positions: list[TokenLogprobs], tokenizer: Tokenizer | None
) -> list[dict[int, Logprob] | None]:
    """Return one entry per prompt token; the first has nothing before it, so nothing is known of it."""
    return [None, *(logprob_dict(position, tokenizer) for position in positions)]
