"""Generation of an API request: queue its engine requests, pass on their outputs, abort what is left at the end.

Tokens and times of its engine requests are counted for the response's usage and the log line.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NoReturn, Self

from quire.core.deltas import FinishReason
from quire.core.errors import DeadlineExceededError, InvalidRequestError
from quire.core.logprob_table import LogprobBuffer
from quire.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.engine.processes.streams import RequestStream
from quire.engine.requests.output_processor import OutputKind
from quire.server.api.preparation import ApiRequest, check_deadline
from quire.server.errors import raise_renamed
from quire.server.history import PastRequest
from quire.server.http.application import RequestRecord
from quire.server.limits.memory import LogprobReservation
from quire.server.service import AdmittedCall, Service


class TokenUsage(NamedTuple):
    """Tokens of an API request. A prompt counts once, however many choices it has."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_image_tokens: int = 0


@dataclass(slots=True, eq=False)
class RequestUsage:
    """Usage of the engine request for one prompt, so far."""

    metrics: RequestMetrics
    num_prompt_tokens: int
    num_image_tokens: int = 0                                              # part of num_prompt_tokens
    num_output_tokens: int = 0                                             # sum over all branches
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)  # finished branches alone

    def append(self, piece: CompletionOutput) -> None:
        """Count the new tokens of one branch."""
        self.num_output_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            self.finish_reasons[piece.index] = piece.finish_reason


def total_usage(requests: Sequence[RequestUsage]) -> TokenUsage:
    """Return the tokens of all requests together."""
    num_prompt_tokens = num_output_tokens = num_cached_tokens = num_image_tokens = 0
    for request in requests:
        num_prompt_tokens += request.num_prompt_tokens
        num_output_tokens += request.num_output_tokens
        num_cached_tokens += request.metrics.num_cached_tokens
        num_image_tokens += request.num_image_tokens
    return TokenUsage(num_prompt_tokens, num_output_tokens, num_cached_tokens, num_image_tokens)


def request_times(metrics: RequestMetrics | None, num_output_tokens: int) -> dict[str, float | None]:
    """Return the times of a finished request with one answer, in vLLM's names; None for those that are unknown.

    Times are in ms; the first token's is counted from the first step of the request, the queue's from its arrival.
    """
    scheduled_s = first_token_s = finished_s = queue_s = None
    if metrics is not None:
        scheduled_s, first_token_s, finished_s = metrics.first_scheduled_s, metrics.first_token_s, metrics.finished_s
        queue_s = metrics.queue_s
    generation_s = _between(first_token_s, finished_s)
    inference_s = _between(scheduled_s, finished_s)
    itl_s = None if generation_s is None or num_output_tokens < 2 else generation_s / (num_output_tokens - 1)
    return {
        "time_to_first_token_ms": _ms(_between(scheduled_s, first_token_s)),
        "generation_time_ms": _ms(generation_s),
        "queue_time_ms": _ms(queue_s),
        "mean_itl_ms": _ms(itl_s),
        "tokens_per_second": num_output_tokens / inference_s if inference_s else None,
    }


