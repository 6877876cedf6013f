"""Causes of differences from the paper's numbers: its experiments again, one cause at a time removed or added.

    python bench/paper_differences.py [beams] [prefix] [chat] [static] [memory] [blocks]

`quire paper` makes the figures; this varies what they take for granted. Rates are those at which the normalized latency
passes 0.2 s per token, between two simulated rates at most 5 % apart. One process; all take about ten minutes.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import log, sqrt
from typing import Annotated

import numpy as np
import typer

from quire.core.plan import StepPlan
from quire.scheduling import admission
from quire_lab.paper import runs
from quire_lab.paper.runs import FASTER_TRANSFORMER, MAX, ORACLE, PAGED, QUIRE, SYSTEMS, Point
from quire_lab.paper.serving import SUSTAINED_S
from quire_lab.sim.datasets import DATASETS, due_times, workload
from quire_lab.sim.hardware import HARDWARE, PAPER_SEQUENCE_S, PAPER_STEP_S, CostModel
from quire_lab.sim.models import read_model, set_up
from quire_lab.sim.simulation import Answer, SimulatedRun, Simulation
from quire_lab.sim.workloads import Lengths, WorkItem, with_random_prompts

CLOSE = 1.05  # two rates, one over the other
Make = Callable[[int], list[WorkItem]]


@dataclass(frozen=True, slots=True)
class Variant:
    """Variant of a figure's assumptions."""

    name: str = "as in the figure"
    sequence_s: float = PAPER_SEQUENCE_S
    is_per_request: bool = False           # the time counts once for all sequences of a request
    copies_are_free: bool = False
    attention_factor: float = 1.23         # the paged kernel's
    make: Make | None = None               # so many requests; None: the point's workload


class VariedCost(CostModel):
    """The cost model with a part left out."""

    variant: Variant
    num_running: Callable[[], int]         # requests

    def step_s(self, plan: StepPlan) -> float:
        seconds = super().step_s(plan)
        if self.variant.is_per_request:
            seconds -= self.hardware.sequence_s * (len(plan.rows) - self.num_running())
        if self.variant.copies_are_free and plan.copies:
            seconds -= super().step_s(StepPlan(copies=plan.copies)) - super().step_s(StepPlan())
        return seconds


def simulate(point: Point, variant: Variant) -> SimulatedRun:
    place = set_up(point.model)
    hardware = replace(HARDWARE[place.hardware], step_s=PAPER_STEP_S, sequence_s=variant.sequence_s)
    factor = variant.attention_factor if SYSTEMS[point.system].memory_policy == "paged" else 1.0
    cost = VariedCost(read_model(point.model).spec, hardware, point.block_size, place.num_devices, "float16", factor)
    scheduler = runs._scheduler(point, place.num_kv_slots)
    cost.variant, cost.num_running = variant, lambda: len(scheduler.queues.running)
    count = max(1, round(point.rate * point.trace_s))
    items = workload(point.workload, count, seed=point.seed) if variant.make is None else variant.make(count)
    due_s = due_times(items, point.rate, point.seed)
    return Simulation(scheduler, cost).run(items, due_s, n=point.n, beam_width=point.beam_width)


def sustained(point: Point, variant: Variant) -> float:
    """Return the rate at which the latency passes SUSTAINED_S. The search begins at the point's own."""

    @cache
    def latency_s(rate: float) -> float:
        return simulate(replace(point, rate=rate), variant).normalized_latency_s

    low = high = point.rate
    while latency_s(low) > SUSTAINED_S:
        low, high = low / 1.4, low
    while latency_s(high) <= SUSTAINED_S:
        low, high = high, high * 1.4
    while high / low > CLOSE:
        middle = sqrt(low * high)
        low, high = (middle, high) if latency_s(middle) <= SUSTAINED_S else (low, middle)
    return low + (high - low) * log(SUSTAINED_S / latency_s(low)) / log(latency_s(high) / latency_s(low))


def compare(points: Sequence[Point], variants: Iterable[Variant]) -> None:
    """Print the rates that systems sustain, and the last one's over the others'."""
    for variant in variants:
        rates = [sustained(point, variant) for point in points]
        told = ", ".join(f"{point.system} {rate:.3g}" for point, rate in zip(points, rates, strict=True))
        ratios = ", ".join(f"{rates[-1] / rate:.2f}" for rate in rates[:-1])
        print(f"  {variant.name}: {told} requests/s; ratio {ratios}", flush=True)


def beams() -> None:
    """Figure 14: how long a step's software takes for the beams of a request, and what reordering them costs."""
    point = Point(ORACLE, "OPT-13B", "alpaca", 4.5, 60.0, beam_width=6)
    variants = (
        Variant(),
        Variant("0.3 ms per request instead of per beam", is_per_request=True),
        Variant("no time per sequence", sequence_s=0.0),
        Variant("copies are free", copies_are_free=True),
    )
    compare([point, replace(point, system=PAGED, rate=8.0)], variants)
    run = simulate(replace(point, system=PAGED, rate=8.0), Variant())
    print(f"  paged at 8/s: {run.normalized_latency_s:.2f} s/token, KV use {run.mean_kv_usage:.0%}")


def prefix() -> None:
    """Figure 16: the same for many short translations behind one prefix."""
    point = Point(ORACLE, "LLaMA-13B", "translation-5-shot", 9.0, 60.0)
    compare([point, replace(point, system=QUIRE, rate=28.0)], (Variant(), Variant("no time per sequence", 0.0)))
    run = simulate(replace(point, system=QUIRE, rate=32.0), Variant())
    print(f"  Quire at 32/s: {run.normalized_latency_s:.2f} s/token, KV use {run.mean_kv_usage:.0%}")


