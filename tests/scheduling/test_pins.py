"""Pinned prefixes in the scheduler: computed like any request, kept, and held against all that was promised."""

import pytest

from quire.core.errors import ContextLengthError, InvalidRequestError
from quire.core.pooling import MAX_PINNED_PREFIXES
from quire.core.sequence import Request
from quire.scheduling.plan_builder import PlanBuilder
from support.scheduling import Harness

PREFIX = list(range(41))  # ten blocks of four, and one token
OTHER = 49


def harness_of(num_blocks: int = 100, max_model_len: int = 80, **options: int) -> Harness:
    options = {"block_size": 4, "budget": 64} | options
    return Harness(num_blocks=num_blocks, max_model_len=max_model_len, caching=True, **options)  # type: ignore[arg-type]


def pinned(harness: Harness, prefix: list[int], salt: str | None = None) -> Request:
    pin = harness.pin(prefix, salt)
    harness.run()
    assert pin.request_id in harness.cache.pins.ids
    return pin


def num_pinned(harness: Harness) -> int:
    return harness.scheduler.limits.num_pinned_blocks


def flood(harness: Harness) -> None:
    """Requests that evict everything without an owner."""
    for salt in range(20):
        harness.add(40, salt=str(salt), max_tokens=20, ignore_eos=True)
    harness.run()
    assert harness.cache.stats().evicted_blocks > 0


class TestFinding:
    def test_p10_prompt_computes_its_suffix_only(self) -> None:
        harness = harness_of()
        pinned(harness, PREFIX)
        requests = [harness.add([*PREFIX, OTHER, token, token], max_tokens=5, n=n) for token, n in ((1, 1), (2, 4))]
        harness.step()
        assert harness.executor.trace[-1][2] == [3, 3]
        assert [request.num_cached_tokens for request in requests] == [41, 41]
        harness.run()
        for request in requests:
            harness.assert_right(request)

    def test_pin_survives_a_flood_that_evicts_everything_else(self) -> None:
        harness = harness_of(num_blocks=60)
        pinned(harness, PREFIX)
        kept = harness.add([5, *PREFIX], max_tokens=1)
        flood(harness)
        again = [harness.add([*prompt, OTHER], max_tokens=3) for prompt in (PREFIX, kept.prompt_token_ids)]
        harness.run()
        assert [request.num_cached_tokens for request in again] == [41, 0]

    def test_burst_waits_for_a_pin_that_is_under_way(self) -> None:
        harness = harness_of()
        harness.pin(PREFIX)
        requests = [harness.add([*PREFIX, OTHER, token], max_tokens=2) for token in range(4)]
        harness.step()
        harness.step()
        assert [request.num_cached_tokens for request in requests] == [41] * 4
        harness.run()

    def test_pin_is_computed_in_chunks_and_after_preemptions(self) -> None:
        harness = harness_of(num_blocks=24, budget=8)
        first = harness.add(20, max_tokens=50, ignore_eos=True)
        harness.step()
        pin = harness.pin(list(range(8, 24)))
        while pin.num_preemptions == 0:
            for _ in range(2):
                harness.step()
            harness.scheduler.planner.preempt(PlanBuilder(), pin)
            harness.check()
        harness.run()
        harness.assert_right(first)
        assert harness.cache.pins.num_blocks == 4

    def test_failed_step_leaves_what_is_pinned_and_computes_the_rest_again(self) -> None:
        harness = harness_of()
        old = pinned(harness, PREFIX[:7])
        pin = harness.pin(PREFIX)
        harness.scheduler.schedule()
        harness.scheduler.roll_back()
        harness.check()
        assert harness.cache.pins.ids == (old.request_id,)
        harness.run()
        assert harness.cache.pins.ids == (old.request_id, pin.request_id)
        request = harness.add([*PREFIX, OTHER], max_tokens=3)
        harness.run()
        assert request.num_cached_tokens == 41
        harness.assert_right(request)

    def test_salted_pin_serves_its_salt_only(self) -> None:
        harness = harness_of()
        pinned(harness, PREFIX, "salt")
        requests = [harness.add([*PREFIX, OTHER], salt=salt, max_tokens=1) for salt in (None, "salt", "other")]
        harness.run()
        assert [request.num_cached_tokens for request in requests] == [0, 41, 0]


