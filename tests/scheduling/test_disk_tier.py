"""The scheduler with a disk tier: loads, waits, leases and writes, over a store that answers by a script."""

import random
from functools import partial

import pytest

from quire.cache import disk_tier, loads
from quire.cache.disk_tier import DiskTier
from quire.core.config import DiskWritePolicy
from quire.core.deltas import WAIT_REASONS
from quire.core.plan import MeasuredRates
from quire.core.sequence import Request, SequenceStatus
from quire.engine import kv_reads
from support.fuzz_seeds import STEPS_PER_RUN, fuzz
from support.scheduling import Harness, make_disk, random_run, random_store
from support.scripted_store import ScriptedStore

PREFIX = list(range(20))  # 5 blocks
END = {"max_tokens": 3, "ignore_eos": True}


def store_of(num_slots: int = 100, *, hangs: bool = False, **settings: int) -> ScriptedStore:
    store = ScriptedStore(num_slots, random.Random(0), never_postpones=True, **{"most_turns": 0} | settings)
    store.hangs = hangs
    return store


def open_harness(
    store: ScriptedStore, num_blocks: int = 40, policy: DiskWritePolicy = "finished", **settings: object
) -> Harness:
    """A harness over a store: a new engine with what the store has."""
    return Harness(num_blocks, caching=True, make_disk=partial(make_disk, store=store, policy=policy), **settings)  # type: ignore[arg-type]


def settle(harness: Harness) -> None:
    """Run to the end, and let the disk finish."""
    harness.run()
    assert harness.disk is not None
    while harness.disk.num_left:
        harness.disk.step()
    harness.check()
    for request in harness.requests.values():
        harness.assert_right(request)


def stats(harness: Harness) -> dict[str, float]:
    assert harness.disk is not None
    return harness.disk.stats()


def filled(store: ScriptedStore, prompt: list[int] = PREFIX) -> ScriptedStore:
    """Let an engine compute a prompt and write it to the store."""
    harness = open_harness(store)
    harness.add(prompt, **END)
    settle(harness)
    assert len(store.disk) >= (len(prompt) + 2) // 4
    return store


def tier_of(harness: Harness) -> DiskTier:
    assert harness.cache.loads is not None
    assert harness.cache.loads.disk is not None
    return harness.cache.loads.disk


def until_loading(harness: Harness, request: Request) -> None:
    """Step until a request waits for a load."""
    found = harness.cache.loads
    assert found is not None
    while not found.is_loading(request.request_id):
        assert request.live[0].status is SequenceStatus.WAITING, "admitted without a load"
        harness.step()


def test_finished_request_is_found_after_a_restart() -> None:
    store = filled(store_of())
    harness = open_harness(store)
    request = harness.add([*PREFIX, 1, 2], **END)
    settle(harness)
    assert request.num_cached_tokens == request.num_disk_tokens == 20
    assert harness.executor.num_computed == 2 + 2
    assert stats(harness)["hits_tokens"] == 20
    assert stats(harness)["queries_tokens"] == 22


def test_last_token_is_computed_although_its_block_was_loaded() -> None:
    harness = open_harness(filled(store_of()))
    request = harness.add(PREFIX, **END)
    settle(harness)
    assert request.num_cached_tokens == 19
    assert harness.executor.num_computed == 1 + 2


def test_load_goes_on_where_the_match_in_the_cache_ends() -> None:
    harness = open_harness(filled(store_of()))
    harness.add(PREFIX[:8], **END)
    harness.run()
    request = harness.add([*PREFIX, 1], **END)
    settle(harness)
    assert request.num_cached_tokens == 20
    assert 0 < request.num_disk_tokens <= 12


def test_others_pass_while_one_loads() -> None:
    harness = open_harness(filled(store_of(most_turns=40)))
    loading, other = harness.add([*PREFIX, 1], **END), harness.add([9, 9, 9], **END)
    until_loading(harness, loading)
    while other.live:
        harness.step()
    assert loading.live[0].status is SequenceStatus.WAITING
    settle(harness)
    assert loading.num_disk_tokens == 20
    assert loading.waited[WAIT_REASONS.index("kv_load")] > 0, "steps are counted under kv_load"


def test_requests_with_one_prefix_load_it_once() -> None:
    harness = open_harness(filled(store_of(most_turns=9)))
    requests = [harness.add([*PREFIX, number], **END) for number in range(3)]
    settle(harness)
    assert [request.num_cached_tokens for request in requests] == [20] * 3
    assert stats(harness)["loaded_blocks"] == 5


@pytest.mark.parametrize("num_good", [0, 1, 2, 4])
def test_block_that_cannot_be_read_is_computed_with_all_behind_it(num_good: int) -> None:
    store = filled(store_of())
    slots = list(store.disk)
    record, payload = store.disk[slots[num_good]]
    store.disk[slots[num_good]] = record._replace(tokens=b"spoilt"), payload
    harness = open_harness(store, policy="reused")
    store.disk[slots[num_good]] = record, payload          # it was recovered, and is spoilt when it is read
    store.spoilt.add(slots[num_good])
    request = harness.add([*PREFIX, 1], **END)
    settle(harness)
    assert request.num_disk_tokens in (0, 4 * num_good)
    assert len(tier_of(harness).stored) <= num_good


