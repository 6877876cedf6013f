"""What a server tells of itself, with vLLM's names of now and before, and with none."""

import asyncio
from collections.abc import Callable

import pytest
from aiohttp.test_utils import TestServer

from quire_lab.bench.http_load import open_session
from quire_lab.bench.server import (
    KV_USAGE,
    PREEMPTIONS,
    PREFIX_HITS,
    PREFIX_QUERIES,
    QUEUE_S_COUNT,
    QUEUE_S_SUM,
    RUNNING,
    TAIL_WASTE,
    WAITING,
    Sample,
    parse_metrics,
    scraped,
    server_use,
    wait_until_idle,
)
from support.completions_server import CompletionsServer

PAGE = """# HELP vllm:num_requests_running Requests in a step.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="a, \\"b\\"",engine="0"} 3.0
vllm:num_requests_running{model_name="a, \\"b\\"",engine="1"} 4.0
vllm:num_requests_waiting 2
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.7
vllm:num_preemptions_total 5.0
vllm:request_queue_time_seconds_bucket{le="0.3"} 1.0
vllm:request_queue_time_seconds_sum 1.5
vllm:request_queue_time_seconds_count 3.0
quire:kv_tail_waste_ratio NaN
something:else 1
"""


def test_page_is_read_by_name_with_engines_together() -> None:
    assert parse_metrics(PAGE) == {
        RUNNING: 7.0, WAITING: 2.0, KV_USAGE: 0.6, PREEMPTIONS: 5.0, QUEUE_S_SUM: 1.5, QUEUE_S_COUNT: 3.0
    }


def test_older_names_are_known() -> None:
    page = "vllm:gpu_cache_usage_perc 0.25\nvllm:gpu_prefix_cache_hits_total 8\nvllm:gpu_prefix_cache_queries_total 9\n"
    assert parse_metrics(page) == {KV_USAGE: 0.25, PREFIX_HITS: 8.0, PREFIX_QUERIES: 9.0}


@pytest.mark.parametrize("page", ["", "<html>no metrics</html>", "other_metric 1\n"])
def test_page_without_known_names_says_nothing(page: str) -> None:
    assert parse_metrics(page) == {}


def test_gauges_are_averaged_over_the_run_and_counters_compared() -> None:
    before: Sample = {PREEMPTIONS: 2.0, PREFIX_QUERIES: 100.0, PREFIX_HITS: 50.0, RUNNING: 0.0}
    during: list[Sample] = [{RUNNING: float(n), KV_USAGE: n / 10, TAIL_WASTE: 0.1} for n in (2, 4, 6, 8)]
    after: Sample = {
        PREEMPTIONS: 5.0, PREFIX_QUERIES: 200.0, PREFIX_HITS: 75.0, RUNNING: 0.0, QUEUE_S_SUM: 6.0, QUEUE_S_COUNT: 4.0
    }
    assert server_use([before, *during, after]) == {
        "num_samples": 4,
        "mean_running": 5.0,
        "peak_running": 8.0,
        "mean_kv_usage": 0.5,
        "peak_kv_usage": 0.8,
        "mean_tail_waste": 0.1,
        "peak_tail_waste": 0.1,
        "num_preemptions": 3,
        "prefix_hit_rate": 0.25,
        "mean_queue_s": 1.5,
    }


def test_short_run_has_counters_and_no_means() -> None:
    samples: list[Sample] = [{PREEMPTIONS: 0.0}, {RUNNING: 9.0}, {PREEMPTIONS: 1.0}]
    assert server_use(samples) == {"num_samples": 0, "num_preemptions": 1}


def test_server_without_metrics_has_no_use() -> None:
    assert server_use([]) == {}


def url_of(server: TestServer) -> str:
    return str(server.make_url("/")).rstrip("/")


def samples_of(metrics_page: Callable[[], str] | None) -> list[Sample]:
    """Return the samples of a load that ends at once."""

    async def scrape() -> list[Sample]:
        app = CompletionsServer(metrics_page=metrics_page).app
        async with TestServer(app) as server, open_session(None) as session:
            async with scraped(session, url_of(server)) as samples:
                pass
            return samples

    return asyncio.run(scrape())


def test_scraper_looks_before_and_after_the_load() -> None:
    counts = iter((3.0, 8.0))
    assert samples_of(lambda: f"{PREEMPTIONS} {next(counts)}\n") == [{PREEMPTIONS: 3.0}, {PREEMPTIONS: 8.0}]


@pytest.mark.parametrize("page", [None, lambda: "no metrics"], ids=["404", "another page"])
def test_scraper_of_a_server_without_metrics_has_nothing(page: Callable[[], str] | None) -> None:
    assert samples_of(page) == []


def test_drained_server_is_one_with_nothing_running_and_nothing_waiting() -> None:
    states = iter([(2, 1), (1, 0), (0, 1), (0, 0)])

    def page() -> str:
        running, waiting = next(states)
        return f"{RUNNING} {running}\n{WAITING} {waiting}\n"

    async def wait() -> None:
        async with TestServer(CompletionsServer(metrics_page=page).app) as server, open_session(None) as session:
            await wait_until_idle(session, url_of(server), 60.0)

    asyncio.run(wait())
    assert list(states) == []
