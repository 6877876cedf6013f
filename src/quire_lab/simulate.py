"""`quire simulate`: throughput, latencies and bottleneck of a model on given hardware under given requests."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from quire.cli.flag_groups import JSON, flag_field, with_config_file, with_flag_groups
from quire.core.errors import ConfigError
from quire.engine.options import EngineOptions
from quire_lab.bench import report
from quire_lab.bench.bench_flags import LimitFlags, RateFlags
from quire_lab.bench.diagnosis import LatencyLimits, Observation, diagnose, observe
from quire_lab.plan_command import DeviceFlags, price_row, print_refusals
from quire_lab.sim.datasets import DATA_FOLDER, DATASETS, due_times, fit_note, workload
from quire_lab.sim.hardware import CostModel, Hardware
from quire_lab.sim.models import read_model
from quire_lab.sim.planning import MemoryPlan
from quire_lab.sim.rate_search import HIGHEST_RATE, Probed, RateSearch, num_needed
from quire_lab.sim.simulation import FleetRun, FleetSimulation, SimulatedRun, Simulation, paged_scheduler
from quire_lab.sim.statistics import Timeline, distribution, latencies
from quire_lab.sim.workloads import WorkItem

_LOWEST_RATE = 2**-10  # requests per second that a search tries
# Fields that are printed in ways of their own.
_NO_FACTS = ("title", "figures", "find_rate", "itl_target_prices", "verdict", "not_servable_yet")
Routing = Literal["prefix", "round-robin", "affinity"]

_load = partial(flag_field, panel="Load")


@dataclass(frozen=True, slots=True)
class LoadFlags:
    """Requests and their arrivals."""

    workload: str = _load(
        "sharegpt", "a data set, a mix such as sharegpt:3,alpaca:1, a trace, or a file of lengths", metavar="NAME|FILE",
        row=f"a data set: {', '.join(f'`{name}`' for name in DATASETS)}; a mix, `sharegpt:3,alpaca:1`; or a file: a "
        "trace, lengths, token ids",
    )  # fmt: skip
    num_prompts: int = _load(1000, "requests", min=1)
    rate: float | None = _load(
        None, "requests per second, Poisson", show_default="a trace's own; of the rest all at once",
        row="Poisson arrivals, requests per second",
    )  # fmt: skip
    data: Path | None = _load(
        None, "with other files of the data sets' names; fits stand in for what it lacks", metavar="FOLDER",
        show_default="the package's",
        row="folder with files of the data sets' names, instead of the package's; a log-normal fit of the lengths "
        "stands in for each that it lacks, with the rate of a trace, and the title and the JSON say so",
    )  # fmt: skip
    replicas: int = _load(
        1, "engines alike, each on devices of its own", min=1,
        row="engines alike, each with its own devices; requests are routed to them as `quire serve -dp N` does",
    )  # fmt: skip
    routing: Routing = _load(
        "prefix", "rule: prefix (least work, cached tokens included), round-robin, affinity (longest cached prefix)",
        row="rule that routes requests to replicas: `prefix`, that of the server; `round-robin`; `affinity`, the "
        "longest cached prefix, whatever waits there",
    )  # fmt: skip
    price: float | None = _load(
        None, "of one device for an hour: what a million tokens cost", min=0.0,
        row="of one device for an hour: what a million output tokens cost",
    )  # fmt: skip

    @property
    def fit_note(self) -> str:
        """`lengths: log-normal fit (no FILE in FOLDER)`, or nothing if all lengths are data."""
        return fit_note([self.workload], self.data or DATA_FOLDER)

    def requests(self, vocab_size: int, seed: int) -> tuple[list[WorkItem], list[float]]:
        """Return the requests and the times at which they arrive, in seconds."""
        data = self.data or DATA_FOLDER
        items = workload(self.workload, self.num_prompts, seed=seed, data=data, vocab_size=vocab_size)
        has_times = self.rate is not None or items[0].arrival_s is not None
        return items, due_times(items, self.rate, seed) if has_times else [0.0] * len(items)

    def told(self, items: list[WorkItem]) -> report.Record:
        """Return what the requests are, for a reader of the figures."""
        if self.rate is not None:
            arrivals = f"Poisson, {self.rate:g}/s"
        elif items[0].arrival_s is None:
            arrivals = "all at once"
        else:
            arrivals = "Poisson at the trace's rate" if self.fit_note else "the trace's"
        lengths = self.fit_note.removeprefix("lengths: ") or "data"
        return {"name": self.workload, "num_requests": len(items), "lengths": lengths, "arrivals": arrivals}


@with_config_file
@with_flag_groups
def simulate(
    engine: EngineOptions,
    device: DeviceFlags,
    load: LoadFlags,
    limits: LimitFlags,
    search: RateFlags,
    json: Annotated[Path | None, JSON] = None,
) -> None:
    """Serve on a virtual clock: throughput, latencies, goodput, KV use, cost, and what would bind."""
    search.check(limits.limits)
    if device.hardware is None:
        raise ConfigError("hardware must be given: a name, or a file of `quire bench calibrate`")
    if engine.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size {engine.data_parallel_size} divides one machine, which is not simulated; "
            "--replicas simulates engines on devices of their own"
        )
    if engine.speculation is not None:
        raise ConfigError("speculative decoding is not simulated; leave out speculative_config and spec_method")
    model, hardware = read_model(engine.model, engine.dtype, engine.quantization_options, engine.mmproj), device.machine
    found = device.plan(model, engine)
    items, due_s = load.requests(model.spec.vocab_size, engine.seed)
    cost = device.cost(model, engine, found)
    serve = partial(_serve, load, found, cost, items)
    searched: report.Record = {}
    if search.find_rate:
        rate, searched = _find_rate(serve, load, items, limits.limits, search, engine.seed)
        load, due_s = replace(load, rate=rate), due_times(items, rate, engine.seed)
    begun_s = time.process_time()
    run, fleet = serve(due_s)
    per_s = run.num_sequence_steps / (time.process_time() - begun_s)
    if not run.finished:
        longest = found.scheduler.max_model_len
        raise ConfigError(f"none of {len(items)} requests fits: the longest may have {longest} tokens")
    devices = f"{found.num_devices} x {found.hardware}"
    devices = devices if load.replicas == 1 else f"{load.replicas} replicas of {devices}"
    title = ", ".join(filter(None, (f"{found.model} on {devices}", load.workload, load.fit_note, "seconds")))
    record: report.Record = {"title": title, "workload": load.told(items)}
    record |= _record(run, found, limits.limits) | _cost(run, found, hardware, load) | searched
    if fleet is not None:
        record["replicas"] = {
            "num_replicas": load.replicas, "routing": load.routing, "computed_tokens_max_over_mean": fleet.imbalance,
        }  # fmt: skip
    prices = device.prices(model, engine, found)
    record["itl_target_prices"] = [price._asdict() for price in prices]
    record["not_servable_yet"] = device.not_servable_yet(model, engine)
    record["simulator"] = {"sequence_steps": run.num_sequence_steps, "sequence_steps_per_cpu_s": per_s}
    facts = {name: values for name, values in record.items() if name not in _NO_FACTS}
    report.print_tables(title, report.DISTRIBUTION_COLUMNS, record["figures"], facts)
    for name, price in price_row(prices, found).items():
        report.print_line(f"{name}: {price}")
    report.print_line(record["verdict"])
    print_refusals(record["not_servable_yet"])
    report.write_json(json, record)


def _serve(
    load: LoadFlags, found: MemoryPlan, cost: CostModel, items: list[WorkItem], due_s: list[float]
) -> tuple[SimulatedRun, FleetRun | None]:
    """Return the run of one engine or of all of several."""
    if load.replicas == 1:
        return Simulation(paged_scheduler(found.cache, found.scheduler), cost).run(items, due_s), None
    fleet = FleetSimulation(load.replicas, found.cache, found.scheduler, cost, load.routing).run(items, due_s)
    return fleet.whole, fleet


def _find_rate(
    serve: Callable[[list[float]], tuple[SimulatedRun, FleetRun | None]], load: LoadFlags, items: list[WorkItem],
    limits: LatencyLimits, search: RateFlags, seed: int,
) -> tuple[float, report.Record]:  # fmt: skip
    """Return the highest rate at which enough requests meet the limits, and the record of the search.

    A request that is refused meets none. Raises ConfigError where no rate is low enough.
    """
    found, probes = RateSearch(load.rate or 1.0, search.precision, _LOWEST_RATE, HIGHEST_RATE), list[Probed]()
    while (rate := found.next_rate()) is not None:
        run, _ = serve(due_times(items, rate, seed))
        num_met = limits.num_met([run.timeline(answer) for answer in run.finished])
        is_met = num_met >= num_needed(search.attain, len(items))
        found.record(rate, is_met=is_met)
        probes.append(Probed(rate, is_met, num_met, len(items), run.duration_s))
        report.print_line(str(probes[-1]))
    if found.best is None:
        raise ConfigError(found.verdict(search.attain))
    report.print_line(found.verdict(search.attain))
    return found.best, {"find_rate": found.figures(probes)}


def _record(run: SimulatedRun, found: MemoryPlan, limits: LatencyLimits) -> report.Record:
    timelines = [run.timeline(answer) for answer in run.finished]
    gaps = {"itl_s, prefill beside": run.itl_s(beside_prefill=True), "itl_s, none": run.itl_s(beside_prefill=False)}
    figures = latencies(timelines) | {name: distribution(sample) for name, sample in gaps.items() if sample}
    num_met, duration_s = limits.num_met(timelines), run.duration_s
    seen = _observation(run, limits, timelines)
    return {
        "figures": {name: values._asdict() for name, values in figures.items()},
        "rates": {
            "tokens_per_s": run.tokens_per_s,
            "requests_per_s": len(run.finished) / duration_s,
            "goodput_rps": num_met / duration_s,
            "duration_s": duration_s,
        },
        "queue": {"grows": seen.is_queue_growing, "mean_s": run.mean_queue_s},
        "requests": {"finished": len(run.finished), "met_limits": num_met, "refused": run.num_refused},
        "kv_cache": {
            "num_blocks": found.cache.num_blocks,
            "mean_kv_usage": run.mean_kv_usage,
            "peak_kv_usage": run.peak_kv_usage,
            "mean_batched_requests": run.mean_batched_requests,
            "num_preemptions": run.num_preemptions,
            "prefix_hit_rate": run.hit_rate,
        },
        "verdict": diagnose(seen) + _memory_note(run, found),
    }


def _cost(run: SimulatedRun, found: MemoryPlan, hardware: Hardware, load: LoadFlags) -> report.Record:
    """Return what a million output tokens cost, where a price is known."""
    price = hardware.price_per_hour if load.price is None else load.price
    num_devices = found.num_devices * load.replicas
    if price is None:
        return {}
    per_token = price * num_devices / 3600 / run.tokens_per_s
    return {"cost": {"per_million_output_tokens": per_token * 1e6, "price_per_hour": price * num_devices}}


def _observation(run: SimulatedRun, limits: LatencyLimits, timelines: list[Timeline]) -> Observation:
    prompt_lens = [len(answer.item.prompt_token_ids) for answer in run.finished]
    reported = {
        "queue_s": run.mean_queue_s, "num_preemptions": run.num_preemptions, "peak_kv_usage": run.peak_kv_usage
    }
    return observe(timelines, prompt_lens, limits, **reported)


def _memory_note(run: SimulatedRun, found: MemoryPlan) -> str:
    """Return what the memory adds to the verdict."""
    share = found.weight_bytes / found.memory_bytes
    memory = f" Weights take {share:.0%} of the memory: the model is large for this device." if share > 0.75 else ""
    if run.num_refused:
        memory += f" {run.num_refused} requests were refused, as longer than {found.scheduler.max_model_len} tokens."
    if run.num_preemptions > len(run.finished) / 10 and found.cache.block_size > 32:
        memory += f" Blocks of {found.cache.block_size} tokens waste much of the KV cache on short requests."
    return memory
