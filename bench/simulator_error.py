"""Error of simulated serving against measured serving on this machine.

Rounds of calibrating and serving, in turn; then the machine is fitted to the medians of all rounds, every load is
simulated on it, and the results are printed beside the medians of the measurements. Both run the same loop
(`quire_lab.sim.simulation`): the same scheduler and cache, once with the model and once with the cost model.

    python bench/simulator_error.py [MODEL] --rounds 5
    OMP_NUM_THREADS=1 python bench/simulator_error.py [MODEL] --cpu-time    # on a machine that others use, too
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from quire import LLM
from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.host_limits import free_memory_bytes
from quire.core.plan import GraphCounts, StepPlan, StepResult
from quire.execution.executor import Executor
from quire_lab.bench.passes import time_steps
from quire_lab.bench.report import machine_facts
from quire_lab.sim.calibration import StepSize, fit_hardware, step_sizes
from quire_lab.sim.datasets import DATA_FOLDER, due_times, workload
from quire_lab.sim.hardware import CONTIGUOUS_ATTENTION_FACTOR, CostModel
from quire_lab.sim.models import read_model
from quire_lab.sim.simulation import SimulatedRun, Simulation, paged_scheduler
from quire_lab.sim.statistics import latencies
from quire_lab.sim.workloads import WorkItem, renewed

NUM_BLOCKS, MAX_SEQS, MAX_LEN = 2048, 64, 2048
Figures = dict[str, float]


class TimedExecutor:
    """A real executor on its own clock, which is put forward where nothing runs."""

    max_steps_in_flight, graphs = 1, GraphCounts()

    def __init__(self, executor: Executor, clock: Callable[[], float]) -> None:
        self._executor, self._clock = executor, clock
        self._offset = -clock()
        self.on_step: Callable[[StepPlan, float], None]

    @property
    def now_s(self) -> float:
        return self._clock() + self._offset

    @now_s.setter
    def now_s(self, value: float) -> None:
        self._offset += value - self.now_s

    def submit(self, plan: StepPlan) -> None:
        self._plan, self._started_s = plan, self.now_s
        self._executor.submit(plan)

    def collect(self) -> StepResult:
        result = self._executor.collect()
        self.on_step(self._plan, self.now_s - self._started_s)
        return result


def figures_of(run: SimulatedRun) -> Figures:
    found = latencies([run.timeline(answer) for answer in run.finished])
    return {
        "tokens/s": run.tokens_per_s,
        "TTFT, mean": found["ttft_s"].mean,
        "TPOT, mean": found["tpot_s"].mean,
        "end to end, mean": found["e2e_s"].mean,
        "end to end, p95": found["e2e_s"].p95,
        "batched requests": run.mean_batched_requests,
    }


def main(
    model: Annotated[str | None, typer.Argument(help="folder; without it the demo model")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="of calibrating and serving, after one that warms up")] = 5,
    cpu_time: Annotated[bool, typer.Option("--cpu-time", help="count CPU seconds of this process")] = False,
    num_prompts: Annotated[int, typer.Option(min=2, help="of each load")] = 32,
    budget: Annotated[int, typer.Option(min=256, help="most tokens of a step")] = 1024,
    load: Annotated[
        str, typer.Option(help="data sets, or data set@share of the rate at which it was served at once")
    ] = "alpaca,alpaca@0.7,sharegpt",
    data: Annotated[Path, typer.Option(help="where the data sets' files are")] = DATA_FOLDER,
) -> None:
    """Print each load's figures, measured and simulated, and the error."""
    clock = time.process_time if cpu_time else time.perf_counter
    found, sizes = read_model(model), step_sizes(budget)
    cache = CacheConfig(NUM_BLOCKS, 16)
    config = SchedulerConfig(MAX_SEQS, budget, MAX_LEN)
    loads: dict[str, tuple[list[WorkItem], list[float]]] = {}
    times: dict[StepSize, list[float]] = {size: [] for size in sizes}
    measured: dict[str, list[Figures]] = {name: [] for name in load.split(",")}
    with LLM(
        model=model,
        num_kv_blocks=NUM_BLOCKS,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=budget,
        max_model_len=MAX_LEN,
    ) as llm:
        executor = llm._engine.engine.executor
        for number in range(rounds + 1):
            for size, seconds in time_steps(llm, sizes, 1, number, clock).items():
                times[size] += seconds if number else []
            for name, figures in measured.items():
                if name not in loads:
                    loads[name] = prepare(name, num_prompts, data, llm.vocab_size, measured)
                items, due_s = loads[name]
                run = Simulation(paged_scheduler(cache, config), TimedExecutor(executor, clock))
                figures.append(figures_of(run.run(renewed(items, len(items), number), due_s)))
            print(f"round {number} of {rounds}", flush=True)
    medians = {size: float(np.median(seconds)) for size, seconds in times.items()}
    machine = fit_hardware("this machine", found.spec, found.dtype, medians, free_memory_bytes())
    cost = CostModel(found.spec, machine, 16, 1, found.dtype, CONTIGUOUS_ATTENTION_FACTOR)
    for name, (items, due_s) in loads.items():
        simulated = figures_of(Simulation(paged_scheduler(cache, config), cost).run(items, due_s))
        print(f"\n{name}, {len(items)} requests" + (f" at {len(items) / due_s[-1]:.3g}/s" if due_s[-1] else " at once"))
        for figure, value in simulated.items():
            seen = [one[figure] for one in measured[name][1:]]
            median = float(np.median(seen))
            print(
                f"{figure:18} measured {median:9.4g} ({min(seen):.4g} to {max(seen):.4g})  simulated {value:9.4g}  "
                f"error {value / median - 1:+.1%}"
            )
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine_facts().items()))


def prepare(
    name: str, num_prompts: int, data: Path, vocab_size: int, measured: dict[str, list[Figures]]
) -> tuple[list[WorkItem], list[float]]:
    """Return a load; one with a share gets that share of the rate at which its data set was served at once."""
    dataset, _, share = name.partition("@")
    items = workload(dataset, num_prompts, data=data, vocab_size=vocab_size, max_total_len=MAX_LEN)
    if not share:
        return items, [0.0] * len(items)
    num_tokens = sum(item.output_len for item in items)
    rate = float(share) * measured[dataset][0]["tokens/s"] * len(items) / num_tokens
    return items, due_times(items, rate, seed=0)


if __name__ == "__main__":
    typer.run(main)
