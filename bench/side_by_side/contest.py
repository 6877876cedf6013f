"""Engines that are loaded together and take turns, with the machine's speed measured before and after each turn."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quire_lab.sim.statistics import latencies
from quire_lab.sim.workloads import WorkItem, renewed
from side_by_side.calibration import Calibration
from side_by_side.engines import Answers, Engine, EngineFailedError, EngineSpec
from side_by_side.process_tree import cpu_ticks, steal_share

QUIET_WINDOW_S = 0.25
QUIET_CPU_S = 0.01     # one clock tick in a window: what idles otherwise spins
QUIET_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Run:
    """One workload through one engine, once. The wall time ends with the last token."""

    wall_s: float
    cpu_s: float  # all its threads': what runs beside it matters less to it
    num_prompt_tokens: int
    least_to_compute: int  # least part of the prompts' tokens
    num_output_tokens: int
    latencies: dict[str, dict[str, float]]  # mean and percentiles by name
    steal_share: float
    num_cached_tokens: int | None  # the prompts'; None: the engine does not tell


@dataclass(slots=True)
class Turn:
    """One workload through all engines, one after the other, with the same tokens."""

    workload: str
    number: int
    calibration_before: dict[str, float | str] | None
    calibration_after: dict[str, float | str] | None = None
    runs: dict[str, Run] = field(default_factory=dict)


@dataclass(slots=True)
class EngineRecord:
    """Facts about an engine beside its runs."""

    facts: dict[str, Any] = field(default_factory=dict)
    load_s: list[float] = field(default_factory=list)
    peak_rss_bytes: int = 0
    idle_s: float = 0.0      # between its runs, while the others had theirs
    idle_cpu_s: float = 0.0  # used all the same
    failure: str | None = None


@dataclass(slots=True)
class ContestRecord:
    """All that was measured. Titles are of engines in the order in which they were given."""

    engines: dict[str, EngineRecord]
    turns: list[Turn] = field(default_factory=list)


class Contest(AbstractContextManager["Contest"]):
    """Runs engines in turn; the first is ours.

    A peer that fails is left out from then on, and its record says why. Without ours there is nothing to compare: its
    failure is raised.
    """

    def __init__(self, specs: Sequence[EngineSpec], calibration: Calibration, folder: Path) -> None:
        self.record = ContestRecord({spec.title: EngineRecord() for spec in specs})
        self._specs = {spec.title: spec for spec in specs}
        self._calibration = calibration
        self._folder = folder
        self._engines: dict[str, Engine] = {}
        self._round = 0  # no two have the same tokens
        self._idle_since: dict[str, tuple[float, float]] = {}  # key: title; the clock, the CPU seconds then

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for title, engine in self._engines.items():
            self.record.engines[title].peak_rss_bytes = engine.peak_rss_bytes
            engine.stop()

    def load(self, times: int) -> None:
        """Start every engine `times` times, in turn; the last time they stay."""
        for number in range(times):
            for title in self._still_in():
                with self._out_if_it_fails(title):
                    self._start(title)
                if number + 1 < times and title in self._engines:
                    self._engines.pop(title).stop()

    def warm_up(self, items: list[WorkItem], workload: str = "") -> None:
        """Run something through every engine without a record."""
        self._round += 1
        for title in self._taking_part(workload):
            with self._out_if_it_fails(title):
                self._engines[title].run(self._renewed(items))

    def play(self, workload: str, items: list[WorkItem], num_turns: int) -> None:
        """Run a workload `num_turns` times through every engine, in an order that changes from turn to turn."""
        before = self._calibration.measure(f"before {workload}")
        for number in range(num_turns):
            self._round += 1
            turn = Turn(workload, number, before)
            titles = self._taking_part(workload)
            first = number % max(1, len(titles))
            for title in titles[first:] + titles[:first]:
                with self._out_if_it_fails(title):
                    self._measure(turn, title, self._renewed(items))
            turn.calibration_after = before = self._calibration.measure(f"after {workload} {number}")
            self.record.turns.append(turn)

    def _still_in(self) -> list[str]:
        return [title for title, record in self.record.engines.items() if record.failure is None]

    def _taking_part(self, workload: str) -> list[str]:
        return [title for title in self._engines if workload not in self._specs[title].left_out]

    def _renewed(self, items: list[WorkItem]) -> list[WorkItem]:
        return renewed(items, len(items), self._round)

    def _start(self, title: str) -> None:
        log = self._folder / f"{title}.log"
        self._settle()
        engine = self._engines[title] = self._specs[title].start(log)
        record = self.record.engines[title]
        record.facts = engine.facts
        record.load_s.append(engine.load_s)
        print(f"{title}: first token {engine.load_s:.2f} s after its start", flush=True)

    def _measure(self, turn: Turn, title: str, items: list[WorkItem]) -> None:
        engine, record = self._engines[title], self.record.engines[title]
        self._settle()
        if title in self._idle_since:
            since_s, cpu_s = self._idle_since.pop(title)
            record.idle_s += time.perf_counter() - since_s
            record.idle_cpu_s += engine.cpu_s - cpu_s
        ticks, cpu_s = cpu_ticks(), engine.cpu_s
        answers = engine.run(items)
        steal = steal_share(ticks, cpu_ticks())
        run = turn.runs[title] = _run_of(items, answers, steal, engine.cpu_s - cpu_s)
        record.peak_rss_bytes = engine.peak_rss_bytes
        print(f"{turn.workload} #{turn.number} {title}: {run.wall_s:.3f} s, {run.cpu_s:.2f} s of CPU", flush=True)
        self._settle()
        self._idle_since[title] = time.perf_counter(), engine.cpu_s

    def _settle(self) -> None:
        """Wait until no engine uses the CPU: threads spin on for a while after their work."""
        deadline_s = time.perf_counter() + QUIET_LIMIT_S
        while time.perf_counter() < deadline_s:
            used_s = self._all_cpu_s()
            time.sleep(QUIET_WINDOW_S)
            if self._all_cpu_s() - used_s <= QUIET_CPU_S:
                return

    def _all_cpu_s(self) -> float:
        return sum(engine.cpu_s for engine in self._engines.values())

    @contextmanager
    def _out_if_it_fails(self, title: str) -> Iterator[None]:
        try:
            yield
        except EngineFailedError as error:
            if title == next(iter(self._specs)):
                raise
            print(error, flush=True)
            self.record.engines[title].failure = str(error)
            if title in self._engines:
                self._engines.pop(title).stop()


def least_to_compute(prompts: Sequence[list[int]]) -> int:
    """Return the tokens that a cache without flaw computes: each behind the same ones once, and every prompt's last."""
    prefixes: dict[tuple[int, int], int] = {}  # a prefix by the number of what it extends, and its last token
    num_repeated = 0
    for prompt in prompts:
        number, num_known = 0, len(prefixes)
        for token in prompt:
            number = prefixes.setdefault((number, token), len(prefixes) + 1)
        num_repeated += len(prefixes) == num_known
    return len(prefixes) + num_repeated


def _run_of(items: Sequence[WorkItem], answers: Answers, steal: float, cpu_s: float) -> Run:
    return Run(
        wall_s=max(timeline.token_times_s[-1] for timeline in answers.timelines),
        cpu_s=cpu_s,
        num_prompt_tokens=sum(len(item.prompt_token_ids) for item in items),
        least_to_compute=least_to_compute([item.prompt_token_ids for item in items]),
        num_output_tokens=sum(item.output_len for item in items),
        latencies={name: sample._asdict() for name, sample in latencies(answers.timelines).items()},
        steal_share=steal,
        num_cached_tokens=answers.num_cached_tokens,
    )
