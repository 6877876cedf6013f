"""No request waits without end under targets of time, however wrong the model of steps' times is."""

import pytest

from quire.scheduling.time_budget import MOST_STEPS
from support.fuzz_seeds import STEPS_PER_RUN, fuzz
from support.timed_runs import TimedRun

NUM_PARTS, RUNS_PER_PART = 20, 5000     # a part takes some 40 s


def test_random_loads_on_machines_that_drift_jump_and_lie_starve_no_request() -> None:
    runs = [TimedRun(seed).run() for seed in range(150)]
    assert max(run.longest_wait for run in runs) == MOST_STEPS - 1        # prompts beside decodes over the target
    assert sum(run.num_over_target for run in runs) > 0 < sum(run.num_within_target for run in runs)


@pytest.mark.fuzz
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_many_random_loads_starve_no_request(part: int) -> None:
    """`run` asserts progress after each step, and that each accepted request ends, the first of them under load."""
    fuzz(lambda seed: TimedRun(seed).run(), RUNS_PER_PART * STEPS_PER_RUN, part * RUNS_PER_PART)
