"""The sentence on where to look first."""

from dataclasses import replace

import pytest

from quire_lab.bench.diagnosis import LatencyLimits, Observation, diagnose, is_queue_growing, observe
from quire_lab.sim.statistics import Timeline

LATE = Observation(num_prompt_tokens=200, ttft_s=0.9, itl_s=0.02)
HALTING = Observation(num_prompt_tokens=200, ttft_s=0.05, itl_s=0.08)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "ttft_ms", "itl_ms", "words"),
    [
        (8000, 780, 22, ["prefill admission", "chunking"]),
        (200, 48, 23, ["Fine"]),
        (220, 51, 61, ["Decode pressure", "KV budget"]),
    ],
)
def test_worked_examples_with_limits_500_and_50(
    num_prompt_tokens: int, ttft_ms: float, itl_ms: float, words: list[str]
) -> None:
    sentence = diagnose(Observation(num_prompt_tokens, ttft_ms / 1e3, itl_ms / 1e3, ttft_limit_s=0.5, itl_limit_s=0.05))
    assert all(word in sentence for word in words)
    assert f"TTFT {ttft_ms} ms of 500, ITL {itl_ms} ms of 50" in sentence


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        (replace(LATE, queue_s=0.6), "Queueing"),
        (replace(LATE, queue_s=0.2), "Short prompts start late"),
        (replace(LATE, mean_waiting=3.0), "Queueing"),
        (replace(LATE, queue_s=0.2, mean_waiting=3.0), "Short prompts start late"),  # queue times say more
        (replace(LATE, num_prompt_tokens=8000, mean_waiting=3.0), "prefill admission"),
        (replace(LATE, num_prompt_tokens=8000, queue_s=0.8), "Queueing"),
        (LATE, "Short prompts start late"),
        (replace(LATE, itl_s=0.09, queue_s=0.6), "Queueing"),
        (replace(HALTING, num_preemptions=4), "KV cache full"),
        (replace(LATE, peak_kv_usage=0.99), "KV cache full"),
        (replace(HALTING, peak_kv_usage=0.5), "Decode pressure: look at the KV budget"),
        (replace(HALTING, peak_kv_usage=0.4), "Decode pressure: look at how many sequences"),
        (replace(HALTING, itl_s=0.01, num_preemptions=4), "Fine"),
        (replace(HALTING, itl_s=0.01, is_too_long=True), "too long"),
        (replace(HALTING, itl_limit_s=0.1), "Fine"),
        (replace(LATE, num_failed=3), "3 requests failed"),
        (replace(LATE, queue_s=0.3, mean_ttft_s=0.5), "at times more arrives than is served"),
        (replace(LATE, is_queue_growing=True), "the queue grows: the rate is above what fits"),
        (replace(LATE, num_prompt_tokens=8000, is_queue_growing=True), "the queue grows: the rate is above what fits"),
        (replace(LATE, num_preemptions=4, is_queue_growing=True), "KV cache full, the queue grows: the rate is above"),
        (replace(HALTING, num_preemptions=4, is_queue_growing=True), "KV cache full: look"),
    ],
)
def test_first_rule_that_fits_speaks(seen: Observation, word: str) -> None:
    assert word in diagnose(seen)


def test_sentence_tells_what_the_server_told() -> None:
    sentence = diagnose(replace(HALTING, num_preemptions=4, peak_kv_usage=0.97))
    assert "4 preemptions" in sentence
    assert "97%" in sentence


@pytest.mark.parametrize(
    ("gap_s", "service_s", "batch", "grows"),
    [
        (0.5, 0.4, 1, False),
        (0.5, 0.6, 1, True),
        (0.5, 0.6, 5, True),     # the first 30 find room
        (0.5, 0.6, 100, False),  # all of them
        (0.0, 0.6, 1, True),
        (0.0, 0.6, 100, False),  # computed together
    ],
)
def test_queue_grows_where_more_arrives_than_is_served(gap_s: float, service_s: float, batch: int, grows: bool) -> None:
    sent_s = [number * gap_s for number in range(100)]
    begun_s = [max(sent, (number - batch) * service_s) for number, sent in enumerate(sent_s)]
    timelines = [Timeline(sent, [begun + 0.7]) for sent, begun in zip(sent_s, begun_s, strict=True)]
    assert is_queue_growing(timelines, 0.5) == grows
    assert observe(timelines, [10] * 100, LatencyLimits(ttft_s=0.5)).is_queue_growing == grows


@pytest.mark.parametrize(("count", "grows"), [(1, False), (9, False), (10, True)])
def test_few_requests_are_no_queue(count: int, grows: bool) -> None:
    assert is_queue_growing([Timeline(0.5 * number, [1.7 * (number + 1)]) for number in range(count)], 0.5) == grows


def test_what_is_late_is_what_the_limits_are_on() -> None:
    early, late = Timeline(0.0, [0.1, 0.2, 0.3]), Timeline(0.0, [1.0, 1.01, 1.25])
    seen = observe([early, early, late], [10, 10, 2000], LatencyLimits(itl_s=0.1, e2e_s=1.0), queue_s=0.7)
    assert (seen.num_prompt_tokens, seen.ttft_limit_s, seen.itl_limit_s) == (2000, 0.5, 0.1)
    assert seen.itl_s == pytest.approx(0.226), "of the longest gap of each request"
    assert (seen.is_too_long, seen.queue_s) == (True, 0.7)
