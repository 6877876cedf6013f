"""Readings of a server's metrics page, and what has changed between two of them: rates, quantiles, shares.

The names are those of docs/metrics.md, most of which are vLLM's: of a vLLM server all is shown but what only Quire has.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from quire.core.errors import ConfigError, EngineError

MAX_PAGE_BYTES = 16 << 20
TIMEOUT_S = 5.0
_RUNNING = "vllm:num_requests_running"

Samples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]  # metric name -> labels and values


class UnreadableServerError(EngineError):
    """A server without an answer, or with one that is no metrics page."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A metrics page. `time_s`: when it was read, of the monotonic clock."""

    time_s: float
    samples: Samples

    def by(self, name: str, label: str, engine: str | None = None) -> dict[str, float]:
        """Return a metric by the values of a label, in the page's order; the others are added up."""
        found = dict[str, float]()
        for labels, value in self.samples.get(name, ()):
            if engine is None or labels.get("engine") == engine:
                key = labels.get(label, "")
                found[key] = found.get(key, 0.0) + value
        return found

    def total(self, name: str, engine: str | None = None) -> float:
        """Return the sum of a metric over its labels; 0 if the page does not have it."""
        return sum(self.by(name, "", engine).values())

    @property
    def engines(self) -> list[str]:
        """The engines behind the server, by number."""
        return sorted(self.by(_RUNNING, "engine"), key=lambda name: (len(name), name))

    @property
    def models(self) -> list[str]:
        """The names of the models."""
        return [*self.by(_RUNNING, "model_name")]


def read(url: str, api_key: str | None = None) -> Reading:
    """Read a server's page. UnreadableServerError without one, ConfigError for an address or a key that is none."""
    place = f"{server_root(url, api_key)}/metrics"
    return Reading(time.monotonic(), samples_of(get_page(place, api_key), place))


