"""Passes over a workload: clients that wait for their answers, and a cache that is looked at while it works."""

from pathlib import Path

import pytest

from quire import LLM, KVStats
from quire_lab.bench.passes import kv_use, latency_pass, throughput_pass, watched_pass
from quire_lab.sim.workloads import WorkItem

WORKLOAD = [WorkItem([7] * num_prompt_tokens, output_len) for num_prompt_tokens, output_len in
            [(5, 9), (20, 3), (3, 1), (40, 6), (8, 8)]]


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> LLM:
    return LLM(model=str(demo_model), num_kv_blocks=32, max_num_seqs=2)


def stats(used_blocks: int, tail_waste_slots: int, num_sequences: int) -> KVStats:
    return KVStats(
        block_size=16, total_blocks=10, used_blocks=used_blocks, cached_blocks=0, free_blocks=10 - used_blocks,
        shared_blocks=0, num_sequences=num_sequences, tail_waste_slots=tail_waste_slots,
    )


def test_waste_is_weighted_by_time_and_an_empty_cache_does_not_count() -> None:
    use = kv_use([
        (stats(used_blocks=1, tail_waste_slots=8, num_sequences=1), 3.0),  # half of one block
        (stats(used_blocks=2, tail_waste_slots=8, num_sequences=2), 1.0),  # a quarter of two
        (stats(used_blocks=0, tail_waste_slots=0, num_sequences=0), 9.0),
    ])  # fmt: skip
    assert use["mean_tail_waste_ratio"] == pytest.approx((0.5 * 3 + 0.25) / 4)
    assert (use["peak_used_blocks"], use["peak_waste_slots_per_sequence"]) == (2, 8)


def test_cache_that_was_never_used_has_no_waste() -> None:
    assert kv_use([])["mean_tail_waste_ratio"] == 0.0


def test_rates_are_counts_of_what_came_back_over_the_wall(llm: LLM) -> None:
    done = throughput_pass(llm, WORKLOAD)
    assert done["wall_s"] > 0
    counts = [done[name] * done["wall_s"] for name in ("requests_per_s", "tokens_per_s", "total_tokens_per_s")]
    assert counts == pytest.approx([5, 27, 76 + 27])


def test_every_token_has_its_time_in_the_workloads_order(llm: LLM) -> None:
    timelines = latency_pass(llm, WORKLOAD, concurrency=2)
    assert [len(timeline.token_times_s) for timeline in timelines] == [9, 3, 1, 6, 8]
    for timeline in timelines:
        times = [timeline.sent_s, *timeline.token_times_s]
        assert times == sorted(times)
        assert timeline.ttft_s > 0


def test_client_asks_anew_when_it_is_answered(llm: LLM) -> None:
    timelines = latency_pass(llm, WORKLOAD, concurrency=2)
    ends = sorted(timeline.token_times_s[-1] for timeline in timelines)
    assert [timeline.sent_s for timeline in timelines] == [0.0, 0.0, *ends[:3]]


def test_watched_pass_sees_the_blocks_and_leaves_none_behind(llm: LLM) -> None:
    use = watched_pass(llm, WORKLOAD)
    assert use["total_blocks"] == 32
    assert 3 <= use["peak_used_blocks"] <= 3 + 1  # 46 tokens of the longest, and one block of its neighbour
    assert 0 < use["mean_tail_waste_ratio"] < 1
    assert use["peak_waste_slots_per_sequence"] < 16
    assert llm.kv_stats().used_blocks == 0
