"""`quire bench` runs the workload that was asked for, and its JSON says what its tables say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.zero_model import write_zero_model

Run = Callable[..., Any]

SMALL = ("--num-kv-blocks", 64, "--max-num-seqs", 8, "--max-model-len", 256)
RANDOM = ("--num-prompts", 3, "--input-len", 20, "--output-len", 5, "--repeats", 2)


def figures(run: Run, tmp_path: Path, *arguments: object) -> dict[str, Any]:
    """Run a benchmark and return what it wrote as JSON."""
    path = tmp_path / "figures.json"
    ran = run("bench", *arguments, "--json", path)
    assert ran.code == 0, ran.err
    assert "instruction_set" in ran.out
    return json.loads(path.read_text())


@pytest.mark.usefixtures("demo_model")
def test_throughput_counts_what_was_done(run: Run, tmp_path: Path) -> None:
    record = figures(run, tmp_path, "throughput", *RANDOM, *SMALL)
    assert record["workload"] == {
        "source": "random", "num_requests": 3, "num_prompt_tokens": 60, "num_output_tokens": 15
    }
    walls = record["repeats"]["wall_s"]
    assert len(walls) == 2
    assert record["repeats"]["tokens_per_s"] == [pytest.approx(15 / wall) for wall in walls]
    assert record["repeats"]["total_tokens_per_s"] == [pytest.approx(75 / wall) for wall in walls]
    assert record["figures"]["requests_per_s"]["high"] == pytest.approx(3 / min(walls))


@pytest.mark.usefixtures("demo_model")
def test_throughput_reports_the_kv_cache(run: Run, tmp_path: Path) -> None:
    cache = figures(run, tmp_path, "throughput", *RANDOM, *SMALL)["kv_cache"]
    assert cache["total_blocks"] == 64
    assert cache["peak_used_blocks"] == 3 * 2  # 24 tokens of each of the three stand in two blocks of 16
    assert 0 < cache["mean_tail_waste_ratio"] < 0.5
    assert cache["num_preemptions"] == 0


@pytest.mark.usefixtures("demo_model")
def test_throughput_reports_preemptions(run: Run, tmp_path: Path) -> None:
    tight = ("--num-kv-blocks", 6, "--num-prompts", 3, "--input-len", 30, "--output-len", 40, "--repeats", 1)
    cache = figures(run, tmp_path, "throughput", *tight)["kv_cache"]
    assert cache["num_preemptions"] > 0
    assert cache["peak_used_blocks"] <= 6


@pytest.mark.usefixtures("demo_model")
@pytest.mark.parametrize("concurrency", [1, 2])
def test_latency_reports_every_time_that_a_client_sees(run: Run, tmp_path: Path, concurrency: int) -> None:
    record = figures(run, tmp_path, "latency", *RANDOM, "--concurrency", concurrency, "--num-kv-blocks", 64)
    assert set(record["figures"]) == {"ttft_s", "itl_s", "tpot_s", "e2e_s"}
    for values in record["figures"].values():
        assert 0 < values["p50"] <= values["p95"] <= values["p99"]
    assert record["figures"]["ttft_s"]["mean"] < record["figures"]["e2e_s"]["mean"]
    assert len(record["repeats"]) == 2


@pytest.mark.usefixtures("demo_model")
def test_workload_of_token_ids_comes_from_a_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"two": [{"prompt": [1, 2, 3], "n_out": 2}, {"prompt": [4], "n_out": 3}]}))
    record = figures(run, tmp_path, "throughput", "--workload", path, "--name", "two", "--repeats", 1, *SMALL)
    assert record["workload"] == {
        "source": f"{path} two", "num_requests": 2, "num_prompt_tokens": 4, "num_output_tokens": 5
    }


@pytest.mark.usefixtures("demo_model")
@pytest.mark.parametrize(
    ("name", "message"), [("w.txt", "must be random, or a .json"), ("none.json", "none.json"), ("none.csv", "none.csv")]
)
def test_workload_that_cannot_be_read_is_an_error(run: Run, tmp_path: Path, name: str, message: str) -> None:
    ran = run("bench", "throughput", "--workload", tmp_path / name, *SMALL)
    assert ran.code == 1
    assert message in ran.err


def test_control_plane_is_measured_for_each_number_of_sequences(run: Run, tmp_path: Path) -> None:
    load = ("--num-seqs", 2, "--num-seqs", 5, "--steps", 20, "--prompt-len", 10, "--block-size", 4, "--repeats", 2)
    record = figures(run, tmp_path, "control-plane", *load)
    assert set(record["figures"]) == {"2 sequences", "5 sequences"}
    for values in record["figures"].values():
        assert 0 < values["low"] <= values["median"] <= values["high"]


def test_growth_of_the_control_plane_is_measured_for_each_length(run: Run, tmp_path: Path) -> None:
    growth = ("--growth", "--lengths", 20, "--lengths", 50, "--repeats", 1)
    record = figures(run, tmp_path, "control-plane", *growth)
    assert record["benchmark"] == "control-plane-growth"
    names = ("burst of 256", "fork of 64", "64 beams")
    assert list(record["figures"]) == [f"{name}, {length} tokens" for name in names for length in (20, 50)]
    assert all(values["low"] > 0 for values in record["figures"].values())


def test_command_names_take_underscores(run: Run, tmp_path: Path) -> None:
    record = figures(run, tmp_path, "control_plane", "--num_seqs", 2, "--steps", 2, "--repeats", 1)
    assert record["benchmark"] == "control-plane"


def test_calibrated_machine_is_one_that_simulations_take(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = write_zero_model(tmp_path / "model", "Llama", "float32", max_position_embeddings=512)
    path = tmp_path / "cpu.json"
    ran = run("bench", "calibrate", folder, "--num-kv-blocks", 512, "--repeats", 1, "--json", path)
    assert ran.code == 0, ran.err
    assert "prefill of 1 x 256 tokens" in ran.out
    load = ("--workload", "alpaca", "--num-prompts", 20, "--max-num-seqs", 8)
    ran = run("simulate", folder, "--hardware", path, *load, "--json", tmp_path / "simulated.json")
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "simulated.json").read_text())["rates"]["tokens_per_s"] > 0
