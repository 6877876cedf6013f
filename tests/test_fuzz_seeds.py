"""Seeds of the long random tests: fresh, or those of a failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import fuzz_seeds
from support.fuzz_seeds import first_seed, fuzz

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _new_process() -> None:
    first_seed.cache_clear()


def test_each_process_draws_its_own_seed_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_FUZZ_SEED", raising=False)
    first = first_seed()
    assert first_seed() == first
    first_seed.cache_clear()
    assert first_seed() != first, "once in 2^32 runs they are the same"


@pytest.mark.parametrize("num_skipped", [0, 100])
def test_failure_tells_how_to_replay_it(monkeypatch: pytest.MonkeyPatch, num_skipped: int) -> None:
    monkeypatch.setenv("QUIRE_FUZZ_SEED", "7")
    monkeypatch.setenv("QUIRE_FUZZ_STEPS", "1500")
    seeds = list[int]()

    def run(seed: int) -> None:
        seeds.append(seed)
        assert seed < 9 + num_skipped

    with pytest.raises(AssertionError) as failure:
        fuzz(run, 10**6, num_skipped)
    assert seeds == [7 + num_skipped, 8 + num_skipped, 9 + num_skipped]
    assert failure.value.__notes__ == [f"replay with QUIRE_FUZZ_SEED=9 QUIRE_FUZZ_STEPS={fuzz_seeds.STEPS_PER_RUN}"]


@pytest.mark.parametrize(("chosen", "is_told"), [("fuzz", True), ("not fuzz and not matrix", False)])
def test_seed_is_told_at_the_start_of_a_long_run(chosen: str, is_told: bool) -> None:
    """Another process, for which nothing is collected."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", chosen, "--collect-only", "-p", "no:cacheprovider", __file__],
        cwd=ROOT, env=os.environ | {"QUIRE_FUZZ_SEED": "123"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ("random runs begin with seed 123" in run.stdout) == is_told, run.stdout + run.stderr
