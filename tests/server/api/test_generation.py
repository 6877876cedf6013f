"""Usage of an API request: for the response and for the log line."""

import pytest

from quire.core.deltas import FinishReason
from quire.core.outputs import CompletionOutput, RequestMetrics
from quire.server.api.generation import RequestUsage, TokenUsage, fill_record, request_times, total_usage
from quire.server.http.application import RequestRecord

Piece = tuple[int, int, FinishReason | None]


def usage(num_prompt_tokens: int, metrics: RequestMetrics, *outputs: list[Piece]) -> RequestUsage:
    """Return the usage after these outputs: for each branch its tokens, and the finish reason if it has finished."""
    request = RequestUsage(metrics, num_prompt_tokens)
    for pieces in outputs:
        for index, count, reason in pieces:
            request.append(CompletionOutput(index, "", [5] * count, finish_reason=reason))
    return request


def test_pieces_add_up_and_prompts_count_once() -> None:
    requests = [
        usage(3, RequestMetrics(0.0, num_cached_tokens=2), [(0, 2, None), (1, 1, "stop")], [(0, 1, "length")]),
        usage(4, RequestMetrics(0.0, num_cached_tokens=3), [(0, 5, "stop"), (1, 1, "stop")]),
    ]
    assert total_usage(requests) == TokenUsage(num_prompt_tokens=7, num_output_tokens=10, num_cached_tokens=5)
    record = RequestRecord()
    fill_record(record, requests, n=2)
    assert record.finish_reasons == ["length", "stop", "stop", "stop"]
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 10, 5)


def test_record_has_the_earliest_times_of_all_prompts() -> None:
    record = RequestRecord()
    first = usage(1, RequestMetrics(10.0, 11.0, 14.0, num_preemptions=1), [(0, 1, None)])
    second = usage(1, RequestMetrics(10.0, 13.0, 13.5, num_preemptions=2), [(0, 1, None)])
    fill_record(record, [first, second], n=1)
    assert (record.queue_s, record.ttft_s, record.preemptions) == (1.0, 3.5, 3)


def test_unfinished_branches_were_aborted() -> None:
    record = RequestRecord()
    fill_record(record, [usage(1, RequestMetrics(10.0)), usage(1, RequestMetrics(10.0), [(0, 1, "stop")])], n=1)
    assert record.finish_reasons == ["abort", "stop"]
    assert (record.queue_s, record.ttft_s) == (None, None)


def test_times_of_a_request_in_vllm_names() -> None:
    metrics = RequestMetrics(arrival_s=1.0, first_scheduled_s=1.5, first_token_s=2.0, finished_s=3.0)
    times = request_times(metrics, 10)
    assert times == pytest.approx({
        "time_to_first_token_ms": 500, "generation_time_ms": 1000, "queue_time_ms": 500,
        "mean_itl_ms": 1000 / 9, "tokens_per_second": 10 / 1.5,
    })  # fmt: skip
    assert request_times(metrics, 1) == times | {"mean_itl_ms": None, "tokens_per_second": pytest.approx(1 / 1.5)}
    assert request_times(None, 10) == dict.fromkeys(times)
    assert request_times(RequestMetrics(1.0, 1.5, 1.5, 1.5), 1)["tokens_per_second"] is None
