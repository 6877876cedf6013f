"""A call that runs: its requests are queued, their outputs come in, and at the end none of them is left behind."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Self

from quire.core.outputs import CompletionOutput, RequestOutput
from quire.engine.output_processor import OutputKind
from quire.engine.request_stream import RequestStream
from quire.server.history import PastRequest
from quire.server.openai.answer_format import Call, Json
from quire.server.service import RequestRecord, Service


class Generation:
    """The streams of outputs of one call, one for each prompt. Whoever has one calls `end`."""

    def __init__(self, service: Service, call: Call, streams: Sequence[RequestStream], record: RequestRecord) -> None:
        self._call, self._streams, self._record, self._history = call, streams, record, service.history
        reads_cache = call.params.prompt_logprobs is None
        self.past = [
            PastRequest(request.prompt, stream.metrics, reads_cache)
            for request, stream in zip(call.requests, streams, strict=True)
        ]
        self._history.add(call.id, self.past)

    @classmethod
    async def begin(cls, service: Service, call: Call, record: RequestRecord, arrival_s: float) -> Self:
        """Queue all requests of a call, or none. EngineDeadError if there is no engine any more.

        ApiError 429 or 400 if their tokens are too many to wait.
        """
        kind: OutputKind = "delta" if call.body.stream else "final"
        streams: list[RequestStream] = []
        try:
            with service.hold_tokens(call.requests):
                for request in call.requests:
                    stream = await service.client.add(request, external_id=call.id, arrival_s=arrival_s, kind=kind)
                    streams.append(stream)
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return cls(service, call, streams, record)

    async def last_outputs(self) -> list[RequestOutput]:
        """Wait for the end of every prompt's request, each of kind "final"."""
        return [self._taken(index, await anext(stream)) for index, stream in enumerate(self._streams)]

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
        """Abort what still runs, and write down what there was."""
        for stream in self._streams:
            stream.abort()
        self._history.end(self._call.id)
        fill(self._record, self.past, self._call.params.n)

    async def _send(self, index: int, consume: Callable[[int, RequestOutput], Awaitable[None]]) -> None:
        async for output in self._streams[index]:
            await consume(index, self._taken(index, output))

    def _taken(self, index: int, output: RequestOutput) -> RequestOutput:
        if self._call.hides_output:
            output = replace(output, outputs=[_without_tokens(piece) for piece in output.outputs])
        self.past[index].take(output)
        return output


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
    logprobs = output.logprobs and output.logprobs[:0]
    return CompletionOutput(output.index, "", [], logprobs=logprobs, finish_reason=output.finish_reason and "length")