def server_root(url: str, api_key: str | None = None) -> str:
    """Return the address below which a server has its pages. ConfigError for an address or a key that is none."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or any(each in url for each in "@?#"):
        raise ConfigError(f"url must look like http://HOST:PORT, got {url!r}")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("api_key must be printable ASCII")
    return url.rstrip("/").removesuffix("/v1")


def get_page(url: str, api_key: str | None) -> str:
    """Return what a server has at a URL. UnreadableServerError for another status than 200, or no answer."""
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", parts.path, headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"})
        response = connection.getresponse()
        body = response.read(MAX_PAGE_BYTES + 1)
    except (OSError, HTTPException) as error:
        raise UnreadableServerError(f"{url}: {' '.join(str(error).split()) or type(error).__name__}") from error
    finally:
        connection.close()
    if response.status != 200:
        needs_key = "; it wants an API key (--api-key)" if response.status in (401, 403) else ""
        raise UnreadableServerError(f"{url}: the server answered {response.status}{needs_key}")
    if len(body) > MAX_PAGE_BYTES:
        raise UnreadableServerError(f"{url}: more than {MAX_PAGE_BYTES} bytes")
    return body.decode(errors="replace")


def samples_of(page: str, place: str) -> Samples:
    """Return the samples of a page. UnreadableServerError if it is none of a model server; `place` is for its text."""
    samples = dict[str, list[tuple[Mapping[str, str], float]]]()
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise UnreadableServerError(f"{place}: no metrics page: {error!s:.100}") from error
    if _RUNNING not in samples:
        raise UnreadableServerError(f"{place}: no page of Quire or vLLM, as it has no {_RUNNING}")
    return samples


class Quantiles(NamedTuple):
    """Quantiles of the values between two readings, in seconds."""

    p50: float
    p99: float


class View(msgspec.Struct, frozen=True):
    """Figures of an engine, or of all, between two readings. None: no event in between has one."""

    engine: str  # its number; "all"
    running: int  # requests
    waiting: dict[str, int]  # requests by reason
    swapped: int  # requests
    tokens_in: float | None  # prompt tokens per second
    tokens_out: float | None  # per second
    finished: float | None  # choices per second
    preempted: float | None  # requests per second
    ttft_s: Quantiles | None  # arrival to the first token
    gap_s: Quantiles | None  # between two tokens of a choice
    step_s: Quantiles | None
    hit_rate: float | None  # share of the prompt tokens that were looked up in the prefix cache
    on_target: float | None  # share of the requests with targets of time that met all
    kv_usage: float  # share of the blocks in use
    kv_blocks: dict[str, int]  # state (used, cached, free) -> blocks
    kv_pinned: int
    kv_owners: dict[str, int]  # blocks in use, by API key and cache salt


class Snapshot(msgspec.Struct, frozen=True):
    """A server, from two readings."""

    url: str
    models: list[str]
    up_s: float | None  # since the server's process began
    seconds: float | None  # between the two readings; None: there is one alone
    refused: dict[str, float] | None  # calls per second by reason
    all: View
    engines: list[View]


def snapshot(url: str, first: Reading | None, last: Reading) -> Snapshot:
    """Return what a server did between two readings. `first` None: only what holds now."""
    change = _Change(first, last)
    started_s = last.total("process_start_time_seconds")
    return Snapshot(
        url=url,
        models=last.models,
        up_s=time.time() - started_s if started_s else None,
        seconds=change.seconds,
        refused=change.rates("quire:requests_refused_total", "reason"),
        all=_view(change, None),
        engines=[_view(change, engine) for engine in last.engines],
    )


def has_restarted(first: Reading, last: Reading) -> bool:
    """Return whether a server, or an engine, has begun to count anew between two readings."""
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = {(name, engine): first.total(name, engine) for name in names for engine in first.engines}
    return last.engines != first.engines or any(last.total(*key) < value for key, value in before.items())


def _view(change: "_Change", engine: str | None) -> View:
    last = change.last
    return View(
        engine="all" if engine is None else engine,
        running=round(last.total(_RUNNING, engine)),
        waiting=_whole(last.by("vllm:num_requests_waiting_by_reason", "reason", engine))
        or {"": round(last.total("vllm:num_requests_waiting", engine))},
        swapped=round(last.total("quire:num_requests_swapped", engine)),
        tokens_in=change.rate("vllm:prompt_tokens_total", engine),
        tokens_out=change.rate("vllm:generation_tokens_total", engine),
        finished=change.rate("vllm:request_success_total", engine),
        preempted=change.rate("vllm:num_preemptions_total", engine),
        ttft_s=change.quantiles("vllm:time_to_first_token_seconds", engine),
        gap_s=change.quantiles("vllm:inter_token_latency_seconds", engine),
        step_s=change.quantiles("quire:step_seconds", engine),
        hit_rate=change.share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", engine),
        on_target=change.share_of_targets(engine),
        kv_usage=last.total("vllm:kv_cache_usage_perc", engine) / (len(last.engines) if engine is None else 1),
        kv_blocks=_whole(last.by("quire:kv_blocks", "state", engine)),
        kv_pinned=round(last.total("quire:kv_blocks_pinned", engine)),
        kv_owners=_whole(last.by("quire:kv_blocks_by_owner", "owner", engine)),
    )


def _whole(numbers: Mapping[str, float]) -> dict[str, int]:
    return {name: round(number) for name, number in numbers.items()}


class _Change(NamedTuple):
    """Two readings of one server."""

    first: Reading | None
    last: Reading

    @property
    def seconds(self) -> float | None:
        return None if self.first is None else self.last.time_s - self.first.time_s

    def growth(self, name: str, label: str, engine: str | None = None) -> dict[str, float]:
        """Return by how much a counter has grown, by the values of a label."""
        before = {} if self.first is None else self.first.by(name, label, engine)
        return {key: value - before.get(key, 0.0) for key, value in self.last.by(name, label, engine).items()}

    def rate(self, name: str, engine: str | None) -> float | None:
        rates = self.rates(name, "", engine)
        return None if rates is None else sum(rates.values())

    def rates(self, name: str, label: str, engine: str | None = None) -> dict[str, float] | None:
        """Return what a counter has grown by per second, by the values of a label."""
        if not self.seconds:
            return None
        return {key: grown / self.seconds for key, grown in self.growth(name, label, engine).items()}

    def share(self, part: str, whole: str, engine: str | None) -> float | None:
        grown = sum(self.growth(whole, "", engine).values())
        return sum(self.growth(part, "", engine).values()) / grown if self.seconds and grown else None

    def share_of_targets(self, engine: str | None) -> float | None:
        met, asked = (
            self.growth(f"quire:requests_{name}_target_total", "target", engine).get("all", 0.0)
            for name in ("on", "with")
        )
        return met / asked if self.seconds and asked else None

    def quantiles(self, name: str, engine: str | None) -> Quantiles | None:
        if not self.seconds:
            return None
        counts = {float(bound): count for bound, count in self.growth(f"{name}_bucket", "le", engine).items()}
        buckets = sorted(counts.items())
        return Quantiles(quantile(buckets, 0.5), quantile(buckets, 0.99)) if buckets and buckets[-1][1] > 0 else None


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float:
    """Return a quantile of a histogram, by Prometheus' rule: values are spread evenly in their bucket.

    buckets: upper bounds in ascending order, the last infinite, each with the values up to it. Above the last finite
    bound, that bound.
    """
    wanted, below, lower = share * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted and count > below:
            return lower if math.isinf(bound) else lower + (bound - lower) * (wanted - below) / (count - below)
        below, lower = count, bound
    return lower
