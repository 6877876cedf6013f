"""Streams of the open requests of an engine client: outputs as they are produced, one reader per request.

`RequestStreams` is the client's table of open requests, `RequestStream` what a reader iterates over. A reader that is
slow finds everything since its last read in one output, so a stream holds no more than its answer.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from quire.core.errors import EngineError
from quire.core.outputs import RequestMetrics, RequestOutput
from quire.engine.messages import EngineDeadError, Stepped
from quire.engine.processes.forecast import QueuedRequests
from quire.engine.requests.input_processor import PreparedRequest
from quire.engine.requests.output_processor import FinishedRequest, OutputKind, OutputProcessor, ProcessedStep
from quire.text.tokenizer import Tokenizer


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, as its kind says. A reader that stops before the end calls `abort`."""

    __slots__ = ("_error", "_has_output", "_is_over", "_request_id", "_table", "_waiter", "metrics")

    def __init__(self, table: "RequestStreams", request_id: int, metrics: RequestMetrics) -> None:
        self.metrics = metrics                            # kept up to date while the request lives
        self._table, self._request_id = table, request_id
        self._waiter: asyncio.Future[None] | None = None  # set while a reader waits
        self._has_output = self._is_over = False
        self._error: EngineError | None = None            # raised after the output that is there

    async def __anext__(self) -> RequestOutput:
        """Wait for the next output. EngineDeadError or RequestFailedError if none can follow."""
        if not (self._has_output or self._is_over or self._error):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._is_over:
            raise StopAsyncIteration
        if self._has_output:
            self._has_output = False
            output = self._table.read(self._request_id)
            self._is_over = output.finished
            return output
        assert self._error is not None, "woken without an output or an error"
        self._is_over = True
        self._table.close(self._request_id)
        raise self._error

    def abort(self) -> None:
        """End the request if it runs, and close the stream; a pending read ends. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._wake_reader()
            self._table.abort(self._request_id)

    def wake(self) -> None:
        """Notify the reader of a new output."""
        self._has_output = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: EngineError) -> None:
        """Raise an error in the reader, after the output that is there. Only the first error counts."""
        self._error = self._error or error
        self._has_output &= self._table.has_output(self._request_id)
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RequestStreams:
    """Open requests by number: their streams, their outputs, and the prompt tokens of those not yet admitted.

    A request is open until its last output has been read, or its stream was aborted. `on_abort` is called with the
    number and the figures of a request that its reader aborted while the engine ran it, `on_close` with the number of
    each that is not open any more. `is_packed`, `itl_target_s`: as in `OutputProcessor`.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, on_abort: Callable[[int, FinishedRequest], None],
        on_close: Callable[[int], None] = lambda request_id: None, *, is_packed: bool = True,
        itl_target_s: float = math.inf,
    ) -> None:  # fmt: skip
        self._on_abort, self._on_close = on_abort, on_close
        self._outputs = OutputProcessor(tokenizer, is_packed=is_packed, itl_target_s=itl_target_s)
        self._streams: dict[int, RequestStream] = {}
        self.queued = QueuedRequests()                    # sent and not yet admitted

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[RequestStream]:
        """Yield the streams of the open requests."""
        return iter(self._streams.values())

    def open(
        self, prepared: PreparedRequest, *, external_id: str, arrival_s: float, kind: OutputKind
    ) -> RequestStream:
        """Return the stream of a request that is about to be sent."""
        request = prepared.request
        metrics = self._outputs.add(prepared, external_id=external_id, arrival_s=arrival_s, kind=kind)
        stream = self._streams[request.request_id] = RequestStream(self, request.request_id, metrics)
        self.queued.add(request)
        return stream

    def process(self, step: Stepped) -> Iterator[ProcessedStep]:
        """Process a step's admissions, preemptions and tokens; yield the results in slices (`OutputProcessor`)."""
        for admission in step.admissions:
            self.queued.discard(admission.request_id)
        if step.preempted or step.admissions:
            self._outputs.record_scheduled(step.preempted, step.admissions, step.started_s)
        now_s = time.monotonic()
        if step.chunks:
            self._outputs.record_chunks(step.chunks, now_s)
        return self._outputs.process_in_slices(step.deltas, now_s)

    def wake(self, request_ids: Iterable[int]) -> None:
        """Notify the readers of requests with new outputs."""
        for request_id in request_ids:
            self._streams[request_id].wake()

    def fail(self, request_id: int, error: EngineError) -> None:
        """Fail a request for which the engine does nothing more, if it is open."""
        if request_id in self._streams:
            self._streams[request_id].fail(error)

    def fail_all(self, reason: str) -> None:
        """Fail every open request with EngineDeadError."""
        self.queued.clear()
        for stream in self._streams.values():
            stream.fail(EngineDeadError(reason))

    # --- for the streams ------------------------------------------------------------------------------------------

    def has_output(self, request_id: int) -> bool:
        """Return whether the outputs of a request are held."""
        return request_id in self._outputs

    def read(self, request_id: int) -> RequestOutput:
        """Return the output since the last read, and close the stream if it is the last one."""
        output = self._outputs.output(request_id)
        if output.finished:
            del self._streams[request_id]
            self._on_close(request_id)
        return output

    def abort(self, request_id: int) -> None:
        """End a request, and close its stream, if it is open."""
        if request_id not in self._streams:
            return
        finished = self._outputs.abort(request_id, time.monotonic()) if request_id in self._outputs else None
        self.close(request_id)
        if finished is not None:
            self._on_abort(request_id, finished)

    def close(self, request_id: int) -> None:
        del self._streams[request_id]
        self.queued.discard(request_id)
        self._outputs.drop(request_id)
        self._on_close(request_id)
