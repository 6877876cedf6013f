"""Work of the scheduler per request and step, counted at two sizes: it grows no faster than what has to be done."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from quire.core.sampling_params import BeamSearchParams
from quire.core.sequence import Request
from quire.core.token_ids import TokenIds
from quire.scheduling import admission
from support.counted_calls import CountedCalls
from support.scheduling import Harness

SHORT, LONG = 40, 4000  # tokens of a prompt


class CountedList(list[Request]):
    """A list that counts the requests that it gives out one by one."""

    num_visited = 0

    def __iter__(self) -> Iterator[Request]:
        for request in super().__iter__():
            self.num_visited += 1
            yield request

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 (an index or a slice)
        self.num_visited += 1
        return super().__getitem__(index)


def queued_bytes(num_tokens: int, n: int) -> int:
    """Return what adding a request leaves allocated."""
    harness, prompt = Harness(num_blocks=1 << 16, max_num_seqs=64), list(range(num_tokens))
    harness.add(prompt, n=n, max_tokens=4)
    tracemalloc.start()
    harness.add(prompt, n=n, max_tokens=4)
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return num_bytes


def test_queued_request_holds_its_prompt_once_whatever_n() -> None:
    short, long = ([queued_bytes(num_tokens, n) for n in (1, 64)] for num_tokens in (1000, 32_000))
    assert long[0] - short[0] < 31_000 * 5, "packed into 4 bytes a token"
    assert long[1] - short[1] < 31_000 * 5, "branches add nothing that grows with the prompt"


@pytest.mark.parametrize("num_waiting", [100, 1000])
def test_request_that_returns_is_found_without_a_look_at_all_that_wait(num_waiting: int) -> None:
    harness = Harness(num_blocks=40, block_size=4, num_swap_blocks=100, mode="swap")
    for _ in range(6):
        harness.add(12, priority=50, max_tokens=40, ignore_eos=True)
    while not harness.scheduler.queues.swapped:
        harness.step()
    for _ in range(num_waiting):
        harness.add(3, priority=-50, max_tokens=4)
    waiting = harness.scheduler.queues.waiting = CountedList(harness.scheduler.queues.waiting)
    assert harness.scheduler.queues.swapped
    harness.scheduler.schedule()
    assert waiting.num_visited < 20


@pytest.mark.parametrize("num_tokens", [100, 4000])
def test_rows_of_a_fork_share_the_prompt_with_the_plan(num_tokens: int) -> None:
    harness = Harness(num_blocks=2000, max_num_seqs=64, budget=4096)
    request = harness.add(num_tokens, n=64, max_tokens=4, ignore_eos=True)
    plan = harness.schedule()
    assert len(plan.new_rows) == 64
    prompt = request.live[0].token_ids.prompt
    assert all(isinstance(new.token_ids, TokenIds) and new.token_ids.prompt is prompt for new in plan.new_rows)
    assert not any(new.token_ids.output for new in plan.new_rows if isinstance(new.token_ids, TokenIds))
    harness.execute(plan)


def calls_of_steps(harness: Harness, num_steps: int) -> list[int]:
    """Return the calls that each step makes apart from the executor's."""
    counts = []
    for _ in range(num_steps):
        with CountedCalls() as calls:
            plan = harness.scheduler.schedule()
        harness.executor.submit(plan)
        result = harness.executor.collect()
        with calls:
            harness.scheduler.update(plan, result)
        counts.append(calls.count)
    return counts


def test_fork_of_many_branches_makes_no_calls_per_block_of_the_prompt() -> None:
    counts = []
    for num_tokens in (SHORT, LONG):
        harness = Harness(num_blocks=3000, max_num_seqs=64, budget=4096)
        harness.add(num_tokens, n=64, max_tokens=4, ignore_eos=True)
        counts.append(calls_of_steps(harness, 1)[0])
    assert counts[1] < counts[0] + LONG, f"{counts}: four for each block of the prompt, once for all branches"


def test_step_of_a_wide_beam_search_makes_no_calls_per_block_of_the_prompt() -> None:
    counts = []
    for num_tokens in (SHORT, LONG):
        harness = Harness(num_blocks=3000, max_num_seqs=16, budget=4096, caching=True)
        harness.add_beams(num_tokens, BeamSearchParams(16, 12, ignore_eos=True))
        counts.append(max(calls_of_steps(harness, 8)[2:]))
    assert counts[1] < 1.5 * counts[0], counts


def burst(num_tokens: int) -> Harness:
    """Return a scheduler in whose first step one request computes a prefix for 40 others."""
    harness = Harness(num_blocks=3000, max_num_seqs=64, budget=400, caching=True)
    common = [7] * num_tokens
    for index in range(41):
        harness.add([*common, index % 8, index // 8], max_tokens=20, ignore_eos=True)
    return harness


def test_requests_behind_a_pending_prefix_do_not_walk_it_again() -> None:
    """Eight steps compute the prefix; only its own blocks and a few calls for each request are visited in each."""
    short, long = (calls_of_steps(burst(num_tokens), num_steps) for num_tokens, num_steps in ((400, 1), (3000, 7)))
    assert max(long[1:]) < 2 * short[0], (short, long)


def test_burst_behind_a_cached_prefix_is_admitted_without_a_walk_for_each_request() -> None:
    counts = []
    for num_tokens in (400, 3200):
        harness = burst(num_tokens)
        while not harness.outputs:
            harness.step()
        counts.append(max(calls_of_steps(harness, 2)))
    assert counts[1] < 1.5 * counts[0], counts


def test_burst_is_admitted_in_order_over_steps_that_each_do_a_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_WORK", 1000)
    harness = burst(400)
    admitted, most = list[int](), 0
    while harness.scheduler.queues.waiting:
        harness.step()
        ids = [request.request_id for request in harness.scheduler.step.admitted]
        admitted, most = admitted + ids, max(most, len(ids))
    assert admitted == sorted(admitted)
    assert 1 < most < 10
    harness.run()
    for request in harness.requests.values():
        harness.assert_right(request)
