"""The flags of `quire bench serve`, and what they come to: requests, a schedule, limits. Loads no HTTP client."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from quire.cli.bench.flags import WorkloadFlags
from quire.cli.bench.goodput import Limits
from quire.cli.flag_groups import flag
from quire.core.errors import ConfigError
from quire.paper.arrivals import ArrivalKind, Schedule, poisson_arrivals, trace_arrivals
from quire.paper.traces import TraceSlice, is_trace, trace_workload
from quire.paper.workloads import WorkItem

_server = partial(flag, panel="Server")
_workload = partial(flag, panel="Workload")
_arrivals = partial(flag, panel="Arrivals")
_limits = partial(flag, panel="Limits")


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """Which server is asked, and how hard it may be held on to."""

    url: Annotated[str, _server("of an OpenAI-compatible server, without /v1")] = "http://127.0.0.1:8000"
    model_name: Annotated[str | None, _server("to ask for", show_default="the first of /v1/models")] = None
    api_key: Annotated[str | None, _server("sent as a bearer token")] = None
    request_timeout: Annotated[float, _server("seconds for a whole request", min=0.001)] = 600.0
    max_concurrency: Annotated[int, _server("requests open at once; others wait, and their time counts", min=1)] = 1024

    @property
    def base_url(self) -> str:
        """Where routes begin."""
        return self.url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class PromptFlags:
    """How prompts are made where the workload gives only lengths, and which part of a trace is taken."""

    vocab_size: Annotated[int, _workload("ids of random prompts are below; any model has these", min=1)] = 512
    seed: Annotated[int, _workload("of random prompts and arrivals", min=0)] = 0
    start_s: Annotated[float, _workload("where in a trace to begin", min=0.0)] = 0.0
    speed_up: Annotated[float, _workload("how many times faster than it was a trace is played", min=1e-6)] = 1.0

    def build(self, workload: WorkloadFlags) -> list[WorkItem]:
        """Return the requests; those of a trace with their times. Raises ConfigError when something does not fit."""
        path = Path(workload.workload)
        if workload.workload != "random" and is_trace(path):
            part = TraceSlice(workload.num_prompts, workload.max_total_len, self.start_s, self.speed_up)
            return trace_workload(path, part, self.vocab_size, self.seed)
        if self.start_s or self.speed_up != 1.0:
            raise ConfigError(f"start-s and speed-up are for traces, which {workload.workload!r} is not")
        return workload.build(self.vocab_size, self.seed)


@dataclass(frozen=True, slots=True)
class ArrivalFlags:
    """When requests come."""

    arrivals: Annotated[
        ArrivalKind | None,
        _arrivals(
            "trace: as in the trace; poisson: at random, --rate a second; burst: all at once; "
            "closed: --concurrency clients, each anew when answered",
            show_default="what fits the other flags, else trace for a trace and burst for the rest",
        ),
    ] = None
    rate: Annotated[
        float | None, _arrivals("requests per second of poisson; where --find-rate begins", min=1e-6)
    ] = None
    burstiness: Annotated[
        float, _arrivals("gamma shape of poisson's gaps: below 1 burstier, above steadier", min=1e-3)
    ] = 1.0
    concurrency: Annotated[int | None, _arrivals("clients of the closed loop", min=1)] = None

    def schedule(self, items: list[WorkItem], max_open: int, seed: int) -> Schedule:
        """Return when the requests are due. Raises ConfigError for flags that contradict each other."""
        kind = self._kind(items)
        self._check(kind)
        if kind == "closed":
            return Schedule(None, min(self.concurrency or 1, max_open))
        if kind == "poisson":
            assert self.rate is not None
            return Schedule(poisson_arrivals(len(items), self.rate, self.burstiness, seed), max_open)
        return Schedule(trace_arrivals(items) if kind == "trace" else [0.0] * len(items), max_open)

    def _kind(self, items: list[WorkItem]) -> ArrivalKind:
        if self.arrivals is not None:
            return self.arrivals
        if self.rate is not None:
            return "poisson"
        if self.concurrency is not None:
            return "closed"
        return "burst" if items[0].arrival_s is None else "trace"

    def _check(self, kind: ArrivalKind) -> None:
        if (self.rate is not None) != (kind == "poisson"):
            raise ConfigError(f"rate is for arrivals poisson, which needs it; arrivals are {kind}, rate is {self.rate}")
        if (self.concurrency is not None) != (kind == "closed"):
            raise ConfigError(
                f"concurrency is for arrivals closed, which needs it; arrivals are {kind}, "
                f"concurrency is {self.concurrency}"
            )
        if self.burstiness != 1.0 and kind != "poisson":
            raise ConfigError(f"burstiness is for arrivals poisson; arrivals are {kind}")


@dataclass(frozen=True, slots=True)
class LimitFlags:
    """What a request may take to count as good."""

    ttft_limit_ms: Annotated[float | None, _limits("to the first token", min=0.001)] = None
    itl_limit_ms: Annotated[float | None, _limits("every gap between chunks", min=0.001)] = None
    tpot_limit_ms: Annotated[float | None, _limits("mean per token after the first", min=0.001)] = None
    e2e_limit_ms: Annotated[float | None, _limits("to the last token", min=0.001)] = None

    @property
    def limits(self) -> Limits:
        """The limits in seconds."""
        given = (self.ttft_limit_ms, self.itl_limit_ms, self.tpot_limit_ms, self.e2e_limit_ms)
        return Limits(*(None if limit_ms is None else limit_ms / 1e3 for limit_ms in given))


@dataclass(frozen=True, slots=True)
class SearchFlags:
    """Whether, and how, to search for the highest rate within the limits."""

    find_rate: Annotated[
        bool, _limits("search the highest Poisson rate at which requests meet the limits", "--find-rate")
    ] = False
    attain: Annotated[float, _limits("share of requests that must meet them", min=0.01, max=1.0)] = 0.99
    probe_s: Annotated[
        float, _limits("seconds of arrivals at each rate; what is open that long after them is cut", min=0.1)
    ] = 30.0
    precision: Annotated[float, _limits("of the rate found, relative", min=0.001, max=1.0)] = 0.05
