"""`quire bench serve`, once its flags are read: measure or search, print, write, and choose how to end."""

from dataclasses import dataclass
from pathlib import Path

import typer

from quire.cli.bench import report
from quire.cli.bench.find_rate import RateSearch
from quire.cli.bench.flags import WorkloadFlags
from quire.cli.bench.machine import client_facts
from quire.cli.bench.probes import Probe, ProbePlan, RateFinder
from quire.cli.bench.serve import Measured, ServeBench, on_server
from quire.cli.bench.serve_flags import ArrivalFlags, LimitFlags, PromptFlags, SearchFlags, ServerFlags
from quire.cli.bench.serve_report import request_records, sentence, serve_record
from quire.core.errors import ConfigError, EngineError
from quire.paper.workloads import WorkItem

_INTERRUPTED = 130


class NothingMeasuredError(EngineError):
    """No request was answered, or no rate meets the limits."""


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """The command with all that was asked for."""

    server: ServerFlags
    workload: WorkloadFlags
    prompts: PromptFlags
    arrivals: ArrivalFlags
    limits: LimitFlags
    search: SearchFlags
    json_path: Path | None

    def run(self) -> None:
        """Measure and report. Raises NothingMeasuredError when there is nothing to report, Exit after Ctrl-C."""
        items = self.prompts.build(self.workload)
        is_interrupted = self._search(items) if self.search.find_rate else self._measure(items)
        if is_interrupted:
            raise typer.Exit(_INTERRUPTED)

    def _measure(self, items: list[WorkItem]) -> bool:
        """Run one load and report it; return whether it was interrupted."""
        schedule = self.arrivals.schedule(items, self.server.max_concurrency, self.prompts.seed)

        async def measure(bench: ServeBench) -> tuple[Measured, ServeBench]:
            return await bench.measure(items, schedule), bench

        measured, bench = on_server(self.server, measure)
        is_interrupted = bench.interrupted.is_set()
        record = self._print(f"serve {bench.target.model_name}, seconds", measured, items)
        record |= {"interrupted": is_interrupted, "per_request": request_records(measured.run.requests)}
        report.write_json(self.json_path, {"benchmark": "serve"} | record)
        if not measured.run.finished and not is_interrupted:
            first = measured.run.failures[0]
            raise NothingMeasuredError(f"no request was answered; the first failed with {first.label}: {first.message}")
        return is_interrupted

    def _search(self, items: list[WorkItem]) -> bool:
        """Search the highest rate within the limits and report it; return whether that was interrupted."""
        plan = self._probe_plan(items)

        async def find(bench: ServeBench) -> tuple[RateFinder, RateSearch]:
            finder = RateFinder(bench, plan, _print_probe)
            return finder, await finder.find(self.arrivals.rate)

        finder, found = on_server(self.server, find)
        is_interrupted = finder.bench.interrupted.is_set()
        by_rate = {probe.rate: probe for probe in finder.probes}
        record: report.Record = {}
        if found.best is not None:
            best = by_rate[found.best]
            record = self._print(f"serve {finder.bench.target.model_name}, seconds", best.measured, items)
        if found.missed is not None:
            cause = sentence(*by_rate[found.missed].measured, plan.limits)
            report.print_line(f"at {found.missed:.4g} requests/s: {cause}")
        record |= {"interrupted": is_interrupted, "find_rate": _search_record(found, finder.probes)}
        report.write_json(self.json_path, {"benchmark": "serve"} | record)
        if found.best is None and not is_interrupted:
            raise NothingMeasuredError(f"no rate meets the limits, down to {found.missed:.4g} requests/s")
        report.print_line(_verdict(found, plan.attain))
        return is_interrupted

    def _probe_plan(self, items: list[WorkItem]) -> ProbePlan:
        """Return what all probes share. Raises ConfigError for flags that contradict a search."""
        limits = self.limits.limits
        if not limits.given:
            raise ConfigError("find-rate needs a limit: ttft-limit-ms, itl-limit-ms, tpot-limit-ms or e2e-limit-ms")
        if self.arrivals.arrivals not in (None, "poisson") or self.arrivals.concurrency is not None:
            raise ConfigError("find-rate tries rates of poisson arrivals; leave arrivals and concurrency out")
        return ProbePlan(
            items=items,
            limits=limits,
            attain=self.search.attain,
            probe_s=self.search.probe_s,
            precision=self.search.precision,
            burstiness=self.arrivals.burstiness,
            max_open=self.server.max_concurrency,
            seed=self.prompts.seed,
        )

    def _print(self, title: str, measured: Measured, items: list[WorkItem]) -> report.Record:
        """Print a load's report and return it as a record."""
        limits = self.limits.limits
        record = serve_record(*measured, limits)
        record |= {"workload": report.workload_record(items, self.workload), "machine": client_facts()}
        facts = {name: values for name, values in record.items() if name != "figures"}
        report.print_tables(title, report.DISTRIBUTION_COLUMNS, record["figures"], facts)
        record["diagnosis"] = sentence(*measured, limits)
        report.print_line(record["diagnosis"])
        return record


def _print_probe(probe: Probe) -> None:
    run = probe.measured.run
    report.print_line(
        f"{probe.rate:.4g} requests/s for {run.duration_s:.1f} s: {probe.num_met} of {run.num_due} met the limits, "
        f"{'enough' if probe.is_met else 'too few'}"
    )


def _search_record(found: RateSearch, probes: list[Probe]) -> report.Record:
    """Return what was found and every probe on the way."""
    return {
        "rate": found.best,
        "missed_rate": found.missed,
        "probes": [
            {
                "rate": probe.rate,
                "is_met": probe.is_met,
                "num_met": probe.num_met,
                "num_requests": probe.measured.run.num_due,
                "duration_s": probe.measured.run.duration_s,
            }
            for probe in probes
        ],
    }


def _verdict(found: RateSearch, attain: float) -> str:
    """Return the last line: the rate, and how sure it is."""
    if found.best is None:
        return "interrupted before any rate met the limits"
    if found.missed is None:
        return f"at least {found.best:.4g} requests/s meet the limits; higher rates were not tried"
    return (
        f"highest rate at which {attain:.4g} of the requests meet the limits: {found.best:.4g}/s "
        f"(at {found.missed:.4g}/s too few do)"
    )