def _between(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else end_s - begin_s


def _ms(duration_s: float | None) -> float | None:
    return None if duration_s is None else 1000 * duration_s


def fill_record(record: RequestRecord, requests: Sequence[RequestUsage], n: int) -> TokenUsage:
    """Set the fields of a log line: tokens and preemptions of all prompts, the earliest queue time and TTFT.

    Return the tokens.
    """
    record.prompt_tokens, record.output_tokens, record.cached_tokens, _ = usage = total_usage(requests)
    record.finish_reasons, record.preemptions = [], 0
    for request in requests:
        metrics = request.metrics
        for index in range(n):
            record.finish_reasons.append(request.finish_reasons.get(index, "abort"))
        record.preemptions += metrics.num_preemptions
        queue_s = metrics.queue_s
        if queue_s is not None and (record.queue_s is None or queue_s < record.queue_s):
            record.queue_s = queue_s
        if metrics.first_token_s is not None:
            ttft_s = metrics.first_token_s - metrics.arrival_s
            record.ttft_s = ttft_s if record.ttft_s is None else min(record.ttft_s, ttft_s)
    return usage


_REQUESTS_PER_ITERATION = 4        # queued per iteration of the event loop: 0.6 ms each with the longest lists
_TOKENS_PER_ITERATION = 1 << 16    # prompt tokens queued per iteration: 0.3 ms
_ABORTS_PER_ITERATION = 64
_PIECES_PER_ITERATION = 256        # pieces of outputs recorded per iteration
_TOKENS_PER_PIECE = 256            # take as long to record as a piece


class Generation:
    """Output streams of one API request, one per prompt. The owner calls `finish`, and `release` afterwards."""

    __slots__ = (
        "_admitted", "_history", "_logprobs", "_num_recorded", "_past", "_record", "_request", "_slices", "_streams",
        "usage",
    )  # fmt: skip

    def __init__(
        self, service: Service, request: ApiRequest, streams: Sequence[RequestStream], record: RequestRecord,
        logprobs: LogprobReservation, admitted: AdmittedCall,
    ) -> None:  # fmt: skip
        usage, past = list[RequestUsage](), list[PastRequest]()
        for prepared, stream in zip(request.requests, streams, strict=True):
            prompt = prepared.prompt
            num_image_tokens = sum(image.num_tokens for image in prompt.images) if prompt.images else 0
            usage.append(RequestUsage(stream.metrics, len(prompt.token_ids), num_image_tokens))
            reads_cache, n = prepared.request.reads_cache, prepared.request.params.n
            past.append(PastRequest(prompt, stream.metrics, reads_cache, num_branches=n))
        self.usage, self._past, self._streams = tuple(usage), tuple(past), tuple(streams)
        self._request, self._record, self._slices = request, record, service.slices
        self._logprobs, self._admitted = logprobs, admitted
        admitted.is_kept = True
        self._num_recorded = 0                    # pieces of outputs, since the last iteration of the event loop
        if record.trace is not None:
            record.trace.queued(request, [each.metrics for each in self.usage])
        self._history = service.history
        self._history.add(request.id, self._past)

    @classmethod
    async def start(
        cls, service: Service, request: ApiRequest, record: RequestRecord, arrival_s: float,
        admitted: AdmittedCall,
    ) -> Self:  # fmt: skip
        """Queue all engine requests of an API request, or none. Raises EngineDeadError if the engine is dead.

        ApiError 429 if a deadline cannot be met, 429 or 400 if the prompts have more tokens than may wait, or the
        logprobs exceed their memory.
        `admitted` is kept until the generation finishes.
        """
        check_deadline(service, request)
        kind: OutputKind = "delta" if request.stream else "final"
        streams: list[RequestStream] = []
        logprobs = service.admission.logprobs.reserve(request.requests, service.options)
        num_tokens = 0                            # queued in this iteration of the event loop
        try:
            with service.admission.reserve_tokens(service.client, service.options, request.requests) as reserved:
                for number, prepared in enumerate(request.requests, start=1):
                    prepared.request.received_s = request.received_s or None
                    stream = await service.client.add(prepared, external_id=request.id, arrival_s=arrival_s, kind=kind)
                    streams.append(stream)
                    reserved.sent()
                    num_tokens += len(prepared.prompt.token_ids)
                    if number % _REQUESTS_PER_ITERATION == 0 or num_tokens > _TOKENS_PER_ITERATION:
                        num_tokens = 0
                        await service.slices.next_slice()
        except BaseException:
            logprobs.release()
            _abort(streams)
            raise
        return cls(service, request, streams, record, logprobs, admitted)

    async def last_outputs(self) -> list[RequestOutput]:
        """Wait for the last output of every prompt. The streams are of kind "final"."""
        outputs = []
        try:
            for index, stream in enumerate(self._streams):
                outputs.append(await self._record_output(index, await anext(stream)))
        except (InvalidRequestError, DeadlineExceededError) as error:
            self._raise_renamed(error)
        return outputs

    async def send_all(self, consume: Callable[[int, RequestOutput], Awaitable[None]]) -> None:
        """Call `consume` with the number of the prompt and each of its outputs. The first error ends all streams."""
        if len(self._streams) == 1:
            return await self._send(0, consume)
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self._streams)):
                    group.create_task(self._send(index, consume))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    def finish(self) -> TokenUsage:
        """Abort the requests that still run, and record tokens and times; return the tokens."""
        _abort(self._streams)
        self._admitted.release()
        self._history.finish(self._request.id)
        return fill_record(self._record, self.usage, self._request.checked.params.n)

    def release(self) -> None:
        """Release the memory reserved for logprobs, once the response has been encoded. Idempotent."""
        self._logprobs.release()

    async def _send(self, index: int, consume: Callable[[int, RequestOutput], Awaitable[None]]) -> None:
        try:
            async for output in self._streams[index]:
                await consume(index, await self._record_output(index, output))
        except (InvalidRequestError, DeadlineExceededError) as error:
            self._raise_renamed(error)

    def _raise_renamed(self, error: InvalidRequestError | DeadlineExceededError) -> NoReturn:
        """Raise an error of the engine with the field of the body that it is about."""
        call = self._request
        raise_renamed(error, {"structured_outputs": call.constraint_field, "deadline_ms": call.deadline_field})

    async def _record_output(self, index: int, output: RequestOutput) -> RequestOutput:
        """Record the tokens of an output, in slices of _PIECES_PER_ITERATION pieces."""
        if self._request.hides_output:
            output = replace(output, outputs=[_without_tokens(piece) for piece in output.outputs])
        usage, past = self.usage[index], self._past[index]
        for piece in output.outputs:
            usage.append(piece)
            past.append(piece)
            self._num_recorded += 1 + len(piece.token_ids) // _TOKENS_PER_PIECE
            if self._num_recorded >= _PIECES_PER_ITERATION:
                self._num_recorded = 0
                await self._slices.next_slice()
        return output


def _abort(streams: Sequence[RequestStream]) -> None:
    """Abort streams, _ABORTS_PER_ITERATION per iteration of the event loop."""
    for stream in streams[:_ABORTS_PER_ITERATION]:
        stream.abort()
    if len(streams) > _ABORTS_PER_ITERATION:
        asyncio.get_running_loop().call_soon(_abort, streams[_ABORTS_PER_ITERATION:])


def _without_tokens(output: CompletionOutput) -> CompletionOutput:
    """Return the output without the one token that the engine generates for a request for no token."""
    packed = None if output.packed_logprobs is None else LogprobBuffer()
    return CompletionOutput(
        output.index, "", [], finish_reason=output.finish_reason and "length", packed_logprobs=packed
    )
