"""MeasuredPool: how long blocks are kept, how long unused, and the gaps between their uses, by the times of steps."""

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.cache.block_pool import CachedBlocks
from quire.cache.measured_pool import MeasuredPool
from quire.core.errors import ConfigError
from quire.engine.metrics.page import Counter, Histogram
from quire.engine.options import EngineOptions
from support.scheduling import Harness


def run_at(harness: Harness, now_s: float, prompt: list[int]) -> None:
    harness.now_s = now_s
    harness.add(prompt, max_tokens=1, ignore_eos=True)
    harness.run()


def test_lives_of_blocks_are_told_when_they_are_evicted() -> None:
    harness = Harness(8, caching=True, measured_share=1.0)
    pool = harness.scheduler.measured
    assert pool is not None
    common = [*range(100, 109)]                       # two blocks of four, and the one in which it ends
    for now_s in (0.0, 10.0, 25.0):
        run_at(harness, now_s, common)
    assert pool.lives == []
    run_at(harness, 40.0, [*range(200, 229)])
    lives = sorted(pool.lives)
    assert [(life.lifetime_s, life.idle_s) for life in lives if life.reuse_gaps_s] == [(40.0, 15.0)] * 2
    assert all(life.reuse_gaps_s in ([], [15.0]) for life in lives)
    assert harness.cache.stats().evicted_blocks == len(lives)


def test_latest_uses_alone_are_kept() -> None:
    harness = Harness(8, caching=True, measured_share=1.0)
    for now_s in (0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0):
        run_at(harness, now_s, [*range(100, 109)])
    run_at(harness, 40.0, [*range(200, 229)])
    pool = harness.scheduler.measured
    assert pool is not None
    assert {tuple(life.reuse_gaps_s) for life in pool.lives if life.reuse_gaps_s} == {(4.0, 5.0, 6.0)}


@pytest.mark.parametrize("share", [0.01, 0.25, 1.0])
def test_share_of_the_allocations_is_measured(share: float) -> None:
    pool = MeasuredPool(10_000, CachedBlocks(), share)
    for _ in range(100):
        pool.allocate(100)
    assert len(pool._uses) == pytest.approx(10_000 * share, abs=3)


def test_plain_pools_measure_nothing() -> None:
    assert Harness(8, caching=True).scheduler.measured is None


def test_metrics_have_what_an_engine_has_measured(demo_model: Path) -> None:
    with LLM(
        str(demo_model), num_kv_blocks=12, max_model_len=160, kv_cache_metrics=True, kv_cache_metrics_sample=1.0
    ) as llm:
        for first in (1, 1, 1, 200, 1):
            prompt = {"prompt_token_ids": [*range(first, first + 120)]}
            llm.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        found = {each.name: each for each in llm.get_metrics()}
    evicted, lifetimes = found["quire:kv_blocks_evicted"], found["vllm:kv_block_lifetime_seconds"]
    gaps = found["vllm:kv_block_reuse_gap_seconds"]
    assert isinstance(evicted, Counter)
    assert isinstance(lifetimes, Histogram)
    assert isinstance(gaps, Histogram)
    assert lifetimes.count == evicted.value > 0
    assert gaps.count > 0


@pytest.mark.parametrize("share", [0.0, 1.5, -1.0])
def test_share_is_bounded(share: float) -> None:
    with pytest.raises(ConfigError, match="kv_cache_metrics_sample must be"):
        EngineOptions(kv_cache_metrics_sample=share)
