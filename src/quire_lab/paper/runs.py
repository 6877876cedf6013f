"""Experiments of the paper as points: one system, one model, one workload, one rate, with the outcome of each.

Every system is the same engine with another memory policy or way of batching. In the paper's own mode there is no
prefix tree, and a step may compute as many tokens as the pool holds, so that no prompt is computed in chunks.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from quire.core.config import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    Batching,
    CacheConfig,
    MemoryPolicy,
    PreemptionKind,
    SchedulerConfig,
)
from quire.core.plan import StepPlan
from quire.core.sequence import NO_ROW, Request, Sequence
from quire.scheduling.scheduler import Scheduler, make_scheduler
from quire_lab.sim.datasets import DATA_FOLDER, due_times, workload
from quire_lab.sim.hardware import CONTIGUOUS_ATTENTION_FACTOR, PAGED_ATTENTION_FACTOR
from quire_lab.sim.models import set_up
from quire_lab.sim.simulation import Simulation

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_MODEL_LEN = 2048   # tokens, of OPT
MAX_NUM_SEQS = 1024    # more than memory admits
_WATCH_EVERY = 5       # steps


@dataclass(frozen=True, slots=True)
class System:
    """Serving system. `is_own`: prefix tree and chunked prefill on, which the paper did not have."""

    memory_policy: MemoryPolicy
    batching: Batching = "continuous"
    is_own: bool = False


FASTER_TRANSFORMER, MAX, POW2, ORACLE, PAGED, QUIRE = (
    "FasterTransformer", "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "paged", "Quire"
)  # fmt: skip
SYSTEMS = {
    FASTER_TRANSFORMER: System("contiguous-max", "static"),
    MAX: System("contiguous-max"),
    POW2: System("contiguous-pow2"),
    ORACLE: System("contiguous-oracle"),
    PAGED: System("paged"),
    QUIRE: System("paged", is_own=True),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One experiment. `rate` in requests per second, for `trace_s` seconds."""

    system: str
    model: str
    workload: str
    rate: float
    trace_s: float
    n: int = 1
    beam_width: int | None = None
    block_size: int = 16
    recovery: PreemptionKind | None = None  # None: whichever is cheaper
    seed: int = 0
    data: Path = DATA_FOLDER


@dataclass(slots=True)
class PointOutcome:
    """PointOutcome of a point. Shares are of all KV slots, over the steps in which some request waited."""

    latency_s: float = 0.0                 # normalized: end to end over output length, mean over requests
    batched_requests: float = 0.0
    num_preemptions: int = 0
    shares: list[float] = field(default_factory=lambda: [0.0] * 4)  # token states, reserved, internal, external
    saved: float = 0.0                     # blocks that sharing spares, over those without it


def run(point: Point, *, watches: bool = False) -> PointOutcome:
    """Simulate a point; `watches`: look at the memory as well, which takes longer."""
    place = set_up(point.model)
    scheduler = _scheduler(point, place.num_kv_slots)
    factor = PAGED_ATTENTION_FACTOR if SYSTEMS[point.system].memory_policy == "paged" else CONTIGUOUS_ATTENTION_FACTOR
    items = workload(point.workload, max(1, round(point.rate * point.trace_s)), seed=point.seed, data=point.data)
    watch = _Watch(scheduler)
    simulation = Simulation(
        scheduler, place.cost_model(point.block_size, factor), *([watch.observe] if watches else [])
    )
    done = simulation.run(items, due_times(items, point.rate, point.seed), n=point.n, beam_width=point.beam_width)
    return PointOutcome(
        latency_s=done.normalized_latency_s,
        batched_requests=done.mean_batched_requests,
        num_preemptions=done.num_preemptions,
        shares=watch.shares,
        saved=watch.meter.saved,
    )


def run_all(points: list[Point], *, watches: bool = False) -> list[PointOutcome]:
    """Simulate points side by side, on all processors."""
    return map_processes(partial(run, watches=watches), points)


