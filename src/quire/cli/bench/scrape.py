"""What a server tells of itself on /metrics while it is measured.

Known are vLLM's names, which Quire has too, and Quire's own.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USAGE, TAIL_WASTE = "vllm:kv_cache_usage_perc", "quire:kv_tail_waste_ratio"
PREFIX_QUERIES, PREFIX_HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
PREEMPTIONS = "vllm:num_preemptions_total"
QUEUE_S_SUM, QUEUE_S_COUNT = "vllm:request_queue_time_seconds_sum", "vllm:request_queue_time_seconds_count"

_RATIOS = {KV_USAGE, TAIL_WASTE}
_NAMES = {
    *(RUNNING, WAITING, PREFIX_QUERIES, PREFIX_HITS, PREEMPTIONS, QUEUE_S_SUM, QUEUE_S_COUNT),
    *_RATIOS,
}
_OLD_NAMES = {  # vLLM before 0.10
    "vllm:gpu_cache_usage_perc": KV_USAGE,
    "vllm:gpu_prefix_cache_queries_total": PREFIX_QUERIES,
    "vllm:gpu_prefix_cache_hits_total": PREFIX_HITS,
}
_PREFIXES = tuple(_NAMES | _OLD_NAMES.keys())
_POLL_S = 0.5
_TIMEOUT_S = 5.0
_FEWEST_SAMPLES = 4   # below this a mean over samples says little: the run was too short

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


class Scraper:
    """Polls /metrics; `samples` has one before the load, those during it, and one after it, or none at all."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = f"{url}/metrics"
        self.samples: list[Sample] = []

    async def __aenter__(self) -> "Scraper":
        await self._take()
        self._poll = asyncio.ensure_future(self._keep_polling())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._poll.cancel()
        with suppress(asyncio.CancelledError):
            await self._poll
        await self._take()

    async def wait_until_idle(self, limit_s: float) -> None:
        """Return when nothing runs and nothing waits, when the server does not tell, or after `limit_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while (sample := await self._fetch()) and sample.get(RUNNING, 0) + sample.get(WAITING, 0) > 0:
                    await asyncio.sleep(_POLL_S / 5)

    async def _keep_polling(self) -> None:
        while self.samples:  # a server that has no metrics at the start is not asked again
            await asyncio.sleep(_POLL_S)
            await self._take()

    async def _take(self) -> None:
        if sample := await self._fetch():
            self.samples.append(sample)

    async def _fetch(self) -> Sample:
        """Return a sample; an empty one when there is no such page or nothing on it that we know."""
        try:
            async with asyncio.timeout(_TIMEOUT_S), self._session.get(self._url) as response:
                return parse_metrics(await response.text()) if response.status == 200 else {}
        except (aiohttp.ClientError, OSError, ValueError):
            return {}


def server_use(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return what the samples say of the run between the first and the last; what they do not say is absent.

    Gauges are averaged over the samples during the run, and left out of a run too short to have some. Counters are the
    difference of the last and the first.
    """
    if len(samples) < 2:
        return {}
    during = samples[1:-1] if len(samples) >= _FEWEST_SAMPLES + 2 else []
    use: dict[str, Any] = {"num_samples": len(during)}
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
