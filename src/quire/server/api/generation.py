"""A call that runs: its requests are queued, their outputs come in, and at the end none of them is left behind."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Self

from quire.core.logprob_table import LogprobBuffer
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.engine.output_processor import OutputKind
from quire.engine.streams import RequestStream
from quire.server.admission.concurrency import ConcurrencyReservation
from quire.server.admission.logprob_memory import LogprobReservation
from quire.server.http.request_log import RequestRecord
from quire.server.openai.response_builder import ApiRequest, Json
from quire.server.service import Service
from quire.server.watch.history import PastRequest

_ADDED_AT_ONCE = 4         # requests queued per iteration of the event loop: 0.6 ms each with the longest lists
_ADDED_TOKENS = 1 << 16    # prompt tokens queued per iteration: 0.3 ms
_ABORTS_AT_ONCE = 64
_PIECES_AT_ONCE = 256      # of outputs that are recorded in one turn
_TOKENS_PER_PIECE = 256    # that take as long to be recorded as a piece


class Generation:
    """The streams of outputs of one call, one for each prompt. Whoever has one calls `finish`, and `release` later."""

    def __init__(
        self, service: Service, api_request: ApiRequest, streams: Sequence[RequestStream], record: RequestRecord,
        reserved: LogprobReservation, reservation: ConcurrencyReservation,
    ) -> None:  # fmt: skip
        self._reservation = reservation.keep()
        self._request, self._streams, self._record, self._history = api_request, streams, record, service.history
        self._reserved, self._slices = reserved, service.slices
        self._num_recorded = 0                               # pieces of outputs, since the loop had a turn
        reads_cache = api_request.params.prompt_logprobs is None
        self.past = [
            PastRequest(request.prompt, stream.metrics, reads_cache)
            for request, stream in zip(api_request.requests, streams, strict=True)
        ]
        self._history.add(api_request.id, self.past)

    @classmethod
    async def start(
        cls, service: Service, api_request: ApiRequest, record: RequestRecord, arrival_s: float,
        reservation: ConcurrencyReservation,
    ) -> Self:  # fmt: skip
        """Queue all requests of a call, or none. EngineDeadError if there is no engine any more.

        ApiError 429 or 400 if their tokens are too many to wait, or there is no room for their logprobs. `reservation`:
        the places of its client, which are released when the call has ended.
        """
        kind: OutputKind = "delta" if api_request.body.stream else "final"
        streams: list[RequestStream] = []
        reserved = service.admission.logprobs.reserve([each.request for each in api_request.requests], service.options)
        num_tokens = 0                            # sent since the last iteration of the event loop
        try:
            with service.reserve_tokens(api_request.requests) as sent:
                for number, request in enumerate(api_request.requests, start=1):
                    stream = await service.client.add(
                        request, external_id=api_request.id, arrival_s=arrival_s, kind=kind
                    )
                    streams.append(stream)
                    sent(request)
                    num_tokens += len(request.prompt.token_ids)
                    if number % _ADDED_AT_ONCE == 0 or num_tokens > _ADDED_TOKENS:
                        num_tokens = 0
                        await service.slices.next_slice()
        except BaseException:
            reserved.release()
            _abort(streams)
            raise
        return cls(service, api_request, streams, record, reserved, reservation)

    async def last_outputs(self) -> list[RequestOutput]:
        """Wait for the end of every prompt's request, each of kind "final"."""
        outputs = []
        for index, stream in enumerate(self._streams):
            outputs.append(await self._record_output(index, await anext(stream)))
        return outputs

    async def send_all(self, consume: Callable[[int, RequestOutput], Awaitable[None]]) -> None:
        """Hand every output on as it comes, with the number of its prompt. The first error ends all."""
        if len(self._streams) == 1:
            return await self._send(0, consume)
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self._streams)):
                    group.create_task(self._send(index, consume))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    def finish(self) -> None:
        """Abort what still runs, and record what there was."""
        _abort(self._streams)
        self._reservation.release()
        self._history.finish(self._request.id)
        fill(self._record, self.past, self._request.params.n)

    def release(self) -> None:
        """Free the room for logprobs, once the answer has been written. Twice is fine."""
        self._reserved.release()

    async def _send(self, index: int, consume: Callable[[int, RequestOutput], Awaitable[None]]) -> None:
        async for output in self._streams[index]:
            await consume(index, await self._record_output(index, output))

    async def _record_output(self, index: int, output: RequestOutput) -> RequestOutput:
        """Record the tokens of an output; after every so many of them the event loop gets a turn."""
        if self._request.hides_output:
            output = replace(output, outputs=[_without_tokens(piece) for piece in output.outputs])
        past = self.past[index]
        for piece in output.outputs:
            past.append(piece)
            self._num_recorded += 1 + len(piece.token_ids) // _TOKENS_PER_PIECE
            if self._num_recorded >= _PIECES_AT_ONCE:
                self._num_recorded = 0
                await self._slices.next_slice()
        return output


def _abort(streams: Sequence[RequestStream]) -> None:
    """Abort streams, some now and the rest in later iterations of the event loop."""
    for stream in streams[:_ABORTS_AT_ONCE]:
        stream.abort()
    if len(streams) > _ABORTS_AT_ONCE:
        asyncio.get_running_loop().call_soon(_abort, streams[_ABORTS_AT_ONCE:])


def usage_of(past: Sequence[PastRequest]) -> Json:
    """Return what the requests of a call have cost so far. A prompt counts once, however many choices it has."""
    num_prompt_tokens = sum(request.num_prompt_tokens for request in past)
    num_output_tokens = sum(request.num_tokens for request in past) - num_prompt_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(request.metrics.num_cached_tokens for request in past)},
    }


def fill(record: RequestRecord, past: Sequence[PastRequest], n: int) -> None:
    """Write down tokens and preemptions of all prompts, and when the first of them began to run and to answer."""
    usage, metrics = usage_of(past), [request.metrics for request in past]
    record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    record.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    record.finish_reasons = [request.finish_reasons.get(index, "abort") for request in past for index in range(n)]
    record.queue_s = min((one.queue_s for one in metrics if one.queue_s is not None), default=None)
    begun = [one.first_token_s - one.arrival_s for one in metrics if one.first_token_s is not None]
    record.ttft_s = min(begun, default=None)
    record.preemptions = sum(one.num_preemptions for one in metrics)


def _without_tokens(output: CompletionOutput) -> CompletionOutput:
    """Return the output of a request for no token at all, which had to be for one."""
    packed = None if output.packed_logprobs is None else LogprobBuffer()
    return CompletionOutput(
        output.index, "", [], finish_reason=output.finish_reason and "length", packed_logprobs=packed
    )