def latency_curve(points: list[Point], limit_s: float) -> list[tuple[float, float]]:
    """Return (rate, normalized latency) of points with ascending rates, up to the first above `limit_s`."""
    curve = list[tuple[float, float]]()
    for point in points:
        curve.append((point.rate, run(point).latency_s))
        if curve[-1][1] > limit_s:
            break
    return curve


def map_processes(function: Callable[[Item], Result], items: list[Item]) -> list[Result]:
    """Return the function of every item, computed in processes of their own; in this one, if there is only one item.

    A terminal at stderr shows how many are done.
    """
    if len(items) < 2:
        return [function(item) for item in items]
    with ProcessPoolExecutor(mp_context=get_context("forkserver")) as pool:
        done, console = pool.map(function, items), Console(stderr=True)
        is_piped = not console.is_terminal
        return list(track(done, "simulations", len(items), console=console, transient=True, disable=is_piped))


def _scheduler(point: Point, num_slots: int) -> Scheduler:
    system, num_blocks = SYSTEMS[point.system], num_slots // point.block_size
    is_paged = system.memory_policy == "paged"
    cache = CacheConfig(
        num_blocks,
        point.block_size,
        enable_prefix_caching=system.is_own,
        num_swap_blocks=num_blocks if is_paged else 0,
        memory_policy=system.memory_policy,
    )
    config = SchedulerConfig(
        MAX_NUM_SEQS,
        DEFAULT_MAX_NUM_BATCHED_TOKENS if system.is_own else num_slots,
        MAX_MODEL_LEN,
        preemption_mode=point.recovery or "auto",
        batching=system.batching,
    )
    return make_scheduler(config, cache)


@dataclass(slots=True)
class Meter:
    """Sums the blocks of sequences over steps, with and without sharing."""

    with_sharing: int = 0
    without: int = 0

    @property
    def saved(self) -> float:
        """Return the share of blocks that sharing makes unnecessary."""
        return 1 - self.with_sharing / self.without if self.without else 0.0

    def count(self, scheduler: Scheduler) -> None:
        """Count the slots of the running sequences at one moment."""
        cache = scheduler.cache
        self.with_sharing += cache.num_blocks - cache.num_free_blocks
        self.without += sum(cache.blocks_for(cache.num_tokens(each.seq_id)) for _, each in _running(scheduler))


def _running(scheduler: Scheduler) -> Iterator[tuple[Request, Sequence]]:
    """Yield the sequences that have a row."""
    return ((request, each) for request in scheduler.queues.running for each in request.live if each.row != NO_ROW)


class _Watch:
    """Looks at the memory between schedule and update: what the plan computes has its slots."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._num_steps, self._seconds = scheduler, 0, 0.0
        self._sums = [0.0] * 3
        self.meter = Meter()

    @property
    def shares(self) -> list[float]:
        """Token states, reserved for later tokens, never used, and free but unusable; 0 if no request waited."""
        if not self._seconds:
            return [0.0] * 4
        shares = [each / self._seconds for each in self._sums]
        return [*shares, 1 - sum(shares)]

    def observe(self, _plan: StepPlan, seconds: float) -> None:
        """Count a step."""
        self._num_steps += 1
        if self._num_steps % _WATCH_EVERY:
            return
        scheduler = self._scheduler
        self.meter.count(scheduler)
        if not len(scheduler.queues.waiting):
            return
        self._seconds += seconds
        cache, slots = scheduler.cache, scheduler.cache.num_blocks * scheduler.cache.block_size
        for request, sequence in _running(scheduler):
            num_tokens, longest = cache.num_tokens(sequence.seq_id), sequence.num_prompt_tokens + request.max_tokens
            reserved = scheduler.admission.num_reserved(request) or cache.blocks_for(num_tokens) * cache.block_size
            parts = num_tokens, max(0, min(reserved, longest) - num_tokens), max(0, reserved - max(longest, num_tokens))
            for kind, part in enumerate(parts):
                self._sums[kind] += part / slots * seconds
