"""The report is an exact function of recorded times."""

import pytest

from quire_lab.bench.bench_serve import request_records, sentence, serve_record
from quire_lab.bench.diagnosis import LatencyLimits
from quire_lab.bench.http_load import AnswerStream, Failure, LoadRun, SentRequest
from quire_lab.sim.workloads import Schedule, WorkItem

REFUSED = Failure("429 server_overloaded", "too many")


def request(
    due_s: float, times_s: list[float], *, num_tokens: int | None = None, num_prompt_tokens: int = 10,
    failure: Failure | None = None, is_finished: bool = True, sent_s: float | None = None,
) -> SentRequest:
    answer = AnswerStream()
    answer.token_times_s, answer.num_chunks = times_s, len(times_s) + 2
    answer.num_usage_tokens = len(times_s) if num_tokens is None else num_tokens
    answer.failure, answer.is_done = failure, is_finished
    item = WorkItem([1] * num_prompt_tokens, output_len=4)
    return SentRequest(item, due_s, due_s if sent_s is None else sent_s, answer)


def load(*requests: SentRequest, num_due: int | None = None, duration_s: float = 8.0) -> LoadRun:
    schedule = Schedule([0.0, 1.0, 4.0], max_open=9)
    return LoadRun(list(requests), num_due or len(requests), schedule, duration_s, client_cpu_s=0.4)


MIXED = load(
    request(0.0, [1.0, 2.0, 3.0], sent_s=0.25),
    request(1.0, [3.0, 7.0], num_tokens=4),
    request(4.0, [], failure=REFUSED, is_finished=False),
    request(4.0, [5.0, 6.0], is_finished=False),  # cut
    num_due=6,
)


def test_latencies_count_from_when_requests_were_due_and_only_of_finished_ones() -> None:
    figures = serve_record(MIXED, {}, LatencyLimits())["figures"]
    assert figures["ttft_s"]["mean"] == 1.5
    assert figures["e2e_s"]["p50"] == 4.5
    assert figures["itl_s"]["mean"] == 2.0           # gaps 1, 1 and 4
    assert figures["tpot_s"]["mean"] == pytest.approx((1.0 + 4.0 / 3) / 2)


def test_rates_are_over_the_whole_run() -> None:
    rates = serve_record(MIXED, {}, LatencyLimits(ttft_s=1.0))["rates"]
    assert rates == {
        "offered_rps": 0.5,
        "requests_per_s": 2 / 8,
        "tokens_per_s": (3 + 4 + 2) / 8,
        "total_tokens_per_s": (20 + 9) / 8,
        "goodput_rps": 1 / 8,
    }


def test_no_request_is_dropped_in_silence() -> None:
    record = serve_record(MIXED, {}, LatencyLimits())
    counts = record["requests"]
    assert (counts["num_requests"], counts["num_finished"], counts["num_failed"], counts["num_cut"]) == (6, 2, 1, 3)
    assert record["errors"] == {"429 server_overloaded": 1}
    assert record["error_messages"] == {"429 server_overloaded": "too many"}


def test_attained_share_is_of_all_requests() -> None:
    record = serve_record(MIXED, {}, LatencyLimits(ttft_s=1.0, e2e_s=60.0))
    assert record["limits"] == {"ttft_s": 1.0, "e2e_s": 60.0, "attained": 1 / 6}
    assert "limits" not in serve_record(MIXED, {}, LatencyLimits())
    assert "goodput_rps" not in serve_record(MIXED, {}, LatencyLimits())["rates"]


def test_batch_size_is_littles_law_where_the_server_does_not_tell() -> None:
    batch = serve_record(MIXED, {}, LatencyLimits())["batch"]
    assert batch["mean_size"] == ((3.0 - 0.25) + (7.0 - 1.0) + (8.0 - 4.0)) / 8
    assert "Little" in batch["source"]


def test_batch_size_is_the_servers_where_it_tells() -> None:
    use = {"num_samples": 9, "mean_running": 5.5, "mean_waiting": 1.0, "mean_kv_usage": 0.5, "num_preemptions": 2}
    record = serve_record(MIXED, use, LatencyLimits())
    assert record["batch"] == {"mean_size": 5.5, "source": "/metrics, 9 samples", "mean_waiting": 1.0}
    assert record["kv_cache"] == {"mean_kv_usage": 0.5, "num_preemptions": 2}


def test_client_reports_its_cost_and_lateness() -> None:
    client = serve_record(MIXED, {}, LatencyLimits())["client"]
    assert client["cpu_share"] == 0.05
    assert client["max_late_s"] == 0.25
    assert client["tokens_per_chunk"] == 9 / 7
    assert client["cpu_us_per_chunk"] == pytest.approx(0.4 / 15 * 1e6)


def test_run_without_any_answer_has_a_report() -> None:
    run = load(request(0.0, [], failure=REFUSED, is_finished=False))
    record = serve_record(run, {}, LatencyLimits(ttft_s=1.0))
    assert record["figures"] == {}
    assert record["rates"]["requests_per_s"] == 0
    assert sentence(run, {}, LatencyLimits()) == "Nothing was answered; 1 requests failed."


def test_diagnosis_looks_at_the_prompts_of_late_requests() -> None:
    prompt, late_prompt = request(0.0, [0.1, 0.12]), request(0.0, [0.9, 0.92], num_prompt_tokens=6000)
    assert "prefill admission" in sentence(load(prompt, late_prompt), {}, LatencyLimits())
    assert "Fine" in sentence(load(prompt, late_prompt), {}, LatencyLimits(ttft_s=1.0))
    assert "too long" in sentence(load(prompt, late_prompt), {}, LatencyLimits(ttft_s=1.0, e2e_s=0.5))


def test_diagnosis_looks_at_longest_gaps_where_the_limit_does() -> None:
    halting = load(request(0.0, [0.1, *(0.2 + index / 100 for index in range(99))]))  # one gap of 100 ms, 98 of 10
    assert "Fine" in sentence(halting, {}, LatencyLimits())
    assert "Decode pressure" in sentence(halting, {}, LatencyLimits(itl_s=0.05))


def test_diagnosis_counts_tokens_where_the_limit_does() -> None:
    chunked = load(request(0.0, [0.1, 0.2], num_tokens=11))  # gaps of 100 ms, 10 ms a token
    assert "Decode pressure" in sentence(chunked, {}, LatencyLimits())
    assert "Fine" in sentence(chunked, {}, LatencyLimits(tpot_s=0.05))
    assert "Decode pressure" in sentence(chunked, {}, LatencyLimits(tpot_s=0.005))


def test_diagnosis_takes_the_servers_word() -> None:
    late = load(request(0.0, [0.9]))
    assert "Queueing" in sentence(late, {"mean_queue_s": 0.8}, LatencyLimits())
    assert "KV cache full" in sentence(late, {"num_preemptions": 1}, LatencyLimits())


def test_every_request_has_a_record() -> None:
    records = request_records(MIXED.requests)
    assert [record["error"] for record in records] == [None, None, "429 server_overloaded", None]
    assert records[0]["ttft_s"] == 1.0
    assert records[1]["num_output_tokens"] == 4
    assert records[2]["ttft_s"] is None
    assert (records[3]["ttft_s"], records[3]["e2e_s"]) == (1.0, None)
