"""What a call has cost: for usage and for the log."""

from quire.core.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from quire.engine.input_processor import TokenizedPrompt
from quire.server.api.generation import fill, usage_of
from quire.server.http.request_log import RequestRecord
from quire.server.watch.history import PastRequest

Piece = tuple[int, int, FinishReason | None]


def past(num_prompt_tokens: int, metrics: RequestMetrics, *outputs: list[Piece]) -> PastRequest:
    """Return a request that has given these outputs: for each branch how many tokens, and whether it ended."""
    request = PastRequest(TokenizedPrompt(None, [5] * num_prompt_tokens), metrics)
    for pieces in outputs:
        parts = [CompletionOutput(index, "", [5] * count, finish_reason=reason) for index, count, reason in pieces]
        request.append_output(RequestOutput("x", None, [], parts, finished=False))
    return request


def test_pieces_add_up_and_prompts_count_once() -> None:
    requests = [
        past(3, RequestMetrics(0.0, num_cached_tokens=2), [(0, 2, None), (1, 1, "stop")], [(0, 1, "length")]),
        past(4, RequestMetrics(0.0, num_cached_tokens=3), [(0, 5, "stop"), (1, 1, "stop")]),
    ]
    usage = usage_of(requests)
    assert usage == {
        "prompt_tokens": 7, "completion_tokens": 10, "total_tokens": 17, "prompt_tokens_details": {"cached_tokens": 5}
    }
    record = RequestRecord()
    fill(record, requests, n=2)
    assert record.finish_reasons == ["length", "stop", "stop", "stop"]
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 10, 5)


def test_record_tells_when_the_first_prompt_began_and_answered() -> None:
    record = RequestRecord()
    first = past(1, RequestMetrics(10.0, 11.0, 14.0, num_preemptions=1), [(0, 1, None)])
    fill(record, [first, past(1, RequestMetrics(10.0, 13.0, 13.5, num_preemptions=2), [(0, 1, None)])], n=1)
    assert (record.queue_s, record.ttft_s, record.preemptions) == (1.0, 3.5, 3)


def test_what_did_not_end_was_aborted() -> None:
    record = RequestRecord()
    fill(record, [past(1, RequestMetrics(10.0)), past(1, RequestMetrics(10.0), [(0, 1, "stop")])], n=1)
    assert record.finish_reasons == ["abort", "stop"]
    assert (record.queue_s, record.ttft_s) == (None, None)
