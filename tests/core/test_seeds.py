"""Seeds of branches and arrivals: fixed for ever, 64 bits, and unrelated to each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.sampling_params import arrival_seed, branch_seed

SEEDS = st.integers(-(2**63), 2**64 - 1)


@given(SEEDS)
def test_branch_zero_keeps_the_seed(seed: int) -> None:
    assert branch_seed(seed, 0) == seed


@given(SEEDS, st.integers(0, 1000))
def test_a_branch_is_itself_a_request(seed: int, branch: int) -> None:
    assert branch_seed(branch_seed(seed, branch), 0) == branch_seed(seed, branch)


@given(SEEDS, st.integers(0, 10**6))
def test_seeds_have_64_bits(seed: int, number: int) -> None:
    assert 0 <= branch_seed(seed, number + 1) < 2**64
    assert 0 <= arrival_seed(seed, number) < 2**64


@given(st.integers(0, 2**63), st.integers(1, 100))
def test_negative_seeds_count_modulo_two_to_the_64(seed: int, branch: int) -> None:
    assert branch_seed(-seed, branch) == branch_seed(2**64 - seed, branch)


def test_a_branch_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="branch must be at least 0, got -1"):
        branch_seed(0, -1)


def test_near_seeds_and_branches_never_meet() -> None:
    seeds = {branch_seed(seed, branch) for seed in range(300) for branch in range(300)}
    assert len(seeds) == 300 * 300
    assert len({arrival_seed(seed, arrival) for seed in range(300) for arrival in range(300)}) == 300 * 300


def test_a_flipped_bit_of_the_seed_flips_about_half_of_a_branchs() -> None:
    pairs = [(seed, seed ^ 1 << bit) for seed in range(64) for bit in range(64)]
    flips = [(branch_seed(one, 1) ^ branch_seed(other, 1)).bit_count() for one, other in pairs]
    assert 31 < sum(flips) / len(flips) < 33
    assert min(flips) > 8


def test_known_seeds_never_change() -> None:
    # SplitMix64 started at 0 gives these (Steele et al. 2014); its state after i steps is i times the golden ratio.
    assert [branch_seed(0, i) for i in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
