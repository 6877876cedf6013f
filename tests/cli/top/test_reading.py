"""Readings of metrics pages: what changes between two, and answers that are no page."""

from collections.abc import Mapping

import pytest

from quire.cli.top.reading import (
    Quantiles,
    Reading,
    UnreadableServerError,
    has_restarted,
    quantile,
    read,
    samples_of,
    snapshot,
)
from quire.core.errors import ConfigError
from support.served_page import serving

Numbers = Mapping[str, float]  # samples, with their labels


def reading(numbers: Numbers, at_s: float = 0.0) -> Reading:
    page = "".join(f"{name} {value}\n" for name, value in numbers.items())
    return Reading(at_s, samples_of(page, "here"))


def engine(number: int, running: int = 0, tokens: int = 0) -> dict[str, float]:
    labels = f'engine="{number}",model_name="m"'
    return {
        f"vllm:num_requests_running{{{labels}}}": running,
        f"vllm:generation_tokens_total{{{labels}}}": tokens,
    }


def test_rates_are_growth_by_time_of_each_engine_and_of_all() -> None:
    first = reading(engine(0, tokens=100) | engine(1, tokens=50), 3.0)
    last = reading(engine(0, 2, 300) | engine(1, 1, 50), 5.0)
    shown = snapshot("u", first, last)
    assert (shown.seconds, shown.models, shown.all.running, shown.all.tokens_out) == (2.0, ["m"], 3, 100.0)
    assert [(each.engine, each.running, each.tokens_out) for each in shown.engines] == [("0", 2, 100.0), ("1", 1, 0.0)]
    assert shown.all.tokens_in == 0.0


def test_one_reading_has_gauges_and_no_rates() -> None:
    shown = snapshot("u", None, reading(engine(0, 2, 300)))
    assert (shown.seconds, shown.refused, shown.all.running, shown.all.tokens_out) == (None, None, 2, None)
    assert (shown.all.ttft_s, shown.all.hit_rate, shown.up_s) == (None, None, None)


def test_quantiles_and_shares_are_of_what_happened_between() -> None:
    def numbers(short: int, long: int, hits: int) -> Numbers:
        name = 'vllm:inter_token_latency_seconds_bucket{engine="0",le='
        return engine(0) | {
            f'{name}"0.01"}}': short, f'{name}"0.1"}}': short + long, f'{name}"+Inf"}}': short + long,
            'vllm:prefix_cache_queries_total{engine="0"}': 2 * hits,
            'vllm:prefix_cache_hits_total{engine="0"}': hits,
            'quire:requests_with_target_total{engine="0",target="all"}': hits,
            'quire:requests_with_target_total{engine="0",target="ttft"}': 9 * hits,
            'quire:requests_on_target_total{engine="0",target="all"}': hits // 4,
        }  # fmt: skip

    shown = snapshot("u", reading(numbers(100, 100, 0)), reading(numbers(110, 190, 40), 1.0)).all
    assert shown.gap_s == pytest.approx(Quantiles(0.05, 0.099))
    assert (shown.hit_rate, shown.on_target) == (0.5, 0.25)
    nothing = snapshot("u", reading(numbers(1, 1, 1)), reading(numbers(1, 1, 1), 1.0)).all
    assert (nothing.gap_s, nothing.hit_rate, nothing.on_target) == (None, None, None)


@pytest.mark.parametrize(
    ("counts", "share", "wanted"),
    [
        ((0, 4, 4), 0.5, 2.0),  # within the second bucket, from 1 to 3
        ((4, 4, 4), 0.5, 0.5),
        ((0, 0, 4), 0.5, 3.0),  # above the last bound
        ((2, 2, 4), 0.5, 1.0),
        ((1, 2, 2), 0.99, 1 + 2 * 0.98),
    ],
)
def test_quantile_is_that_of_prometheus(counts: tuple[int, ...], share: float, wanted: float) -> None:
    assert quantile(list(zip((1.0, 3.0, float("inf")), counts, strict=True)), share) == pytest.approx(wanted)


def test_counters_that_begin_anew_are_seen() -> None:
    before = reading(engine(0, tokens=100) | engine(1, tokens=50))
    assert not has_restarted(before, reading(engine(0, tokens=100) | engine(1, tokens=51)))
    assert has_restarted(before, reading(engine(0, tokens=100) | engine(1, tokens=2)))
    assert has_restarted(before, reading(engine(0, tokens=100)))


def test_engines_are_in_the_order_of_their_numbers() -> None:
    assert reading(engine(10) | engine(9)).engines == ["9", "10"]


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://a", "http://", "http://a@b", "http://a:0", "http://a:x", "http://a?b"]
)
def test_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url must look like http://HOST:PORT, got "):
        read(url)


def test_key_that_no_header_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="api_key must be printable ASCII"):
        read("http://localhost:1", "a\r\nb")


def test_server_that_is_not_there_is_named() -> None:
    with pytest.raises(UnreadableServerError, match=r"http://127\.0\.0\.1:1/metrics: .*refused"):
        read("http://127.0.0.1:1/v1/")


@pytest.mark.parametrize(
    ("status", "page", "message"),
    [
        (401, "", "answered 401; it wants an API key"),
        (500, "", "answered 500$"),
        (200, "<html>", "no metrics page|no page of Quire or vLLM"),
        (200, "a{ 3\n", "no metrics page: "),
        (200, "up 1\n", "no page of Quire or vLLM, as it has no vllm:num_requests_running"),
        (200, "a" * (17 << 20), "more than 16777216 bytes"),
    ],
)
def test_answer_that_is_no_page_is_told(status: int, page: str, message: str) -> None:
    with serving(page, status) as url, pytest.raises(UnreadableServerError, match=f"{url}/metrics: .*({message})"):
        read(url)


def test_page_is_read_with_the_key() -> None:
    with serving("vllm:num_requests_running 2\n", api_key="secret") as url:
        assert read(url + "/v1", "secret").total("vllm:num_requests_running") == 2
        with pytest.raises(UnreadableServerError, match="401"):
            read(url)
