"""`quire bench throughput`, `latency`, `serve`, `control-plane` and `calibrate`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import numpy as np
import typer

from quire.cli.command import Command
from quire.cli.flag_groups import COMMAND_SETTINGS, JSON, flag, flag_field, with_config_file, with_flag_groups
from quire.cli.model_flags import load
from quire.core.errors import ConfigError
from quire.core.host_limits import free_memory_bytes
from quire.engine.options import EngineOptions
from quire.model.quantization import UNQUANTIZED
from quire_lab.bench import report
from quire_lab.bench.bench_flags import (
    ArrivalFlags,
    LimitFlags,
    PolicyFlags,
    RunFlags,
    SearchFlags,
    ServedWorkloadFlags,
    ServerFlags,
    WorkloadFlags,
)
from quire_lab.bench.passes import latency_pass, throughput_pass, time_steps, watched_pass
from quire_lab.bench.report import machine_facts
from quire_lab.sim.calibration import fit_hardware, step_sizes
from quire_lab.sim.hardware import write_hardware
from quire_lab.sim.models import read_model
from quire_lab.sim.workloads import renewed

if TYPE_CHECKING:
    from quire.llm import LLM

Pass = TypeVar("Pass")

bench = typer.Typer(
    name="bench",
    help="Measure throughput, latency, a server, the control plane, and this machine for simulations.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@with_config_file
@with_flag_groups
def throughput(engine: EngineOptions, workload: WorkloadFlags, policy: PolicyFlags, run: RunFlags) -> None:
    """Ask everything at once; report tokens and requests per second."""
    engine = replace(engine, **asdict(policy))
    with load(engine) as llm:
        passes, facts = _measure(llm, engine, workload, run, throughput_pass)
    record = report.spread_record({name: [one[name] for one in passes] for name in passes[0]})
    facts["policy"] = asdict(policy)
    report.print_tables("throughput", report.SPREAD_COLUMNS, record["figures"], facts)
    report.write_json(run.json, {"benchmark": "throughput"} | record | facts)


@with_config_file
@with_flag_groups
def latency(
    engine: EngineOptions,
    workload: WorkloadFlags,
    run: RunFlags,
    concurrency: Annotated[int, flag("clients that each ask anew when answered", min=1)] = 1,
) -> None:
    """Ask one after the other, or with several clients; report the times that a client sees."""
    engine = replace(engine, max_num_seqs=concurrency)  # a queued request starts when a client's last one has ended
    with load(engine) as llm:
        passes, facts = _measure(llm, engine, workload, run, partial(latency_pass, concurrency=concurrency))
    record = report.latency_record(passes)
    report.print_tables("latency, seconds", report.DISTRIBUTION_COLUMNS, record["figures"], facts)
    report.write_json(run.json, {"benchmark": "latency", "concurrency": concurrency} | record | facts)


def _measure(
    llm: "LLM", engine: EngineOptions, workload: WorkloadFlags, run: RunFlags, one_pass: Callable[..., Pass]
) -> tuple[list[Pass], report.Record]:
    """Run the workload once to warm up, then timed; return the passes and what a reader of them has to know.

    Each pass has other tokens: none finds in the cache what another has left.
    """
    items = workload.build(llm.vocab_size, engine.seed)
    facts = {
        "workload": report.workload_record(items, workload),
        "kv_cache": watched_pass(llm, items),
        "engine": {name: str(value) for name, value in asdict(engine).items() if value is not None},
        "machine": machine_facts(),
    }
    return [one_pass(llm, renewed(items, len(items), number + 1)) for number in range(run.repeats)], facts


@with_flag_groups
def serve(
    server: ServerFlags,
    workload: ServedWorkloadFlags,
    arrivals: ArrivalFlags,
    limits: LimitFlags,
    search: SearchFlags,
    json: Annotated[Path | None, JSON] = None,
) -> None:
    """Measure any OpenAI-compatible server as its clients see it, or search the rate that it can take."""
    from quire_lab.bench.bench_serve import ServeCommand  # noqa: PLC0415 (--help loads no HTTP client)

    ServeCommand(server, workload, arrivals, limits, search, json).run()


@with_config_file
@with_flag_groups
def calibrate(engine: EngineOptions, run: RunFlags) -> None:
    """Time steps of many sizes, and make of them the hardware that `quire simulate` takes (--json)."""
    model = read_model(engine.model, engine.dtype, engine.quantization_options, engine.mmproj)
    if model.quantization != UNQUANTIZED:
        raise ConfigError(f"a machine is calibrated with unquantized weights, got {model.quantization}")
    longest = min(engine.batched_tokens(), (engine.max_model_len or model.spec.default_positions) - 1)
    sizes, memory_bytes = step_sizes(longest), free_memory_bytes()
    with load(engine) as llm:
        time_steps(llm, sizes, 1, engine.seed)  # warms up
        times = time_steps(llm, sizes, run.repeats, engine.seed)
    medians = {size: float(np.median(seconds)) for size, seconds in times.items()}
    hardware = fit_hardware(
        str(machine_facts()["cpu"]), model.spec, model.dtype, medians, memory_bytes, engine.kv_cache_dtype
    )
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
    """Load of the control plane."""

    num_seqs: list[int] = flag_field([256], "sequences that decode together (repeatable)", min=1)
    steps: int = flag_field(200, "timed steps of a repeat", min=1)
    prompt_len: int = flag_field(128, "tokens of a prompt, at least", min=1)
    block_size: int = flag_field(16, "tokens per KV block", min=1)
    growth: bool = flag_field(False, "time the longest step by the length of prompts instead")
    lengths: list[int] = flag_field([1024, 8192, 32_768, 131_072], "tokens of prompts (--growth; repeatable)", min=1)


@with_flag_groups
def control_plane(load: ControlPlaneFlags, run: RunFlags) -> None:
    """Time scheduler, batch preparation and token handling without a model: microseconds per sequence and step."""
    from quire_lab.bench.control_plane import us_per_sequence_and_step  # noqa: PLC0415 (--help loads no torch)

    if load.growth:
        _control_plane_growth(load, run)
        return

    def measure(num_seqs: int) -> float:
        return us_per_sequence_and_step(num_seqs, load.steps, load.prompt_len, load.block_size)

    repeats = {f"{num_seqs} sequences": [measure(num_seqs) for _ in range(run.repeats)] for num_seqs in load.num_seqs}
    record = report.spread_record(repeats)
    facts = {"load": asdict(load), "machine": machine_facts()}
    report.print_tables("control plane, us per sequence and step", report.SPREAD_COLUMNS, record["figures"], facts)
    report.write_json(run.json, {"benchmark": "control-plane"} | record | facts)


def _control_plane_growth(load: ControlPlaneFlags, run: RunFlags) -> None:
    """Time the longest step of bursts, forks and beam searches, in milliseconds."""
    from quire_lab.bench.control_plane import CASES, longest_step_ms  # noqa: PLC0415 (--help loads no torch)

    for make in CASES.values():
        longest_step_ms(make(1))                # warms up
    repeats = {
        f"{name}, {length} tokens": [longest_step_ms(make(length)) for _ in range(run.repeats)]
        for name, make in CASES.items()
        for length in load.lengths
    }
    record = report.spread_record(repeats)
    facts = {"load": {"lengths": load.lengths}, "machine": machine_facts()}
    title = "control plane, ms of the longest step, nothing computed"
    report.print_tables(title, report.SPREAD_COLUMNS, record["figures"], facts)
    report.write_json(run.json, {"benchmark": "control-plane-growth"} | record | facts)


for command in (throughput, latency, serve, control_plane, calibrate):
    bench.command(cls=Command, context_settings=COMMAND_SETTINGS)(command)
