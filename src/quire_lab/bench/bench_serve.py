"""`quire bench serve` after its flags are read: measure or search, print, write, choose the exit status."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import typer
import uvloop

from quire.core.errors import ConfigError, EngineError
from quire_lab.bench import report
from quire_lab.bench.bench_flags import ArrivalFlags, LimitFlags, SearchFlags, ServedWorkloadFlags, ServerFlags
from quire_lab.bench.find_rate import Probe, RateFinder
from quire_lab.bench.machine import client_facts
from quire_lab.bench.serve_report import request_records, sentence, serve_record
from quire_lab.bench.server import MeasuredLoad, ServerUnderTest, server_under_test
from quire_lab.sim.workloads import WorkItem

_INTERRUPTED = 130


class NothingMeasuredError(EngineError):
    """No request was answered, or no rate meets the limits."""


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """The command with all that was asked for."""

    server: ServerFlags
    workload: ServedWorkloadFlags
    arrivals: ArrivalFlags
    limits: LimitFlags
    search: SearchFlags
    json_path: Path | None

    def run(self) -> None:
        """Measure and report. Raises NothingMeasuredError when there is nothing to report, Exit after Ctrl-C."""
        self.search.check(self.limits.limits)
        items = self.workload.items()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # half the CPU per chunk
            runner.run(self._search(items) if self.search.find_rate else self._measure(items))

    async def _measure(self, items: list[WorkItem]) -> None:
        """Run one load and report it."""
        schedule = self.arrivals.schedule(items, self.server.max_concurrency, self.workload.seed)
        async with server_under_test(self.server) as server:
            measured = await server.measure(items, schedule)
        record = self._print(server, measured, items) | {"per_request": request_records(measured.run.requests)}
        problem = None
        if not measured.run.finished and measured.run.failures:
            first = measured.run.failures[0]
            problem = f"no request was answered; the first failed with {first.label}: {first.message}"
        self._end(server, record, problem)

    async def _search(self, items: list[WorkItem]) -> None:
        """Search the highest rate within the limits and report it."""
        limits = self.limits.limits
        if self.arrivals.arrivals not in (None, "poisson") or self.arrivals.concurrency is not None:
            raise ConfigError("find-rate tries rates of poisson arrivals; leave arrivals and concurrency out")
        async with server_under_test(self.server) as server:
            finder = RateFinder(
                server, items, limits, self.search, self.arrivals, self.server.max_concurrency, self.workload.seed,
                _print_probe,
            )  # fmt: skip
            found = await finder.find()
        by_rate = {probe.rate: probe.measured for probe in finder.probes}
        record = {} if found.best is None else self._print(server, by_rate[found.best], items)
        if found.missed is not None:
            cause = sentence(*by_rate[found.missed], limits)
            report.print_line(f"at {found.missed:.4g} requests/s: {cause}")
        problem = None
        if found.best is None and found.missed is not None:
            problem = found.verdict(self.search.attain)
        if problem is None or server.interrupted.is_set():
            interrupted = "interrupted before any rate met the limits"
            report.print_line(interrupted if found.best is None else found.verdict(self.search.attain))
        self._end(server, record | {"find_rate": found.figures(probe.figures for probe in finder.probes)}, problem)

    def _print(self, server: ServerUnderTest, measured: MeasuredLoad, items: list[WorkItem]) -> report.Record:
        """Print a load's report and return it as a record."""
        limits = self.limits.limits
        record = serve_record(*measured, limits)
        record |= {"workload": report.workload_record(items, self.workload), "machine": client_facts()}
        facts = {name: values for name, values in record.items() if isinstance(values, dict) and name != "figures"}
        title = f"serve {server.target.model_name}, seconds"
        report.print_tables(title, report.DISTRIBUTION_COLUMNS, record["figures"], facts)
        if limits.given:
            report.print_line(f"Request goodput (req/s): {record['request_goodput']:.4g}")
        record["diagnosis"] = sentence(*measured, limits)
        report.print_line(record["diagnosis"])
        return record

    def _end(self, server: ServerUnderTest, record: report.Record, problem: str | None) -> None:
        """Write the record. Raises Exit if it was interrupted, else NothingMeasuredError if there is a problem."""
        is_interrupted = server.interrupted.is_set()
        report.write_json(self.json_path, {"benchmark": "serve", "interrupted": is_interrupted} | record)
        if is_interrupted:
            raise typer.Exit(_INTERRUPTED)
        if problem is not None:
            raise NothingMeasuredError(problem)


def _print_probe(probe: Probe) -> None:
    report.print_line(str(probe.figures))