def chat() -> None:
    """Figure 17: prompts that all have the 1,024 tokens to which the paper cuts them."""
    point = Point(MAX, "OPT-13B", "chat", 0.5, 240.0)
    variants = (
        Variant(),
        Variant("every prompt of 1,024", make=padded_chat),
        Variant("the same, no time per sequence", 0.0, make=padded_chat),
        Variant("the same, paged kernel as fast as any", attention_factor=1.0, make=padded_chat),
        Variant("the same, outputs a third as long", make=lambda count: padded_chat(count, 3)),
    )
    compare([point, replace(point, system=ORACLE), replace(point, system=PAGED, rate=0.7)], variants)


def padded_chat(count: int, shorter: int = 1) -> list[WorkItem]:
    items = workload("chat", count)
    lengths = [(1024, max(1, item.output_len // shorter)) for item in items]
    return with_random_prompts(lengths, 1000, seed=0)


def static() -> None:
    """Figure 12: what of FasterTransformer's latency is waiting for the longest answer of the own batch."""
    print("  rate: s/token, what answers of at most 8 tokens add; handed over at once; waiting for admission alone")
    for rate in (0.06, 0.08, 0.1, 0.12, 0.15, 0.2):
        run = simulate(Point(FASTER_TRANSFORMER, "OPT-13B", "sharegpt", rate, 3600.0), Variant())
        at_once = np.mean([(ready_s(run, each) - each.arrival_s) / each.item.output_len for each in run.finished])
        waits = [((each.admitted_s or 0.0) - each.arrival_s) / each.item.output_len for each in run.finished]
        short = sum(each.normalized_latency_s for each in run.finished if each.item.output_len <= 8)
        print(
            f"  {rate:.2f}: {run.normalized_latency_s:.3f}, {short / len(run.finished):.3f}; {at_once:.3f}; "
            f"{np.mean(waits):.3f}; {run.mean_batched_requests:.1f} batched requests",
            flush=True,
        )


def ready_s(run: SimulatedRun, answer: Answer) -> float:
    """Return when the last token was there: one step after the one before it, however late it was handed over."""
    assert answer.admitted_s is not None
    first = bisect_left(run.step_ends_s, answer.admitted_s + 1e-9)
    return run.step_ends_s[first + answer.item.output_len - 1]


def memory() -> None:
    """Figure 2: outputs with lengths that differ more from each other than ShareGPT's do in our sample."""
    for shape in (None, 1.6, 1.3):
        lengths = varied_lengths(480, shape)
        prompt_lens, output_lens = np.array(lengths).T
        print(
            f"  outputs {'log-normal' if shape is None else f'gamma, shape {shape}'}: mean {output_lens.mean():.0f}, "
            f"coefficient of variation {output_lens.std() / output_lens.mean():.2f}; tokens of a sequence, weighted "
            f"by its stay, {np.average(prompt_lens + output_lens, weights=output_lens):.0f}"
        )
        for system in (MAX, ORACLE):
            point, place = Point(system, "OPT-13B", "sharegpt", 4.0, 120.0), set_up("OPT-13B")
            scheduler = runs._scheduler(point, place.num_kv_slots)
            watch = runs._Watch(scheduler)
            items = with_random_prompts(lengths, 1000, seed=0)
            Simulation(scheduler, place.cost_model(16, 1.0), watch.observe).run(items, due_times(items, 4.0, 0))
            print(f"    {system}: " + ", ".join(f"{100 * share:.1f}" for share in watch.shares), flush=True)


def varied_lengths(count: int, shape: float | None) -> list[Lengths]:
    """Return prompts and outputs of the paper's means, of at most 2,048 tokens together."""
    generator, fit = np.random.default_rng(0), DATASETS["sharegpt"]
    prompts, outputs = (each.draw(generator, 4 * count).tolist() for each in (fit.prompt, fit.output))
    if shape is not None:
        outputs = np.ceil(generator.gamma(shape, fit.output.mean / shape, 4 * count)).astype(int).tolist()
    return [pair for pair in zip(prompts, outputs, strict=True) if sum(pair) <= 2048][:count]


def blocks() -> None:
    """Figure 18b: tokens of each running request for which blocks stay free at an admission (decision 0013)."""
    loads = (("sharegpt", 1.7, 240.0), ("sharegpt", 2.2, 240.0), ("alpaca", 20.0, 120.0), ("alpaca", 27.0, 120.0))
    for name, rate, trace_s in loads:
        for size in (8, 16, 32, 64, 128):
            found = []
            for admission.HEAD_ROOM in (4, 8, 16, 32, size):
                run = simulate(Point(PAGED, "OPT-13B", name, rate, trace_s, block_size=size), Variant())
                tokens = f"{admission.HEAD_ROOM} tokens"
                found.append(f"{tokens} {run.normalized_latency_s:.3f} s/token, {run.num_preemptions} preemptions")
            print(f"  {name} at {rate}/s, blocks of {size}: {'; '.join(found)}", flush=True)


HELP = "beams, prefix, chat, static, memory, blocks; all if none is named"


def main(names: Annotated[list[str] | None, typer.Argument(help=HELP)] = None) -> None:
    """Print the result of each variant."""
    known = {each.__name__: each for each in (beams, prefix, chat, static, memory, blocks)}
    for name in names or known:
        if name not in known:
            raise typer.BadParameter(f"must be one of {', '.join(known)}, got {name!r}")
        print(f"{name}: {known[name].__doc__}", flush=True)
        known[name]()


if __name__ == "__main__":
    typer.run(main)
