"""A call that runs: its requests are queued, their outputs come in, and at the end none of them is left behind."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Self

from quire.core.logprob_table import LogprobBuffer
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.engine.output_processor import OutputKind
from quire.engine.streams import RequestStream
from quire.server.admission.concurrency import Hold
from quire.server.admission.logprob_memory import Reservation
from quire.server.openai.response_builder import Call, Json
from quire.server.service import RequestRecord, Service
from quire.server.watch.history import PastRequest

_ADDED_AT_ONCE = 4         # requests that are queued in one turn of the event loop: 0.6 ms each with the longest lists
_ADDED_TOKENS = 1 << 16    # after so many tokens the turn ends too: 0.3 ms
_ABORTS_AT_ONCE = 64
_PIECES_AT_ONCE = 256      # of outputs that are recorded in one turn
_TOKENS_PER_PIECE = 256    # that take as long to be recorded as a piece


class Generation:
    """The streams of outputs of one call, one for each prompt. Whoever has one calls `end`, and `release` later."""

    def __init__(
        self, service: Service, call: Call, streams: Sequence[RequestStream], record: RequestRecord,
        reserved: Reservation, hold: Hold,
    ) -> None:  # fmt: skip
        self._hold = hold.keep()
        self._call, self._streams, self._record, self._history = call, streams, record, service.history
        self._reserved, self._turns = reserved, service.turns
        self._num_taken = 0                               # pieces of outputs, since the loop had a turn
        reads_cache = call.params.prompt_logprobs is None
        self.past = [
            PastRequest(request.prompt, stream.metrics, reads_cache)
            for request, stream in zip(call.requests, streams, strict=True)
        ]
        self._history.add(call.id, self.past)

    @classmethod
    async def begin(cls, service: Service, call: Call, record: RequestRecord, arrival_s: float, hold: Hold) -> Self:
        """Queue all requests of a call, or none. EngineDeadError if there is no engine any more.

        ApiError 429 or 400 if their tokens are too many to wait, or there is no room for their logprobs. `hold`: the
        places of its client, which are released when the call has ended.
        """
        kind: OutputKind = "delta" if call.body.stream else "final"
        streams: list[RequestStream] = []
        reserved = service.logprob_room.reserve([each.request for each in call.requests], service.options)
        num_tokens = 0                            # sent since the last turn of the loop
        try:
            with service.hold_tokens(call.requests) as sent:
                for number, request in enumerate(call.requests, start=1):
                    stream = await service.client.add(request, external_id=call.id, arrival_s=arrival_s, kind=kind)
                    streams.append(stream)
                    sent(request)
                    num_tokens += len(request.prompt.token_ids)
                    if number % _ADDED_AT_ONCE == 0 or num_tokens > _ADDED_TOKENS:
                        num_tokens = 0
                        await service.turns.next()
        except BaseException:
            reserved.release()
            _abort(streams)
            raise
        return cls(service, call, streams, record, reserved, hold)

    async def last_outputs(self) -> list[RequestOutput]:
        """Wait for the end of every prompt's request, each of kind "final"."""
        outputs = []
        for index, stream in enumerate(self._streams):
            outputs.append(await self._taken(index, await anext(stream)))
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

    def end(self) -> None:
        """Abort what still runs, and record what there was."""
        _abort(self._streams)
        self._hold.release()
        self._history.end(self._call.id)
        fill(self._record, self.past, self._call.params.n)

    def release(self) -> None:
        """Free the room for logprobs, once the answer has been written. Twice is fine."""
        self._reserved.release()

    async def _send(self, index: int, consume: Callable[[int, RequestOutput], Awaitable[None]]) -> None:
        async for output in self._streams[index]:
            await consume(index, await self._taken(index, output))

    async def _taken(self, index: int, output: RequestOutput) -> RequestOutput:
        """Record the tokens of an output; after every so many of them the event loop gets a turn."""
        if self._call.hides_output:
            output = replace(output, outputs=[_without_tokens(piece) for piece in output.outputs])
        past = self.past[index]
        for piece in output.outputs:
            past.take_piece(piece)
            self._num_taken += 1 + len(piece.token_ids) // _TOKENS_PER_PIECE
            if self._num_taken >= _PIECES_AT_ONCE:
                self._num_taken = 0
                await self._turns.next()
        return output


def _abort(streams: Sequence[RequestStream]) -> None:
    """Abort streams, some now and the rest in later turns of the event loop."""
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
