"""`quire bench throughput`, `latency`, `serve`, `control-plane` and `calibrate`."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from quire.cli.bench import report
from quire.cli.bench.calibrate import time_steps
from quire.cli.bench.flags import PolicyFlags, RunFlags, WorkloadFlags
from quire.cli.bench.machine import machine_facts
from quire.cli.bench.passes import latency_pass, throughput_pass, watched_pass
from quire.cli.bench.serve_flags import ArrivalFlags, LimitFlags, PromptFlags, SearchFlags, ServerFlags
from quire.cli.engine_flags import EngineFlags
from quire.cli.flag_groups import COMMAND_SETTINGS, flag, with_flag_groups
from quire.engine.sizing import free_memory_bytes
from quire.paper.calibration import StepSizes, fit_hardware
from quire.paper.hardware import write_hardware
from quire.paper.models import read_model
from quire.paper.workloads import WorkItem, renewed

if TYPE_CHECKING:
    from quire.llm import LLM

bench = typer.Typer(
    name="bench",
    help="Measure throughput, latency, a server, the control plane, and this machine for simulations.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@with_flag_groups
def throughput(engine: EngineFlags, workload: WorkloadFlags, policy: PolicyFlags, run: RunFlags) -> None:
    """Ask everything at once; report tokens and requests per second."""
    with engine.load(**asdict(policy)) as llm:
        items = workload.build(llm.vocab_size, engine.seed)
        facts = _warm_up(llm, items, engine, workload) | {"policy": asdict(policy)}
        passes = [throughput_pass(llm, pass_items) for pass_items in _new_passes(items, run.repeats)]
    record = report.throughput_record(passes)
    report.print_tables("throughput", report.SPREAD_COLUMNS, record["figures"], facts)
    report.write_json(run.json, {"benchmark": "throughput"} | record | facts)


@with_flag_groups
def latency(
    engine: EngineFlags,
    workload: WorkloadFlags,
    run: RunFlags,
    concurrency: Annotated[int, flag("clients that each ask anew when answered", min=1)] = 1,
) -> None:
    """Ask one after the other, or with several clients; report the times that a client sees."""
    engine = replace(engine, max_num_seqs=concurrency)  # a queued request starts when a client's last one has ended
    with engine.load() as llm:
        items = workload.build(llm.vocab_size, engine.seed)
        facts = _warm_up(llm, items, engine, workload)
        passes = [latency_pass(llm, pass_items, concurrency) for pass_items in _new_passes(items, run.repeats)]
    record = report.latency_record(passes)
    report.print_tables("latency, seconds", report.DISTRIBUTION_COLUMNS, record["figures"], facts)
    report.write_json(run.json, {"benchmark": "latency", "concurrency": concurrency} | record | facts)


@with_flag_groups
def serve(
    server: ServerFlags,
    workload: WorkloadFlags,
    prompts: PromptFlags,
    arrivals: ArrivalFlags,
    limits: LimitFlags,
    search: SearchFlags,
    json: Annotated[Path | None, flag("write everything there as well", metavar="FILE")] = None,
) -> None:
    """Measure any OpenAI-compatible server as its clients see it, or search the rate that it can take."""
    from quire.cli.bench.serve_command import ServeCommand  # noqa: PLC0415 (--help loads no HTTP client)

    ServeCommand(server, workload, prompts, arrivals, limits, search, json).run()


@with_flag_groups
def calibrate(engine: EngineFlags, run: RunFlags) -> None:
    """Time steps of many sizes, and make of them the hardware that `quire simulate` takes (--json)."""
    model = read_model(engine.model, engine.dtype)
    longest = min(engine.max_num_batched_tokens, (engine.max_model_len or model.spec.max_position_embeddings) - 1)
    sizes, memory_bytes = StepSizes.up_to(longest), free_memory_bytes()
    with engine.load() as llm:
        time_steps(llm, sizes, 1, engine.seed)  # warms up
        times = time_steps(llm, sizes, run.repeats, engine.seed)
    medians = {size: float(np.median(seconds)) for size, seconds in times.items()}
    hardware = fit_hardware(str(machine_facts()["cpu"]), model.spec, model.dtype, sizes, medians, memory_bytes)
    record = report.spread_record({size.name: seconds for size, seconds in times.items()})
    fitted = {
        "kv_bytes_per_s": hardware.bytes_per_s,
        "attention_flops_per_s": hardware.flops_per_s,
        "sequence_s": hardware.sequence_s,
    }
    facts = {"fit": fitted, "machine": machine_facts()}
    report.print_tables(f"steps of {model.name}, seconds", report.SPREAD_COLUMNS, record["figures"], facts)
    if run.json is not None:
        write_hardware(run.json, hardware)


@dataclass(frozen=True, slots=True)
class ControlPlaneFlags:
    """How much the control plane is given to do."""

    num_seqs: Annotated[list[int], flag("sequences that decode together (repeatable)", min=1)] = field(
        default_factory=lambda: [256]
    )
    steps: Annotated[int, flag("timed steps of a repeat", min=1)] = 200
    prompt_len: Annotated[int, flag("tokens of a prompt, at least", min=1)] = 128
    block_size: Annotated[int, flag("tokens per KV block", min=1)] = 16


@with_flag_groups
def control_plane(load: ControlPlaneFlags, run: RunFlags) -> None:
    """Time scheduler, batch preparation and token handling without a model: microseconds per sequence and step."""
    from quire.cli.bench.control_plane import us_per_sequence_and_step  # noqa: PLC0415 (--help loads no torch)

    def measure(num_seqs: int) -> float:
        return us_per_sequence_and_step(num_seqs, load.steps, load.prompt_len, load.block_size)

    repeats = {f"{num_seqs} sequences": [measure(num_seqs) for _ in range(run.repeats)] for num_seqs in load.num_seqs}
    record = report.spread_record(repeats)
    facts = {"load": asdict(load), "machine": machine_facts()}
    report.print_tables("control plane, us per sequence and step", report.SPREAD_COLUMNS, record["figures"], facts)
    report.write_json(run.json, {"benchmark": "control-plane"} | record | facts)


def _new_passes(items: list[WorkItem], count: int) -> Iterator[list[WorkItem]]:
    """Yield the workload `count` times, each time of other tokens: no pass finds in the cache what another has left."""
    return (renewed(items, len(items), first_round) for first_round in range(1, count + 1))


def _warm_up(llm: "LLM", items: list[WorkItem], engine: EngineFlags, workload: WorkloadFlags) -> report.Record:
    """Run the workload once, untimed; return what a reader of the figures has to know."""
    use = watched_pass(llm, items)
    return {
        "workload": report.workload_record(items, workload),
        "kv_cache": report.kv_record(use),
        "engine": {name: str(value) for name, value in asdict(engine).items() if value is not None},
        "machine": machine_facts(),
    }


bench.command(context_settings=COMMAND_SETTINGS)(throughput)
bench.command(context_settings=COMMAND_SETTINGS)(latency)
bench.command(context_settings=COMMAND_SETTINGS)(serve)
bench.command(context_settings=COMMAND_SETTINGS)(control_plane)
bench.command(context_settings=COMMAND_SETTINGS)(calibrate)
