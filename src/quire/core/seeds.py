"""Seeds of the branches of a request: every branch draws from a stream of its own.

A draw is made by a counter-based generator from (branch seed, index of the output token), so a branch's tokens do
not depend on what else runs, on how often it was preempted, or on which step drew them.
"""

NUM_SEEDS = 1 << 64  # draws are made with seeds modulo this
_MASK_64 = NUM_SEEDS - 1


def _mix64(value: int) -> int:
    """Scramble 64 bits so that near inputs give unrelated outputs (the finalizer of SplitMix64; Steele et al. 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK_64
    return value ^ (value >> 31)


def branch_seed(seed: int, branch: int) -> int:
    """Return the seed of branch `branch` of a request with seed `seed`: for branches above 0 below NUM_SEEDS.

    Branch 0 keeps the request's own seed, so `n=1` and the first of `n` branches are the same request, and branch i
    equals an independent request with seed `branch_seed(seed, i)`. Negative seeds count modulo NUM_SEEDS.
    """
    if branch < 0:
        raise ValueError(f"branch must be at least 0, got {branch}")
    if branch == 0:
        return seed
    return _mix64((seed + branch * 0x9E3779B97F4A7C15) & _MASK_64)


def arrival_seed(engine_seed: int, arrival: int) -> int:
    """Return the seed of the request with arrival number `arrival` that came without one."""
    return _mix64(_mix64(engine_seed & _MASK_64) ^ (arrival & _MASK_64))
