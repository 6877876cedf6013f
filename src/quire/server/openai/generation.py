"""A call that runs: its requests are queued, their outputs come in, and at the end none of them is left behind."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Self

from quire.core.outputs import CompletionOutput, RequestOutput
from quire.engine.client import RequestStream
from quire.engine.output_processor import OutputKind
from quire.server.history import History, PastRequest
from quire.server.openai.answer_format import Call
from quire.server.openai.tally import Tally
from quire.server.service import RequestRecord, Service


class Generation:
    """The streams of outputs of one call, one for each prompt. Whoever has one calls `end`."""

    def __init__(self, call: Call, streams: Sequence[RequestStream], record: RequestRecord, history: History) -> None:
        self.tally = Tally([len(request.prompt.token_ids) for request in call.requests], call.params.n)
        self._hides_output = call.hides_output
        self._streams, self._record = streams, record
        reads_cache = call.params.prompt_logprobs is None
        self._past = [
            PastRequest(request.prompt, stream.metrics, reads_cache)
            for request, stream in zip(call.requests, streams, strict=True)
        ]
        self._history, self._call_id = history, call.id
        history.add(call.id, self._past)

    @classmethod
    async def begin(cls, service: Service, call: Call, record: RequestRecord, arrival_s: float) -> Self:
        """Queue all requests of a call, or none. EngineDeadError if there is no engine any more."""
        kind: OutputKind = "delta" if call.stream else "final"
        streams: list[RequestStream] = []
        try:
            for request in call.requests:
                stream = await service.client.add(request, external_id=call.id, arrival_s=arrival_s, kind=kind)
                streams.append(stream)
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return cls(call, streams, record, service.history)

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
        self._history.end(self._call_id)
        self.tally.fill(self._record)

    async def _send(self, index: int, consume: Callable[[int, RequestOutput], Awaitable[None]]) -> None:
        async for output in self._streams[index]:
            await consume(index, self._taken(index, output))

    def _taken(self, index: int, output: RequestOutput) -> RequestOutput:
        self._past[index].take(output)
        if self._hides_output:
            output = replace(output, outputs=[_without_tokens(piece) for piece in output.outputs])
        self.tally.add(index, output)
        return output


def _without_tokens(output: CompletionOutput) -> CompletionOutput:
    """Return the output of a request for no token at all, which had to be for one."""
    logprobs = output.logprobs and output.logprobs[:0]
    return CompletionOutput(output.index, "", [], logprobs=logprobs, finish_reason=output.finish_reason and "length")