def test_bad_block_is_forgotten_with_its_children() -> None:
    store = filled(store_of())
    harness = open_harness(store, policy="reused")
    second = list(store.disk)[1]
    store.spoilt.add(second)
    request = harness.add([*PREFIX, 1], **END)
    settle(harness)
    assert request.num_disk_tokens == 4
    assert stats(harness)["bad_blocks"] == 1
    assert len(store.disk) == 1
    again = harness.add([*PREFIX, 2], **END)
    settle(harness)
    assert again.num_cached_tokens == 20, "in the cache: it was computed"


def test_salts_do_not_share_stored_blocks() -> None:
    harness = open_harness(filled(store_of()))
    request = harness.add([*PREFIX, 1], salt="another", **END)
    settle(harness)
    assert request.num_cached_tokens == 0


def test_aborted_load_leaves_nothing() -> None:
    harness = open_harness(filled(store_of(most_turns=40)))
    request = harness.add([*PREFIX, 1], **END)
    until_loading(harness, request)
    assert harness.cache.num_free_blocks < 40
    assert harness.scheduler.abort(request.request_id)
    harness.check()
    harness.assert_empty()
    other = harness.add([*PREFIX, 2], **END)
    harness.requests.pop(request.request_id)
    settle(harness)
    assert other.num_disk_tokens in (0, 20)


def test_leases_are_given_back_before_anything_is_preempted() -> None:
    store = filled(store_of(hangs=True))
    harness = open_harness(store, num_blocks=12, max_num_seqs=2)
    running = harness.add([7, 7, 7], max_tokens=38, ignore_eos=True)
    harness.step()
    loading = harness.add([*PREFIX, 1], max_tokens=2, ignore_eos=True)
    until_loading(harness, loading)
    settle(harness)
    assert running.num_preemptions == 0
    assert stats(harness)["cancelled_loads"] == 1
    assert loading.num_disk_tokens == 0


def test_request_that_is_alone_with_a_load_waits_for_it_and_then_fits() -> None:
    harness = open_harness(filled(store_of(most_turns=30)), num_blocks=12, max_num_seqs=4)
    loading = harness.add([*PREFIX, 1], max_tokens=2, ignore_eos=True)
    until_loading(harness, loading)
    large = harness.add([8] * 40, max_tokens=2, ignore_eos=True)
    harness.step()
    assert harness.scheduler.queues.wait_reasons.current == "kv_load"
    settle(harness)
    assert (loading.num_disk_tokens, large.num_preemptions) == (20, 0)


def test_read_that_never_returns_is_given_up_and_none_is_begun_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_reads, "READ_LIMIT_S", 0.5)
    store = filled(store_of(hangs=True))
    harness = open_harness(store)
    first = harness.add([*PREFIX, 1], **END)
    harness.run()
    second = harness.add([*PREFIX[:12], *range(30, 44)], **END)
    harness.run()
    assert (first.num_disk_tokens, second.num_disk_tokens) == (0, 0)
    assert store.num_hung == 2, "two reads of the first request"
    assert stats(harness)["is_on"] == 0


def test_loads_that_have_not_begun_to_read_are_given_up_with_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_reads, "READ_LIMIT_S", 0.5)
    monkeypatch.setattr(loads, "MAX_JOBS", 1)
    store = filled(filled(store_of(), [9] * 20), PREFIX)
    store.hangs = True
    harness = open_harness(store)
    requests = [harness.add([*PREFIX, 1], **END), harness.add([*[9] * 20, 1], **END)]
    harness.run()
    assert [request.num_disk_tokens for request in requests] == [0, 0]
    assert stats(harness)["cancelled_loads"] == 2


def test_loads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MAX_LOADS", 2)
    store = store_of(most_turns=5)
    prompts = [[number] * 12 for number in range(6)]
    for prompt in prompts:
        filled(store_of(), prompt)
    harness = open_harness(store)
    for prompt in prompts:
        harness.add(prompt, **END)
    settle(harness)
    harness = open_harness(store)
    requests = [harness.add([*prompt, 1], **END) for prompt in prompts]
    found, most = harness.cache.loads, 0
    assert found is not None
    while harness.scheduler.has_requests:
        harness.step()
        most = max(most, found.num_loads)
    assert most == 2
    assert [request.num_disk_tokens for request in requests] == [12] * 6


def test_load_that_would_take_longer_than_computing_is_not_begun() -> None:
    store = filled(store_of())
    harness = open_harness(store, rates=MeasuredRates(prefill_tokens_per_s=100.0))
    tier = tier_of(harness)
    tier.counts.num_loaded, tier.blocks_per_s = disk_tier.TRUSTED_BLOCKS, 24.0
    harness.add([1], **END)
    harness.run()                      # the rate of prefills comes with a result
    slow = harness.add([*PREFIX, 1], **END)
    settle(harness)
    assert slow.num_disk_tokens == 0
    assert stats(harness)["slower_loads"] == 1


