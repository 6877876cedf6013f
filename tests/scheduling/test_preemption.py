"""The choice between swapping and computing again, and the account of both."""

import pytest

from quire.cache.swap_space import Footprint
from quire.core.config import PreemptionMode
from quire.core.plan import MeasuredRates
from quire.core.sequence import Request
from quire.scheduling.preemption import PreemptionPolicy
from support.scheduling import Harness

BLOCKS = Footprint(num_blocks=10, num_held_by_others=0)


def request_of(*num_computed: int, num_prompt_tokens: int = 100) -> Request:
    """A request whose branches have computed so many tokens."""
    harness = Harness(num_blocks=1000)
    request = harness.add(num_prompt_tokens, n=len(num_computed), max_tokens=200)
    for sequence, count in zip(request.live, num_computed, strict=True):
        sequence.num_computed_tokens = count
    return request


def policy_at(tokens_per_s: float | None, out_per_s: float | None, in_per_s: float | None) -> PreemptionPolicy:
    """A policy of mode auto that knows these rates."""
    policy = PreemptionPolicy("auto", block_size=16)
    policy.rates = MeasuredRates(tokens_per_s, out_per_s, in_per_s)
    return policy


@pytest.mark.parametrize(
    ("mode", "num_free", "chosen"),
    [
        ("recompute", 100, "recompute"),
        ("swap", 100, "swap"),
        ("swap", 10, "swap"),
        ("swap", 9, "recompute"),
        ("auto", 0, "recompute"),
        ("auto", 100, "swap"),
    ],
)
def test_swap_needs_room_for_all_blocks(mode: PreemptionMode, num_free: int, chosen: str) -> None:
    policy = PreemptionPolicy(mode, block_size=16)
    assert policy.choose(request_of(150), BLOCKS, num_free) == chosen
    assert policy.stats.num_preemptions == {"recompute": 0, "swap": 0} | {chosen: 1}
    assert policy.stats.saved_s == 0, "there was no choice, or nothing to compare by"


def test_request_without_blocks_has_nothing_to_swap() -> None:
    assert PreemptionPolicy("swap", 16).choose(request_of(0), Footprint(0, 0), 100) == "recompute"


@pytest.mark.parametrize("unknown", [0, 1, 2])
def test_while_a_rate_is_unknown_the_victim_is_swapped(unknown: int) -> None:
    rates = [1e9, 1.0, 1.0]
    policy = policy_at(*(None if index == unknown else rate for index, rate in enumerate(rates)))
    assert policy.choose(request_of(150), BLOCKS, 100) == "swap"


@pytest.mark.parametrize(
    ("tokens_per_s", "chosen", "saved_s"),
    [(100, "swap", 1.5 - 0.3), (1000, "recompute", 0.3 - 0.15)],
)
def test_auto_takes_the_cheaper_and_counts_the_difference(tokens_per_s: float, chosen: str, saved_s: float) -> None:
    policy = policy_at(tokens_per_s, 50, 100)                        # 10 blocks: 0.2 s out and 0.1 s back
    assert policy.choose(request_of(150), BLOCKS, 100) == chosen
    assert policy.stats.saved_s == pytest.approx(saved_s)


def test_prompt_of_a_group_is_computed_once() -> None:
    policy = policy_at(100, 50, 100)
    policy.choose(request_of(110, 120), BLOCKS, 100)                 # 100 + 10 + 20 tokens
    assert policy.stats.saved_s == pytest.approx(1.3 - 0.3)


def test_blocks_that_others_hold_need_not_come_back_nor_be_computed() -> None:
    policy = policy_at(100, 50, 100)
    policy.choose(request_of(150), Footprint(10, 9), 100)            # 6 tokens; 10 blocks out, 1 back
    assert policy.stats.saved_s == pytest.approx(0.2 + 0.01 - 0.06)
    assert policy.stats.num_preemptions == {"recompute": 1, "swap": 0}


def note_lost(policy: PreemptionPolicy, num_tokens: int) -> None:
    """Let a sequence return that has lost so many tokens, and as many more that it has found again."""
    sequence = request_of(0).live[0]
    sequence.num_lost_tokens = 2 * num_tokens
    assert policy.record_resumed(sequence, num_tokens) == num_tokens
    assert policy.record_resumed(sequence, 0) == 0, "counted once"


def test_seconds_are_added_up() -> None:
    policy = PreemptionPolicy("auto", 16)
    note_lost(policy, 5)
    assert (policy.stats.num_recomputed_tokens, policy.stats.recompute_s) == (5, 0), "no rate yet"
    for _ in range(2):
        policy.rates = MeasuredRates(100)
        note_lost(policy, 50)
    assert (policy.stats.num_recomputed_tokens, policy.stats.recompute_s) == (105, 1.0)