class TestAccounts:
    def test_pin_counts_from_the_moment_it_is_let_in(self) -> None:
        harness = harness_of(budget=8)
        pin = harness.pin(PREFIX)
        assert num_pinned(harness) == 11
        harness.step()
        assert num_pinned(harness) == 11
        harness.run()
        assert num_pinned(harness) == harness.cache.stats().pinned_blocks == 11
        harness.pin(PREFIX)
        assert num_pinned(harness) == 22, "it may come to need blocks of its own"
        harness.run()
        assert num_pinned(harness) == 11
        assert harness.scheduler.abort(pin.request_id)
        assert num_pinned(harness) == 11

    def test_pin_that_is_ended_early_gives_everything_back(self) -> None:
        harness = harness_of(budget=8)
        for num_steps in (0, 1, 3):
            pin = harness.pin(PREFIX)
            for _ in range(num_steps):
                harness.step()
            assert harness.scheduler.abort(pin.request_id)
            harness.check()
            assert (harness.cache.pins.ids, num_pinned(harness), harness.cache.stats().used_blocks) == ((), 0, 0)

    def test_unpinned_prefix_is_gone_once(self) -> None:
        harness = harness_of()
        pin = pinned(harness, PREFIX)
        assert harness.scheduler.abort(pin.request_id)
        assert not harness.scheduler.abort(pin.request_id)
        assert (num_pinned(harness), harness.cache.stats().used_blocks) == (0, 0)

    def test_request_that_needs_pinned_blocks_is_refused_until_they_are_free(self) -> None:
        harness = harness_of(num_blocks=40, max_num_seqs=4)
        params = {"n": 4, "max_tokens": 35, "ignore_eos": True}  # one block each for the prompt, nine for the rest
        pin = pinned(harness, PREFIX)
        with pytest.raises(ContextLengthError, match=r"may need 36 KV .*are 40 \(num_kv_blocks\), 11 of them pinned"):
            harness.add([1], **params)
        most = harness.scheduler.limits.most_tokens(1, 4)
        harness.add([1], n=4, max_tokens=most, ignore_eos=True)
        harness.run()
        harness.scheduler.abort(pin.request_id)
        harness.add([1], **params)
        harness.run()


class TestRefusals:
    @pytest.mark.parametrize(("num_blocks", "fits"), [(31, True), (30, False)])
    def test_longest_request_keeps_its_room(self, num_blocks: int, fits: bool) -> None:
        harness = harness_of(num_blocks=num_blocks)  # max_model_len is 20 blocks, the prefix 11
        if fits:
            pinned(harness, PREFIX)
            harness.add(79, max_tokens=1)
            harness.run()
            return
        told = r"41 tokens takes 11 KV .* all 30 \(num_kv_blocks\) 0 are pinned and max_model_len 80 needs 20"
        with pytest.raises(InvalidRequestError, match=told):
            harness.pin(PREFIX)
        assert not harness.scheduler.has_requests
        assert num_pinned(harness) == 0

    @pytest.mark.parametrize("runs", [False, True], ids=["waiting", "running"])
    def test_request_that_was_let_in_keeps_its_room(self, runs: bool) -> None:
        harness = harness_of(num_blocks=45, max_num_seqs=4)
        group = harness.add([1], n=4, max_tokens=35, ignore_eos=True)
        if runs:
            harness.step()
        told = r"takes 11 KV .* 45 \(num_kv_blocks\) 0 are pinned and a request that was let in needs 36"
        with pytest.raises(InvalidRequestError, match=told):
            harness.pin(PREFIX)
        harness.pin(PREFIX[:36])
        harness.run()
        harness.assert_right(group)
        pinned(harness, PREFIX[:8])

    @pytest.mark.parametrize(("length", "fits"), [(79, True), (80, False)])
    def test_prefix_leaves_room_for_a_token(self, length: int, fits: bool) -> None:
        harness = harness_of()
        if fits:
            pinned(harness, [1] * length)
            return
        with pytest.raises(ContextLengthError, match=r"has 80 tokens, but .* is 80 tokens"):
            harness.pin([1] * length)

    def test_number_of_pins_is_bounded_with_those_under_way(self) -> None:
        harness = harness_of(num_blocks=200)
        for index in range(MAX_PINNED_PREFIXES):
            harness.pin([index % 50])
            if index % 2:
                harness.run()
        with pytest.raises(InvalidRequestError, match="64 prefixes are pinned already"):
            harness.pin([1, 2])
        harness.run()
        harness.scheduler.abort(5)
        pinned(harness, [1, 2])

    def test_nothing_is_pinned_without_prefix_caching(self) -> None:
        harness = Harness(num_blocks=100, max_model_len=80)
        with pytest.raises(InvalidRequestError, match="enable_prefix_caching"):
            harness.pin(PREFIX)
