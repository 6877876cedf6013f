"""Probes of a rate search, over loads whose times are written down instead of measured."""

import asyncio
from collections.abc import Callable

import pytest

from quire_lab.bench.bench_flags import ArrivalFlags, SearchFlags
from quire_lab.bench.bench_serve import Probe, RateFinder
from quire_lab.bench.diagnosis import LatencyLimits
from quire_lab.bench.http_load import AnswerStream, LoadRun, SentRequest
from quire_lab.bench.server import MeasuredLoad
from quire_lab.sim.workloads import Schedule, WorkItem


class SlowingServer:
    """Stands in for a server under test: a request is answered in `late_s` once more than `capacity` come a second."""

    def __init__(
        self, capacity: float, late_s: float = 9.0, late_share: float = 1.0, interrupted_after: int | None = None
    ) -> None:
        self.capacity, self.late_s, self.late_share = capacity, late_s, late_share
        self.interrupted_after = interrupted_after  # probes
        self.interrupted = asyncio.Event()
        self.prompts: list[list[list[int]]] = []
        self.was_stopped: list[bool] = []

    async def drain(self) -> None:
        pass

    async def measure(
        self,
        items: list[WorkItem],
        schedule: Schedule,
        *,
        is_enough: Callable[[SentRequest], bool],
        limit_s: float,
    ) -> MeasuredLoad:
        self.prompts.append([item.prompt_token_ids for item in items])
        assert schedule.due_s is not None
        requests: list[SentRequest] = []
        for index, (item, due_s) in enumerate(zip(items, schedule.due_s, strict=True)):
            is_late = len(items) / 10 > self.capacity and index < self.late_share * len(items)
            answer = AnswerStream()
            answer.token_times_s = [due_s + (self.late_s if is_late else 0.1)]
            answer.is_done = True
            requests.append(SentRequest(item, due_s, due_s, answer))
            if is_enough(requests[-1]):
                self.was_stopped.append(True)
                break
        else:
            self.was_stopped.append(False)
        if len(self.was_stopped) == self.interrupted_after:
            self.interrupted.set()
        return MeasuredLoad(LoadRun(requests, len(items), schedule, limit_s, 0.0), {})


def searched(
    server: SlowingServer, attain: float = 0.99, start: float | None = None
) -> tuple[RateFinder, float | None]:
    seen: list[Probe] = []
    finder = RateFinder(
        server,  # type: ignore[arg-type]
        items=[WorkItem([1, 2, 3], 4), WorkItem([4, 5, 99], 4)],
        limits=LatencyLimits(ttft_s=1.0),
        search=SearchFlags(attain=attain, probe_s=10.0, precision=0.05),
        arrivals=ArrivalFlags(rate=start),
        max_open=9,
        seed=0,
        on_probe=seen.append,
    )
    search = asyncio.run(finder.find())
    assert seen == finder.probes
    return finder, search.best


def test_probes_close_in_on_the_capacity() -> None:
    finder, best = searched(SlowingServer(capacity=6.6))
    assert [probe.rate for probe in finder.probes][:4] == [1.0, 2.0, 4.0, 8.0]
    assert best == pytest.approx(6.6, rel=0.06)
    assert all(probe.is_met == (probe.rate <= 6.6) for probe in finder.probes)


def test_probe_has_as_many_requests_as_come_in_its_time() -> None:
    finder, _ = searched(SlowingServer(capacity=6.6))
    assert all(probe.measured.run.num_due == round(probe.rate * 10) for probe in finder.probes)


def test_probe_ends_when_too_many_have_missed_the_limits() -> None:
    server = SlowingServer(capacity=3.0)
    finder, _ = searched(server, attain=0.9)
    assert server.was_stopped == [not probe.is_met for probe in finder.probes]
    missed = next(probe for probe in finder.probes if not probe.is_met)
    assert missed.rate == 4.0
    assert len(missed.measured.run.requests) == 5  # 4 of 40 may be late: the fifth is one too many


@pytest.mark.parametrize(("late_share", "is_met"), [(0.1, True), (0.125, False)])
def test_share_that_must_meet_the_limits_is_exact(late_share: float, is_met: bool) -> None:
    finder, _ = searched(SlowingServer(capacity=3.0, late_share=late_share), attain=0.9, start=4.0)
    assert finder.probes[0].is_met is is_met  # 4 or 5 of 40 requests are late


def test_no_prompt_is_sent_twice() -> None:
    server = SlowingServer(capacity=6.6)
    searched(server)
    prompts = [tuple(prompt) for probe in server.prompts[:3] for prompt in probe]
    assert len(set(prompts)) == len(prompts) == 70


def test_server_without_any_rate_is_given_up_at_the_fewest_requests() -> None:
    finder, best = searched(SlowingServer(capacity=0.0), start=4.0)
    assert best is None
    assert [probe.rate for probe in finder.probes] == [4.0, 2.0, 1.0]


@pytest.mark.parametrize(("after", "best"), [(1, None), (3, 2.0)])
def test_interrupted_probe_is_not_judged(after: int, best: float | None) -> None:
    finder, found = searched(SlowingServer(capacity=100.0, interrupted_after=after))
    assert found == best
    assert len(finder.probes) == after - 1
