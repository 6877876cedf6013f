"""Workloads of `quire bench` by name: data sets, mixes, and files of the package, from any folder."""

from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire_lab.bench.bench_flags import ServedWorkloadFlags, WorkloadFlags
from quire_lab.sim.datasets import DATASETS


@pytest.fixture(autouse=True)
def _nothing_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_file_of_the_package_is_named_by_its_file_name() -> None:
    items = WorkloadFlags("sharegpt_sample_turns.csv.gz", num_prompts=64).build(vocab_size=512, seed=0)
    assert (len(items), sum(len(item.prompt_token_ids) for item in items)) == (64, 10092)
    assert len(WorkloadFlags("sharegpt_sample_turns.csv.gz").build(512, 0)) == 631, "all of a file"


@pytest.mark.parametrize("name", [*DATASETS, "alpaca:3,creation:1"])
def test_data_sets_and_mixes_are_workloads(name: str) -> None:
    items = ServedWorkloadFlags(name, num_prompts=5, max_total_len=4096).items()
    assert len(items) == 5
    assert max(len(item.prompt_token_ids) + item.output_len for item in items) <= 4096
    is_trace = name in DATASETS and DATASETS[name].rate is not None
    assert all((item.arrival_s is not None) == is_trace for item in items)
    assert len(ServedWorkloadFlags(name).items()) == 64, "not all of a long trace"


def test_part_of_a_trace_is_played_faster() -> None:
    whole = ServedWorkloadFlags("azure-conv", num_prompts=2000).items()
    part = ServedWorkloadFlags("azure-conv", num_prompts=2, start_s=100.0, speed_up=4.0).items()
    first, second = [item.arrival_s for item in whole if item.arrival_s is not None and item.arrival_s >= 100.0][:2]
    assert part[1].arrival_s == pytest.approx((second - first) / 4)


@pytest.mark.parametrize("name", ["none.csv", "none.json", "squad", "alpaca,squad", "../data/alpaca_lengths.csv.gz"])
def test_what_is_not_there_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(ConfigError, match=r"workload must be random, or a .json.* that is there, .*sharegpt.*, got"):
        WorkloadFlags(name).build(vocab_size=512, seed=0)
