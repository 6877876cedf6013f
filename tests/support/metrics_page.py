"""What /metrics of a server says."""

from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from support.clients import KEY, LIMIT_S
from support.server import wait_until


def read_metrics(url: str) -> Mapping[str, float]:
    """Return the samples of the page by name and labels, as in `quire:kv_blocks{state="used"}`.

    model_name is left out, and engine "0".
    """
    samples = {}
    page = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=LIMIT_S).text
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            own = {key: value for key, value in sample.labels.items() if key != "model_name"}
            labels = ",".join(f'{key}="{value}"' for key, value in own.items() if (key, value) != ("engine", "0"))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def num_restarts(url: str) -> float:
    """Return how many engines, of all that the server has, have taken the place of a dead one and are ready."""
    name = "quire:engine_restarts_total"
    return sum(value for key, value in read_metrics(url).items() if key.startswith(name))


def is_idle(url: str) -> bool:
    """Whether no request waits or runs, and none has left a block behind."""
    return _shows_none(read_metrics(url))


def wait_until_idle(url: str) -> Mapping[str, float]:
    """Wait until all requests are gone; return the samples that say so."""
    seen = dict[str, float]()

    def is_seen() -> bool:
        seen.update(read_metrics(url))
        return _shows_none(seen)

    wait_until(is_seen)
    return seen


def _shows_none(samples: Mapping[str, float]) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", 'quire:kv_blocks{state="used"}')
    return all(samples[name] == 0 for name in names)
