"""The table of open requests: what a reader gets after a failure, and what stays behind after each end."""

import asyncio

import pytest

from quire.core.deltas import Admission, SequenceDelta
from quire.core.errors import RequestFailedError
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.core.token_ids import pack_tokens
from quire.engine.messages import EngineDeadError, EngineState, Stepped
from quire.engine.processes.streams import RequestStream, RequestStreams
from quire.engine.requests.input_processor import PreparedRequest, TokenizedPrompt
from quire.engine.requests.output_processor import FinishedRequest

PROMPT = pack_tokens([5, 6, 7])


class Table:
    """A table of open requests without an engine."""

    def __init__(self) -> None:
        self.aborted: list[tuple[int, FinishedRequest]] = []
        self.streams = RequestStreams(None, lambda *ended: self.aborted.append(ended))

    def open(self, request_id: int = 1, n: int = 1) -> RequestStream:
        request = Request(request_id, PROMPT, SamplingParams(n=n, max_tokens=9, seed=0), 0, 9)
        prepared = PreparedRequest(request, TokenizedPrompt(None, PROMPT))
        return self.streams.open(prepared, external_id="mine", arrival_s=0.0, kind="delta")

    def step(self, *deltas: SequenceDelta, admitted: tuple[int, ...] = ()) -> None:
        admissions = [Admission(request_id, 0) for request_id in admitted]
        for processed in self.streams.process(Stepped(0.0, 1, admissions, list(deltas), EngineState(0, 0, 0))):
            self.streams.wake(processed.ready)

    @property
    def is_empty(self) -> bool:
        return len(self.streams) == len(self.streams._outputs) == len(self.streams.queued) == 0


@pytest.fixture
def table() -> Table:
    return Table()


def read(stream: RequestStream) -> list[int]:
    """Return the tokens of the next output."""
    return asyncio.run(anext(stream)).outputs[0].token_ids  # type: ignore[arg-type]


def test_requests_count_as_queued_until_they_are_admitted(table: Table) -> None:
    table.open(1)
    table.open(2, n=4)
    assert (len(table.streams.queued), table.streams.queued.num_tokens) == (2, 3 + 12)
    table.step(admitted=(2,))
    assert (len(table.streams.queued), table.streams.queued.num_tokens) == (1, 3)


def test_last_read_closes_the_stream(table: Table) -> None:
    stream = table.open()
    table.step(SequenceDelta(1, 0, [8]), admitted=(1,))
    table.step(SequenceDelta(1, 0, [9], finish_reason="length"))
    assert read(stream) == [8, 9], "what a slow reader missed is one output"
    assert table.is_empty
    with pytest.raises(StopAsyncIteration):
        read(stream)


def test_error_is_raised_after_the_output_that_is_there(table: Table) -> None:
    stream = table.open()
    table.step(SequenceDelta(1, 0, [8]), admitted=(1,))
    table.streams.fail(1, RequestFailedError("first"))
    table.streams.fail(1, RequestFailedError("second"))
    assert read(stream) == [8]
    with pytest.raises(RequestFailedError, match="first"):
        read(stream)
    assert table.is_empty


def test_dead_engine_fails_every_stream_and_queues_nothing(table: Table) -> None:
    streams = [table.open(request_id) for request_id in range(3)]
    table.streams.fail_all("the engine is gone")
    assert not table.streams.queued
    for stream in streams:
        with pytest.raises(EngineDeadError, match="the engine is gone"):
            read(stream)
    assert table.is_empty


def test_abort_reports_a_running_request_once(table: Table) -> None:
    stream = table.open()
    table.step(SequenceDelta(1, 0, [8]), admitted=(1,))
    stream.abort()
    stream.abort()
    assert [(request_id, ended.num_output_tokens) for request_id, ended in table.aborted] == [(1, 1)]
    assert table.is_empty
    with pytest.raises(StopAsyncIteration):
        read(stream)


def test_abort_of_an_ended_request_is_not_reported(table: Table) -> None:
    stream = table.open()
    table.step(SequenceDelta(1, 0, [8], finish_reason="length"), admitted=(1,))
    stream.abort()
    assert table.aborted == []
    assert table.is_empty
