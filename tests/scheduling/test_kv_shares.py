"""Shares of the KV blocks: a request waits for others of its client, and never for itself."""

from collections.abc import Iterable

import pytest

from quire.core.config import SchedulerConfig
from quire.core.deltas import WAIT_REASONS
from quire.core.errors import ConfigError
from quire.core.sequence import Request
from support.scheduling import Harness

KV_SHARE = WAIT_REASONS.index("kv_share")


def num_held(harness: Harness, client_id: str) -> int:
    """Blocks that the running requests of a client hold, each once."""
    held = {
        block
        for request in harness.scheduler.queues.running
        for sequence in request.live
        if request.client_id == client_id and sequence.seq_id in harness.cache
        for block in harness.cache.block_ids(sequence.seq_id)
    }
    return len(held)


def running(harness: Harness) -> list[str]:
    return [request.client_id for request in harness.scheduler.queues.running]


def add(harness: Harness, clients: Iterable[str], prompt_len: int = 12, max_tokens: int = 8) -> list[Request]:
    return [harness.add(prompt_len, max_tokens=max_tokens, ignore_eos=True, client_id=client) for client in clients]


@pytest.mark.parametrize("policy", ["priority", "fcfs", "fair"])
def test_request_past_the_share_waits_and_other_clients_pass(policy: str) -> None:
    harness = Harness(40, budget=64, scheduling_policy=policy, max_kv_share=0.25)  # type: ignore[arg-type]
    requests = add(harness, "aaaabb")
    harness.step()
    assert sorted(running(harness)) == ["a", "a", "b", "b"], "10 blocks each: two of 3, and 2 of head room"
    assert harness.scheduler.queues.wait_reasons.current == "kv_share"
    harness.run()
    for request in requests:
        harness.assert_right(request)
    assert requests[2].waited[KV_SHARE] > 0
    assert requests[4].waited[KV_SHARE] == 0


def test_request_of_its_own_may_take_all() -> None:
    harness = Harness(20, budget=64, max_kv_share=0.1)
    (large,) = add(harness, "a", prompt_len=40, max_tokens=40)
    harness.run()
    assert large.num_preemptions == 0
    harness.assert_right(large)


def test_what_runs_gives_back_what_has_grown_past_the_share() -> None:
    harness = Harness(64, budget=64, max_kv_share=0.25)
    requests = add(harness, "aaab", prompt_len=4, max_tokens=40)
    peak = 0
    while harness.scheduler.has_requests:
        harness.step()
        if running(harness).count("a") > 1:
            peak = max(peak, num_held(harness, "a"))
    assert peak <= 16 + 3, "a share of 16, and at most a block for each that a step adds"
    assert requests[0].num_preemptions == 0
    assert requests[2].num_preemptions > 0
    assert requests[3].num_preemptions == 0
    for request in requests:
        harness.assert_right(request)


def test_hundreds_past_the_share_are_looked_at_once_and_then_by_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(40, budget=64, max_num_seqs=8, max_kv_share=0.25)
    add(harness, "a" * 900 + "bb")
    looked_at: list[Request] = []
    exceeds = harness.scheduler.planner._shares.exceeds
    monkeypatch.setattr(
        harness.scheduler.planner._shares, "exceeds", lambda request: looked_at.append(request) or exceeds(request)
    )
    harness.step()
    assert sorted(running(harness)) == ["a", "a", "b", "b"]
    assert len(looked_at) == 5, "four that run, and one that tells of all others"
    assert harness.scheduler.queues.num_deferred == 898
    looked_at.clear()
    harness.step()
    assert len(looked_at) == 1


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="max_kv_share must be above 0 and at most 1"):
        SchedulerConfig(max_kv_share=share)
