"""What a call has cost: for usage and for the log."""

from quire.core.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from quire.server.openai.tally import Tally
from quire.server.service import RequestRecord


def output(metrics: RequestMetrics, *pieces: tuple[int, int, FinishReason | None], cached: int = 0) -> RequestOutput:
    outputs = [CompletionOutput(index, "", [5] * count, finish_reason=reason) for index, count, reason in pieces]
    return RequestOutput("x", None, [], outputs, finished=False, metrics=metrics, num_cached_tokens=cached)


def test_pieces_add_up_and_prompts_count_once() -> None:
    tally = Tally([3, 4], n=2)
    metrics = RequestMetrics(0.0)
    tally.add(0, output(metrics, (0, 2, None), (1, 1, "stop"), cached=2))
    tally.add(0, output(metrics, (0, 1, "length"), cached=2))
    tally.add(1, output(metrics, (0, 5, "stop"), (1, 1, "stop"), cached=3))
    usage = tally.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 10, 17)
    assert usage.prompt_tokens_details.cached_tokens == 5
    record = RequestRecord()
    tally.fill(record)
    assert record.finish_reasons == ["length", "stop", "stop", "stop"]
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 10, 5)


def test_record_tells_when_the_first_prompt_began_and_answered() -> None:
    tally, record = Tally([1, 1], n=1), RequestRecord()
    tally.add(0, output(RequestMetrics(10.0, 11.0, 14.0, num_preemptions=1), (0, 1, None)))
    tally.add(1, output(RequestMetrics(10.0, 13.0, 13.5, num_preemptions=2), (0, 1, None)))
    tally.fill(record)
    assert (record.queue_s, record.ttft_s, record.preemptions) == (1.0, 3.5, 3)


def test_what_did_not_end_was_aborted() -> None:
    tally, record = Tally([1, 1], n=1), RequestRecord()
    tally.add(1, output(RequestMetrics(10.0), (0, 1, "stop")))
    tally.fill(record)
    assert record.finish_reasons == ["abort", "stop"]
    assert (record.queue_s, record.ttft_s) == (None, None)
