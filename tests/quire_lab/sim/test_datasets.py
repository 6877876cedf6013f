"""Workloads by name: real lengths or their fits, mixes, prefixes, and clear errors."""

from pathlib import Path

import numpy as np
import pytest

from quire.core.errors import ConfigError
from quire_lab.sim.datasets import DATA_FOLDER, DATASETS, due_times, fit_note, named_file, workload
from quire_lab.sim.workloads import WorkItem

NOWHERE = Path("/no/such/folder")


def means(items: list[WorkItem]) -> tuple[float, float]:
    return (
        float(np.mean([len(item.prompt_token_ids) for item in items])),
        float(np.mean([item.output_len for item in items])),
    )


@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"mooncake", "mooncake-synthetic"}))
@pytest.mark.parametrize("data", [pytest.param(NOWHERE, id="fit"), pytest.param(DATA_FOLDER, id="data")])
def test_lengths_are_as_their_source_says(name: str, data: Path) -> None:
    dataset = DATASETS[name]
    items = workload(name, 1500, data=data)
    assert len(items) == 1500
    prompt, output = means(items)
    if dataset.cut is None and dataset.rate is None:
        assert prompt == pytest.approx(dataset.prompt.mean + dataset.prefix_len, rel=0.15)
        assert output == pytest.approx(dataset.output.mean, rel=0.15)
    if dataset.cut is not None:
        assert max(len(item.prompt_token_ids) for item in items) == 1024
        assert max(item.output_len for item in items) <= 1024


def test_sharegpt_stays_within_the_models_length() -> None:
    items = workload("sharegpt", 500, data=NOWHERE)
    assert max(len(item.prompt_token_ids) + item.output_len for item in items) <= 2048


@pytest.mark.parametrize(("name", "shared"), [("translation-1-shot", 80), ("translation-5-shot", 341), ("alpaca", 0)])
def test_prompts_share_exactly_their_prefix(name: str, shared: int) -> None:
    items = workload(name, 40, data=NOWHERE)
    prompts = [item.prompt_token_ids for item in items]
    assert len({tuple(prompt[:shared]) for prompt in prompts}) == 1
    assert len({tuple(prompt[: shared + 2]) for prompt in prompts}) > 30


def test_mix_draws_by_weight() -> None:
    items = workload("alpaca:3,creation:1", 2000, data=NOWHERE)
    assert sum(item.output_len > 400 for item in items) / 2000 == pytest.approx(0.25, abs=0.05)
    assert all(item.arrival_s is None for item in items)


def test_mix_may_leave_a_trace_without_a_request() -> None:
    assert len(workload("alpaca:1e9,azure-conv:1", 3)) == 3


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_every_data_set_is_in_the_package(name: str) -> None:
    assert fit_note([name], DATA_FOLDER) == ""
    assert DATASETS[name].file in (DATA_FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(name for name, dataset in DATASETS.items() if dataset.rate is not None))
def test_fit_of_a_trace_arrives_at_the_traces_rate(name: str) -> None:
    due_s = due_times(workload(name, 50, data=NOWHERE), None, seed=0)
    assert 49 / (due_s[-1] - due_s[0]) == pytest.approx(DATASETS[name].rate)


def test_fits_are_told_with_the_files_that_are_missing(tmp_path: Path) -> None:
    (tmp_path / DATASETS["alpaca"].file).touch()
    assert fit_note(["alpaca"], tmp_path) == ""
    told = "lengths: log-normal fit (no creation_lengths.csv.gz and no arxiv_summarization_lengths.csv.gz in"
    assert fit_note(["alpaca,creation:2", "arxiv", "creation"], tmp_path) == f"{told} {tmp_path})"


def test_package_files_are_workloads_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in {dataset.file for dataset in DATASETS.values()}:
        assert named_file(file) == DATA_FOLDER / file
        assert len(workload(file, 4)) == 4
    own = Path("creation_lengths.csv.gz")
    own.touch()
    assert named_file(own.name) == own, "what lies here is meant first"
    assert named_file("../data/README.md") is None


def test_seed_decides() -> None:
    assert workload("alpaca", 20, data=NOWHERE, seed=3) == workload("alpaca", 20, data=NOWHERE, seed=3)
    assert workload("alpaca", 20, data=NOWHERE, seed=3) != workload("alpaca", 20, data=NOWHERE, seed=4)


def test_files_are_workloads(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt_tokens,output_tokens\n5,6\n7,8\n")
    assert {(len(i.prompt_token_ids), i.output_len) for i in workload(str(lengths), 2)} == {(5, 6), (7, 8)}
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n1.0,5,6\n3.5,7,8\n")
    items = workload(str(trace), 10)
    assert due_times(items, None, seed=0) == [0.0, 2.5]


def test_rows_that_are_bad_are_named_by_their_line(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt_tokens,output_tokens\n5,6\n7,many\n")
    with pytest.raises(ConfigError, match=r"lengths.csv, line 3: .*'many'"):
        workload(str(lengths), 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("squad", "workload must be one of alpaca, .*, a mix of them, or a file, got 'squad'"),
        ("alpaca:0,chat:1", "the weight of alpaca must be a number above 0, got '0'"),
        ("alpaca:many", "the weight of alpaca must be a number above 0, got 'many'"),
    ],
)
def test_unknown_workload_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workload(name, 5)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rate_must_be_one(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate must be above 0 requests per second"):
        due_times(workload("alpaca", 3, data=NOWHERE), rate, seed=0)
