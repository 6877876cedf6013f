"""Flags of `quire bench`, and the requests, schedule and limits made from them. Loads no HTTP client."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from quire.cli.flag_groups import JSON, SEVERAL, flag_field
from quire.core.checks import shown
from quire.core.config import Batching, MemoryPolicy
from quire.core.errors import ConfigError
from quire.core.options import option, same_option
from quire.engine.options import EngineOptions
from quire_lab.bench.diagnosis import LatencyLimits
from quire_lab.sim.datasets import DATA_FOLDER, DATASETS, is_dataset, named_file, workload
from quire_lab.sim.workloads import (
    ArrivalKind,
    Schedule,
    TraceSlice,
    WorkItem,
    is_trace,
    length_workload,
    poisson_arrivals,
    random_workload,
    token_id_workload,
    trace_arrivals,
    trace_workload,
)

_DEFAULT_NUM = 64
_LIMIT_NAMES = {"ttft": "ttft", "itl": "itl", "tpot": "tpot", "e2el": "e2e"}  # --goodput: vLLM's names, the flags'
_workload = partial(flag_field, panel="Workload")
_policy = partial(same_option, EngineOptions, kind="flag", panel="Policy")
_server = partial(flag_field, panel="Server under test")
_arrivals = partial(flag_field, panel="Arrivals")
_limits = partial(flag_field, panel="Latency limits")


@dataclass(frozen=True, slots=True)
class WorkloadFlags:
    """Requests of a run; all of them greedy, with a fixed number of output tokens."""

    workload: str = _workload(
        "random", "random, a data set (as `quire simulate` has), a JSON file of token ids, a CSV file of lengths, or a "
        "trace", metavar="random|NAME|FILE",
    )  # fmt: skip
    name: str | None = _workload(None, "which workload of a JSON file that holds several")
    num_prompts: int | None = _workload(
        None, "requests", min=1, show_default=f"{_DEFAULT_NUM}, or all of a file"
    )
    input_len: int = _workload(128, "prompt tokens of a random request", min=1)
    output_len: int = _workload(128, "output tokens of a random request", min=1)
    max_total_len: int = _workload(2048, "leave out rows of a CSV file or trace with more tokens in all", min=2)

    def build(self, vocab_size: int, seed: int) -> list[WorkItem]:
        """Return the requests. Raises ConfigError when the file or its name does not fit, or is not there."""
        if self.workload == "random":
            return random_workload(self._num_drawn, self.input_len, self.output_len, vocab_size, seed)
        path, limit = named_file(self.workload), self.max_total_len
        if path is None and is_dataset(self.workload):
            return workload(self.workload, self._num_drawn, seed=seed, vocab_size=vocab_size, max_total_len=limit)
        if path is not None and path.suffix == ".json":
            return token_id_workload(path, self.name, self.num_prompts)
        if path is not None and path.name.endswith((".csv", ".csv.gz")):
            return length_workload(path, self.num_prompts, limit, vocab_size, seed)
        if path is not None and is_trace(path):
            return trace_workload(path, TraceSlice(self.num_prompts, limit), vocab_size, seed)
        raise ConfigError(
            "workload must be random, or a .json, .csv, .csv.gz, .jsonl or .jsonl.gz file that is there, "
            f"or of the data sets {', '.join(DATASETS)}, got {self.workload!r}"
        )

    @property
    def _num_drawn(self) -> int:
        """Requests that are drawn where there is no file that ends."""
        return self.num_prompts or _DEFAULT_NUM


@dataclass(frozen=True, slots=True)
class ServedWorkloadFlags(WorkloadFlags):
    """The same for a server: how prompts are made, as its model is not known, and which part of a trace is taken."""

    vocab_size: int = _workload(512, "ids of random prompts are below; any model has these", min=1)
    seed: int = _workload(0, "of random prompts and arrivals", min=0)
    start_s: float = _workload(0.0, "where in a trace to begin", min=0.0)
    speed_up: float = _workload(1.0, "how many times faster than it was a trace is played", min=1e-6)

    def items(self) -> list[WorkItem]:
        """Return the requests; those of a trace with their times. Raises ConfigError when something does not fit."""
        path, num_prompts, dataset = named_file(self.workload), self.num_prompts, DATASETS.get(self.workload)
        if path is None and dataset is not None and dataset.rate is not None:
            path, num_prompts = DATA_FOLDER / dataset.file, self._num_drawn
        if path is not None and is_trace(path):
            part = TraceSlice(num_prompts, self.max_total_len, self.start_s, self.speed_up)
            return trace_workload(path, part, self.vocab_size, self.seed)
        if self.start_s or self.speed_up != 1.0:
            raise ConfigError(f"start-s and speed-up are for traces, which {self.workload!r} is not")
        return self.build(self.vocab_size, self.seed)


@dataclass(frozen=True, slots=True)
class PolicyFlags:
    """Baselines of paging and continuous batching."""

    memory_policy: MemoryPolicy = _policy("memory_policy")
    batching: Batching = _policy("batching")


@dataclass(frozen=True, slots=True)
class RunFlags:
    """Number of passes, and the file for the figures."""

    repeats: int = flag_field(3, "timed passes, after one that warms up and watches the cache", min=1)
    json: Annotated[Path | None, JSON] = None


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """Server under test, and the bounds on time and open requests."""

    url: str = _server("http://127.0.0.1:8000", "of an OpenAI-compatible server, without /v1")
    model_name: str | None = _server(None, "to ask for", show_default="the first of /v1/models")
    api_key: str | None = _server(None, "sent as a bearer token")
    request_timeout: float = _server(600.0, "seconds for a whole request", min=0.001)
    max_concurrency: int = _server(1024, "requests open at once; others wait, and their time counts", min=1)


@dataclass(frozen=True, slots=True)
class ArrivalFlags:
    """Arrival process of the requests."""

    arrivals: ArrivalKind | None = _arrivals(
        None,
        "trace: as in the trace; poisson: at random, --rate a second; burst: all at once; "
        "closed: --concurrency clients, each anew when answered",
        show_default="what fits the other flags, else trace for a trace and burst for the rest",
    )
    rate: float | None = _arrivals(None, "requests per second of poisson; where --find-rate begins", min=1e-6)
    burstiness: float = _arrivals(1.0, "gamma shape of poisson's gaps: below 1 burstier, above steadier", min=1e-3)
    concurrency: int | None = _arrivals(None, "clients of the closed loop", min=1)

    def schedule(self, items: list[WorkItem], max_open: int, seed: int) -> Schedule:
        """Return when the requests are due. Raises ConfigError for flags that contradict each other."""
        kind = self.arrivals or self._implied(items)
        self._check(kind)
        if kind == "closed":
            return Schedule(None, min(self.concurrency or 1, max_open))
        if kind == "poisson":
            assert self.rate is not None
            return Schedule(poisson_arrivals(len(items), self.rate, self.burstiness, seed), max_open)
        return Schedule(trace_arrivals(items) if kind == "trace" else [0.0] * len(items), max_open)

    def _implied(self, items: list[WorkItem]) -> ArrivalKind:
        if self.rate is not None:
            return "poisson"
        if self.concurrency is not None:
            return "closed"
        return "burst" if items[0].arrival_s is None else "trace"

    def _check(self, kind: ArrivalKind) -> None:
        for name, needing in (("rate", "poisson"), ("concurrency", "closed")):
            value = getattr(self, name)
            if (value is not None) != (kind == needing):
                raise ConfigError(
                    f"{name} is for arrivals {needing}, which needs it; arrivals are {kind}, {name} is {value}"
                )
        if self.burstiness != 1.0 and kind != "poisson":
            raise ConfigError(f"burstiness is for arrivals poisson; arrivals are {kind}")


def _named_limits(pairs: list[str]) -> tuple[tuple[str, float], ...]:
    """Return the limits of `--goodput`: names and milliseconds. ConfigError names the pair that is none."""
    limits: dict[str, float] = {}
    for pair in " ".join(pairs).split():                        # a file may have several in one text
        name, _, text = pair.partition(":")
        if name not in _LIMIT_NAMES:
            raise ConfigError(f"goodput must be pairs of {', '.join(_LIMIT_NAMES)} and milliseconds, got {shown(pair)}")
        if name in limits:
            raise ConfigError(f"goodput names {name} twice, the second time in {shown(pair)}")
        try:
            limits[name] = float(text)
        except ValueError:
            limits[name] = math.nan
        if not 0 <= limits[name] < math.inf:
            raise ConfigError(f"goodput {name} must be milliseconds of at least 0, got {shown(pair)}")
    return tuple(limits.items())


@dataclass(frozen=True, slots=True)
class LimitFlags:
    """Latency limits that a request meets to count as good."""

    goodput: tuple[tuple[str, float], ...] = option(
        (), f"limits in milliseconds by name, as vLLM has them ({', '.join(_LIMIT_NAMES)}); the flags below are other "
        "names of the same", panel="Latency limits", metavar=f"NAME:MS{SEVERAL}", parse=_named_limits,
    )  # fmt: skip
    ttft_limit_ms: float | None = _limits(None, "ttft: to the first token", min=0.001)
    itl_limit_ms: float | None = _limits(None, "itl: every gap between chunks", min=0.001)
    tpot_limit_ms: float | None = _limits(None, "tpot: mean per token after the first", min=0.001)
    e2e_limit_ms: float | None = _limits(None, "e2el: to the last token", min=0.001)

    @property
    def limits(self) -> LatencyLimits:
        """The limits in seconds. Raises ConfigError for one that is given in both ways."""
        named_ms, limits_s = dict(self.goodput), dict[str, float | None]()
        for name, flag in _LIMIT_NAMES.items():
            limit_ms = getattr(self, f"{flag}_limit_ms")
            if limit_ms is not None and name in named_ms:
                raise ConfigError(f"goodput has {name}:{named_ms[name]:g}, {flag}-limit-ms is {limit_ms:g}; give one")
            limit_ms = named_ms.get(name, limit_ms)
            limits_s[f"{flag}_s"] = None if limit_ms is None else limit_ms / 1e3
        return LatencyLimits(**limits_s)


@dataclass(frozen=True, slots=True)
class RateFlags:
    """Search for the highest rate within the limits."""

    find_rate: bool = _limits(False, "search the highest Poisson rate at which requests meet the limits")
    attain: float = _limits(0.9, "share of requests that must meet them", min=0.01, max=1.0)
    precision: float = _limits(0.05, "of the rate found, relative", min=0.001, max=1.0)

    def check(self, limits: LatencyLimits) -> None:
        """Raise ConfigError for a search without a limit."""
        if self.find_rate and not limits.given:
            raise ConfigError("find-rate needs a limit: goodput, or one of the flags that end with -limit-ms")


@dataclass(frozen=True, slots=True)
class SearchFlags(RateFlags):
    """The same for a server, which takes its time."""

    probe_s: float = _limits(
        30.0, "seconds of arrivals at each rate; what is open that long after them is cut", min=0.1
    )
