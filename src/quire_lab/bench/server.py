"""Server under test: loads, samples of its /metrics beside each, and Ctrl-C, which keeps what was measured.

Of its metrics vLLM's names are known, which Quire has too, and Quire's own.
"""

import asyncio
import math
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from quire_lab.bench.bench_flags import ServerFlags
from quire_lab.bench.http_load import HttpLoad, LoadRun, SentRequest, Target, first_model, open_session
from quire_lab.bench.report import Record
from quire_lab.sim.workloads import Schedule, WorkItem

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USAGE, TAIL_WASTE = "vllm:kv_cache_usage_perc", "quire:kv_tail_waste_ratio"
PREFIX_QUERIES, PREFIX_HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
PREEMPTIONS = "vllm:num_preemptions_total"
QUEUE_S_SUM, QUEUE_S_COUNT = "vllm:request_queue_time_seconds_sum", "vllm:request_queue_time_seconds_count"

_RATIOS = {KV_USAGE, TAIL_WASTE}
_NAMES = _RATIOS | {RUNNING, WAITING, PREFIX_QUERIES, PREFIX_HITS, PREEMPTIONS, QUEUE_S_SUM, QUEUE_S_COUNT}
_OLD_NAMES = {  # vLLM before 0.10
    "vllm:gpu_cache_usage_perc": KV_USAGE,
    "vllm:gpu_prefix_cache_queries_total": PREFIX_QUERIES,
    "vllm:gpu_prefix_cache_hits_total": PREFIX_HITS,
}
_PREFIXES = tuple(_NAMES | _OLD_NAMES.keys())
_POLL_S = 0.5
_TIMEOUT_S = 5.0
_FEWEST_SAMPLES = 4  # below this a mean over samples says little: the run was too short
_DRAIN_S = 10.0  # after a load, until what was cut has left the server

Sample = dict[str, float]


def parse_metrics(page: str) -> Sample:
    """Return what we know by name; several engines' counts are summed and their ratios averaged. NaN is left out."""
    lines = [line for line in page.splitlines() if line.startswith(_PREFIXES)]  # the parser is slow, the page long
    values: dict[str, list[float]] = defaultdict(list)
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for name, _, value, *_ in family.samples:
            known = _OLD_NAMES.get(name, name)
            if known in _NAMES and math.isfinite(value):
                values[known].append(value)
    return {name: sum(found) / (len(found) if name in _RATIOS else 1) for name, found in values.items()}


@asynccontextmanager
async def scraped(session: aiohttp.ClientSession, url: str) -> AsyncIterator[list[Sample]]:
    """Yield samples: one before the load within, those during it, and at its end one after it; or none at all."""
    samples: list[Sample] = []

    async def take() -> None:
        if sample := await _fetch(session, url):
            samples.append(sample)

    async def keep_polling() -> None:
        while samples:  # a server that has no metrics at the start is not asked again
            await asyncio.sleep(_POLL_S)
            await take()

    await take()
    poll = asyncio.ensure_future(keep_polling())
    try:
        yield samples
    finally:
        poll.cancel()
        with suppress(asyncio.CancelledError):
            await poll
        await take()


async def wait_until_idle(session: aiohttp.ClientSession, url: str, limit_s: float) -> None:
    """Return when nothing runs and nothing waits, when the server does not report it, or after `limit_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while (sample := await _fetch(session, url)) and sample.get(RUNNING, 0) + sample.get(WAITING, 0) > 0:
                await asyncio.sleep(_POLL_S / 5)


async def _fetch(session: aiohttp.ClientSession, url: str) -> Sample:
    """Return a sample; an empty one when there is no such page or nothing on it that we know."""
    try:
        async with asyncio.timeout(_TIMEOUT_S), session.get(f"{url}/metrics") as response:
            return parse_metrics(await response.text()) if response.status == 200 else {}
    except (aiohttp.ClientError, OSError, ValueError):
        return {}


def server_use(samples: Sequence[Sample]) -> Record:
    """Return what the samples say of the run between the first and the last; what they do not say is absent.

    Gauges are averaged over the samples during the run, and left out of a run too short to have some. Counters are the
    difference of the last and the first.
    """
    if len(samples) < 2:
        return {}
    during = samples[1:-1] if len(samples) >= _FEWEST_SAMPLES + 2 else []
    use: Record = {"num_samples": len(during)}
    for title, name in (("running", RUNNING), ("waiting", WAITING), ("kv_usage", KV_USAGE), ("tail_waste", TAIL_WASTE)):
        values = [sample[name] for sample in during if name in sample]
        if values:
            use |= {f"mean_{title}": float(np.mean(values)), f"peak_{title}": max(values)}
    grown = {name: samples[-1][name] - samples[0].get(name, 0.0) for name in samples[-1]}
    if PREEMPTIONS in grown:
        use["num_preemptions"] = int(grown[PREEMPTIONS])
    for title, part, whole in (
        ("prefix_hit_rate", PREFIX_HITS, PREFIX_QUERIES),
        ("mean_queue_s", QUEUE_S_SUM, QUEUE_S_COUNT),
    ):
        if grown.get(whole, 0.0) > 0:
            use[title] = grown.get(part, 0.0) / grown[whole]
    return use


class MeasuredLoad(NamedTuple):
    """One load: what the client saw, and what the server said of itself."""

    run: LoadRun
    use: Record


class ServerUnderTest:
    """`interrupted` is set by Ctrl-C and ends the load that runs; start none after it."""

    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self.target = target
        self.interrupted = asyncio.Event()
        self._session = session

    async def measure(
        self,
        items: list[WorkItem],
        schedule: Schedule,
        *,
        is_enough: Callable[[SentRequest], bool] = lambda _: False,
        limit_s: float | None = None,
    ) -> MeasuredLoad:
        """Run a load to its end, or until a request that has ended `is_enough` or `limit_s` is over."""
        load = HttpLoad(self._session, self.target, items, schedule, is_enough)
        async with scraped(self._session, self.target.url) as samples:
            run = await load.run(self.interrupted, limit_s=limit_s)
        return MeasuredLoad(run, server_use(samples))

    async def drain(self) -> None:
        """Wait a bounded time until the server has nothing left of earlier loads."""
        await wait_until_idle(self._session, self.target.url, _DRAIN_S)


@asynccontextmanager
async def server_under_test(flags: ServerFlags) -> AsyncIterator[ServerUnderTest]:
    """Yield the server of the flags. The first Ctrl-C interrupts it; a second one ends the command at once.

    Raises ServerUnusableError when there is none.
    """
    loop = asyncio.get_running_loop()
    async with open_session(flags.api_key) as session:
        url = flags.url.rstrip("/").removesuffix("/v1")
        name = flags.model_name or await first_model(session, url)
        server = ServerUnderTest(session, Target(url, name, flags.request_timeout))

        def interrupt() -> None:
            server.interrupted.set()
            loop.remove_signal_handler(signal.SIGINT)

        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            yield server
        finally:
            loop.remove_signal_handler(signal.SIGINT)
