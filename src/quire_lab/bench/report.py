"""Report of figures: a table for readers, JSON with the same names for programs, and facts about the machine."""

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import quire
from quire.core.host_limits import find_cpus, num_threads
from quire.extension.isas import usable_isas
from quire_lab.sim.statistics import Distribution, Spread, Timeline, latencies, spread
from quire_lab.sim.workloads import WorkItem

if TYPE_CHECKING:
    from quire_lab.bench.bench_flags import WorkloadFlags


Record = dict[str, Any]


def spread_record(repeats: Mapping[str, Sequence[float]]) -> Record:
    """Return the spread of every figure over its repeats, and the repeats."""
    return {"figures": {name: spread(values)._asdict() for name, values in repeats.items()}, "repeats": repeats}


def latency_record(passes: Sequence[Sequence[Timeline]]) -> Record:
    """Return latencies over all repeats, each one's spread of medians, tokens per second, and the repeats."""
    repeats = [{name: values._asdict() for name, values in latencies(timelines).items()} for timelines in passes]
    pooled = latencies([timeline for timelines in passes for timeline in timelines])
    return {
        "figures": {name: values._asdict() for name, values in pooled.items()},
        "p50_over_repeats": {name: spread([repeat[name]["p50"] for repeat in repeats])._asdict() for name in pooled},
        "tokens_per_s": spread([_tokens_per_s(timelines) for timelines in passes])._asdict(),
        "repeats": repeats,
    }


def _tokens_per_s(timelines: Sequence[Timeline]) -> float:
    num_tokens = sum(len(timeline.token_times_s) for timeline in timelines)
    return num_tokens / max(timeline.token_times_s[-1] for timeline in timelines)


def workload_record(items: Sequence[WorkItem], flags: "WorkloadFlags") -> Record:
    """Return what was run, in numbers."""
    return {
        "source": flags.workload if flags.name is None else f"{flags.workload} {flags.name}",
        "num_requests": len(items),
        "num_prompt_tokens": sum(len(item.prompt_token_ids) for item in items),
        "num_output_tokens": sum(item.output_len for item in items),
    }


def write_json(path: Path | None, record: Record) -> None:
    """Write the record, or nothing without a path."""
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def print_tables(title: str, columns: Sequence[str], figures: Mapping[str, Mapping[str, float]], facts: Record) -> None:
    """Print the figures, one row each, and the facts below them."""
    from rich.console import Console  # noqa: PLC0415 (for tables with borders)
    from rich.table import Table  # noqa: PLC0415

    table = Table("", *columns, title=title, title_justify="left")
    for name, values in figures.items():
        table.add_row(name, *(f"{values[column]:.4g}" for column in columns))
    Console().print(table)
    for name, values in facts.items():
        print_line(f"{name}: " + ", ".join(f"{key} {_short(value)}" for key, value in values.items()))


def print_rows(title: str, rows: Mapping[str, object]) -> None:
    """Print names with what is to be said of each."""
    typer.echo(title)
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        typer.echo(f"{name:{width}}  {_short(value)}")


def print_line(text: str) -> None:
    """Print a line without markup, wrapped at the width of the terminal."""
    from rich.console import Console  # noqa: PLC0415

    Console().print(text, highlight=False, markup=False)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


DISTRIBUTION_COLUMNS = Distribution._fields
SPREAD_COLUMNS = Spread._fields


def machine_facts() -> dict[str, str | int]:
    """Return the CPU, its best instruction set, the threads and the versions that a figure depends on."""
    return client_facts() | {"num_threads": num_threads(), "instruction_set": next(iter(usable_isas()), "none")}


def client_facts() -> dict[str, str | int]:
    """Return what matters to a client of a server elsewhere."""
    return {
        "cpu": _cpu_model(),
        "num_cpus": find_cpus().num_usable,
        "python": platform.python_version(),
        "quire": quire.__version__,
    }


def _cpu_model() -> str:
    """Return the processor's name as Linux gives it, else what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
