"""Seeds of the long random tests: a fresh one in each run of `make fuzz`, printed at its start and by a failure.

QUIRE_FUZZ_SEED takes the place of the fresh one, QUIRE_FUZZ_STEPS that of a test's own length: both together replay
the one run that has failed.
"""

import os
import random
from collections.abc import Callable
from functools import cache

STEPS_PER_RUN = 500  # operations on a cache; a whole life of a scheduler counts as much


@cache
def first_seed() -> int:
    """Return the seed of the first run, the same in all tests of this process."""
    return int(os.environ.get("QUIRE_FUZZ_SEED") or random.SystemRandom().randrange(2**32))


def fuzz(run: Callable[[int], object], num_steps: int, num_skipped: int = 0) -> None:
    """Run with one seed after the other until there are `num_steps` steps; a failure tells its own.

    `num_skipped`: seeds that other parts of the same test run.
    """
    num_steps = int(os.environ.get("QUIRE_FUZZ_STEPS") or num_steps)
    for seed in range(first_seed(), first_seed() + -(-num_steps // STEPS_PER_RUN)):
        try:
            run(seed + num_skipped)
        except BaseException as fault:
            fault.add_note(f"replay with QUIRE_FUZZ_SEED={seed} QUIRE_FUZZ_STEPS={STEPS_PER_RUN}")
            raise