@pytest.mark.parametrize(("policy", "num_finished"), [("reused", 0), ("finished", 5), ("all", 5)])
def test_policy_decides_what_is_written(policy: DiskWritePolicy, num_finished: int) -> None:
    store = store_of()
    harness = open_harness(store, policy=policy)
    harness.add(PREFIX, **END)
    settle(harness)
    assert len(store.disk) == num_finished
    harness.add([*PREFIX, 1], max_tokens=1)
    settle(harness)
    assert len(store.disk) == 5


@pytest.mark.parametrize(("policy", "num_written"), [("finished", 0), ("all", 5)])
def test_aborted_request_is_written_by_policy_all_alone(policy: DiskWritePolicy, num_written: int) -> None:
    store = store_of()
    harness = open_harness(store, policy=policy, budget=64)
    request = harness.add(PREFIX, max_tokens=9, ignore_eos=True)
    harness.step()
    harness.step()
    harness.scheduler.abort(request.request_id)
    harness.requests.clear()
    settle(harness)
    assert len(store.disk) == num_written


def test_block_is_written_once() -> None:
    store = store_of(most_turns=2)
    harness = open_harness(store)
    for number in range(4):
        harness.add([*PREFIX, number], **END)
        harness.run()
    settle(harness)
    assert stats(harness)["written_blocks"] == len(store.disk) == 5 + 4 - 4 % 4 - 4  # the prefix: answers end inside


def test_blocks_that_were_evicted_before_they_were_copied_are_dropped_and_counted() -> None:
    store = store_of(num_staged=1, most_turns=9)
    harness = open_harness(store, num_blocks=8)
    harness.add(PREFIX, **END)
    harness.run()
    harness.add([30 + number for number in range(20)], **END)
    settle(harness)
    assert stats(harness)["dropped_blocks"] > 0
    assert stats(harness)["written_blocks"] + stats(harness)["dropped_blocks"] == 10


def test_queue_of_runs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "MAX_QUEUED_BYTES", 200)
    store = store_of(num_staged=0)
    harness = open_harness(store)
    for number in range(5):
        harness.add([number] * 20, **END)
        harness.run()
    assert stats(harness)["dropped_blocks"] == 15
    store.is_on = False
    settle(harness)
    assert stats(harness)["dropped_blocks"] == 25


def test_store_that_is_full_keeps_what_was_used_last() -> None:
    store = store_of(num_slots=5)
    harness = open_harness(store)
    for number in range(3):
        harness.add([number] * 20, **END)
        settle(harness)
    assert len(store.disk) == 5
    assert stats(harness)["evicted_blocks"] == 10
    harness = open_harness(store)
    request = harness.add([2] * 20, **END)
    settle(harness)
    assert request.num_disk_tokens == 19


def test_failed_step_leaves_loads_as_they_are() -> None:
    harness = open_harness(filled(store_of(most_turns=30)))
    loading = harness.add([*PREFIX, 1], **END)
    running = harness.add([5, 5], max_tokens=30, ignore_eos=True)
    until_loading(harness, loading)
    harness.step(fails=True)
    settle(harness)
    assert running.num_preemptions == 1
    assert loading.num_disk_tokens == 20


def two_lives(seed: int, **kind: bool) -> tuple[float, float]:
    """Run two engines over one store, with the same requests; return the blocks written and loaded."""
    store, written, loaded = random_store(seed), 0.0, 0.0
    for _ in range(2):
        harness = random_run(seed, store=store, **kind)  # type: ignore[arg-type]
        assert harness.disk is not None
        harness.disk.drain(0.1)
        harness.check()
        written, loaded = written + stats(harness)["written_blocks"], loaded + stats(harness)["loaded_blocks"]
    return written, loaded


@pytest.mark.parametrize("kind", ["plain", "crowded", "windowed", "late", "stateful"])
def test_random_runs_over_a_store_are_safe_live_and_right(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MIN_BLOCKS", 1)
    monkeypatch.setattr(kv_reads, "READ_LIMIT_S", 0.02)
    totals = [two_lives(seed, **{} if kind == "plain" else {kind: True}) for seed in range(10, 24)]
    assert sum(written for written, _ in totals) > 100
    assert sum(loaded for _, loaded in totals) > (5 if kind == "stateful" else 20)  # blocks alone are not loaded


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["plain", "crowded", "windowed", "late", "stateful"])
def test_many_random_runs_over_a_store_are_safe_live_and_right(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MIN_BLOCKS", 1)
    monkeypatch.setattr(kv_reads, "READ_LIMIT_S", 0.02)
    fuzz(lambda seed: two_lives(seed, **{} if kind == "plain" else {kind: True}), 100 * STEPS_PER_RUN)
