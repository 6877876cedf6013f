"""`quire bench serve` after its flags are read: measure or search, print, write, choose the exit status.

Every figure of a run is from recorded times alone. A search probes the server at its rates: a bounded load at each, of
prompts that the server has not seen.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import typer
import uvloop

from quire.core.errors import ConfigError, EngineError
from quire_lab.bench import report
from quire_lab.bench.bench_flags import ArrivalFlags, LimitFlags, SearchFlags, ServedWorkloadFlags, ServerFlags
from quire_lab.bench.diagnosis import LatencyLimits, diagnose, observe
from quire_lab.bench.http_load import LoadRun, SentRequest
from quire_lab.bench.report import Record, client_facts
from quire_lab.bench.server import MeasuredLoad, ServerUnderTest, server_under_test
from quire_lab.sim.rate_search import HIGHEST_RATE, Probed, RateSearch, num_needed
from quire_lab.sim.statistics import latencies
from quire_lab.sim.workloads import Schedule, WorkItem, poisson_arrivals, renewed

_KV_NAMES = (
    *("mean_kv_usage", "peak_kv_usage", "mean_tail_waste", "peak_tail_waste"),
    *("prefix_hit_rate", "num_preemptions"),
)
_FEWEST_REQUESTS = 10   # requests of a probe: a share of fewer says nothing
_SHORTEST_END_S = 10.0  # for the answers to the last arrivals of a short probe
_INTERRUPTED = 130


def serve_record(run: LoadRun, use: Record, limits: LatencyLimits) -> Record:
    """Return the figures of a run; `use` is what the server said of itself, empty where it says nothing."""
    figures = {name: values._asdict() for name, values in latencies(run.timelines).items()}
    facts: dict[str, Record] = {
        "rates": _rates(run, limits),
        "requests": _request_counts(run),
        "limits": limits.given and limits.given | {"attained": limits.num_met(run.timelines) / run.num_due},
        "batch": _batch(run, use),
        "kv_cache": {name: use[name] for name in _KV_NAMES if name in use},
        "errors": dict(Counter(failure.label for failure in run.failures)),
        "error_messages": {failure.label: failure.message for failure in run.failures},
        "client": _client(run),
    }
    goodput = {"request_goodput": facts["rates"]["goodput_rps"]} if limits.given else {}  # vLLM's name of it
    return {"figures": figures, **{name: values for name, values in facts.items() if values}, **goodput}


def sentence(run: LoadRun, use: Record, limits: LatencyLimits) -> str:
    """Return the diagnosis of what the client saw and the server reported."""
    if not run.finished:
        return f"Nothing was answered; {len(run.failures)} requests failed."
    prompt_lens = [len(request.item.prompt_token_ids) for request in run.finished]
    reported = {name: use[name] for name in ("mean_waiting", "num_preemptions", "peak_kv_usage") if name in use}
    queue_s, num_failed = use.get("mean_queue_s"), len(run.failures)
    return diagnose(observe(run.timelines, prompt_lens, limits, queue_s=queue_s, num_failed=num_failed, **reported))


def request_records(requests: Sequence[SentRequest]) -> list[Record]:
    """Return a record of every request that was sent, for the JSON."""
    return [
        {
            "due_s": request.due_s,
            "sent_s": request.sent_s,
            "num_prompt_tokens": len(request.item.prompt_token_ids),
            "num_cached_tokens": request.answer.num_cached_tokens,
            "num_output_tokens": request.num_output_tokens,
            "ttft_s": request.timeline.ttft_s if request.answer.token_times_s else None,
            "e2e_s": request.timeline.e2e_s if request.is_finished else None,
            "error": request.answer.failure.label if request.answer.failure else None,
        }
        for request in requests
    ]


def _rates(run: LoadRun, limits: LatencyLimits) -> Record:
    """Return what was asked and done per second, over the whole run, its end included."""
    num_prompt_tokens = sum(len(request.item.prompt_token_ids) for request in run.finished)
    offered_rps = run.schedule.offered_rps
    rates = {} if offered_rps is None else {"offered_rps": offered_rps}
    rates |= {
        "requests_per_s": len(run.finished) / run.duration_s,
        "tokens_per_s": run.num_output_tokens / run.duration_s,
        "total_tokens_per_s": (num_prompt_tokens + run.num_output_tokens) / run.duration_s,
    }
    if limits.given:
        rates["goodput_rps"] = limits.num_met(run.timelines) / run.duration_s
    return rates


def _request_counts(run: LoadRun) -> Record:
    """Return the outcomes of the requests, and the number of tokens."""
    return {
        "num_requests": run.num_due,
        "num_finished": len(run.finished),
        "num_failed": len(run.failures),
        "num_cut": run.num_due - len(run.finished) - len(run.failures),
        "num_output_tokens": run.num_output_tokens,
        "num_asked_tokens": sum(request.item.output_len for request in run.requests),
        "duration_s": run.duration_s,
    }


def _batch(run: LoadRun, use: Record) -> Record:
    """Return how many requests ran together: by the server's word, else by Little's law over what was open here."""
    waiting = {name: use[name] for name in ("mean_waiting", "peak_waiting", "mean_queue_s") if name in use}
    if "mean_running" in use:
        return {"mean_size": use["mean_running"], "source": f"/metrics, {use['num_samples']} samples"} | waiting
    open_s = sum(_open_s(request, run.duration_s) for request in run.requests)
    return {"mean_size": open_s / run.duration_s, "source": "requests open at the client (Little's law)"} | waiting


def _open_s(request: SentRequest, end_s: float) -> float:
    """Return how long the server had the request; a failed one counts as never there."""
    if request.answer.failure is not None:
        return 0.0
    return (request.answer.token_times_s[-1] if request.is_finished else end_s) - request.sent_s


def _client(run: LoadRun) -> Record:
    """Return what this client cost, and how late it was: figures of a busy client are not the server's."""
    num_chunks = sum(request.answer.num_chunks for request in run.requests)
    num_arrivals = sum(len(request.answer.token_times_s) for request in run.requests)
    record = {
        "cpu_share": run.client_cpu_s / run.duration_s,
        "max_late_s": max((request.sent_s - request.due_s for request in run.requests), default=0.0),
    }
    if num_arrivals:
        record["cpu_us_per_chunk"] = run.client_cpu_s / num_chunks * 1e6
        record["tokens_per_chunk"] = run.num_output_tokens / num_arrivals
    return record


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate, and whether enough requests met the limits. One that missed them was cut short."""

    rate: float
    num_met: int
    is_met: bool
    measured: MeasuredLoad

    @property
    def figures(self) -> Probed:
        """The rate and its requests, without what was measured."""
        run = self.measured.run
        return Probed(self.rate, self.is_met, self.num_met, run.num_due, run.duration_s)


@dataclass(slots=True)
class RateFinder:
    """Probes of a server at the rates of a search: Poisson arrivals, at most `max_open` requests at once."""

    server: ServerUnderTest
    items: list[WorkItem]
    limits: LatencyLimits
    search: SearchFlags
    arrivals: ArrivalFlags
    max_open: int
    seed: int
    on_probe: Callable[[Probe], None]
    probes: list[Probe] = field(default_factory=list)
    num_rounds: int = 0  # over the requests so far

    async def find(self) -> RateSearch:
        """Search until the rate is known, or Ctrl-C; return it, with the best rate and the lowest that missed."""
        lowest = _FEWEST_REQUESTS / self.search.probe_s
        search = RateSearch(self.arrivals.rate or 1.0, self.search.precision, lowest, max(HIGHEST_RATE, lowest))
        while (rate := search.next_rate()) is not None:
            probe = await self._probe(rate)
            if self.server.interrupted.is_set():
                break
            search.record(rate, is_met=probe.is_met)
            self.probes.append(probe)
            self.on_probe(probe)
        return search

    async def _probe(self, rate: float) -> Probe:
        """Load the server until it is clear whether enough requests meet the limits; what is open at the end missed."""
        count, probe_s = round(rate * self.search.probe_s), self.search.probe_s
        needed = num_needed(self.search.attain, count)
        num_missed = 0

        def is_enough(request: SentRequest) -> bool:
            nonlocal num_missed
            num_missed += not (request.is_finished and self.limits.are_met_by(request.timeline))
            return num_missed > count - needed

        items = renewed(self.items, count, self.num_rounds)
        self.num_rounds += math.ceil(count / len(self.items))
        await self.server.drain()
        measured = await self.server.measure(
            items,
            Schedule(poisson_arrivals(count, rate, self.arrivals.burstiness, self.seed), self.max_open),
            is_enough=is_enough,
            limit_s=probe_s + max(probe_s, _SHORTEST_END_S),
        )
        num_met = self.limits.num_met(measured.run.timelines)
        return Probe(rate, num_met, num_met >= needed, measured)


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
