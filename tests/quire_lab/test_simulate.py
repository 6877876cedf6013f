"""`quire simulate` answers the user's question, and its JSON says what its tables say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
MODEL = ("OPT-13B", "--hardware", "A100-40GB")
FITS = ("--data", "/no/such/folder")


def simulated(run: Run, tmp_path: Path, *arguments: object, data: tuple[str, ...] = FITS) -> dict[str, Any]:
    path = tmp_path / "simulated.json"
    ran = run("simulate", *MODEL, *data, "--json", path, *arguments)
    assert ran.code == 0, ran.err
    record = json.loads(path.read_text())
    assert record["verdict"] in " ".join(ran.out.split())
    assert record["title"] in " ".join(ran.out.split())
    return record


def test_light_load_is_fine(run: Run, tmp_path: Path) -> None:
    record = simulated(run, tmp_path, "--workload", "alpaca", "--num-prompts", 40, "--rate", 1)
    assert record["verdict"].startswith("Fine")
    assert record["simulator"]["sequence_steps_per_cpu_s"] > 0
    assert record["requests"] == {"finished": 40, "met_limits": 40, "refused": 0}
    assert record["rates"]["requests_per_s"] == pytest.approx(1, rel=0.2)
    assert set(record["figures"]) >= {"ttft_s", "itl_s", "itl_s, prefill beside", "itl_s, none", "tpot_s", "e2e_s"}
    assert set(record["figures"]["ttft_s"]) == {"mean", "p50", "p95", "p99"}


def test_overload_names_what_binds(run: Run, tmp_path: Path) -> None:
    record = simulated(run, tmp_path, "--num-prompts", 150, "--rate", 20, "--ttft-limit-ms", 500)
    assert record["verdict"].startswith("KV cache full, the queue grows: the rate is above what fits")
    assert record["queue"]["grows"]
    assert record["kv_cache"]["num_preemptions"] > 0
    assert record["requests"]["met_limits"] < 150
    assert record["rates"]["goodput_rps"] < record["rates"]["requests_per_s"]


@pytest.mark.parametrize("rate", [None, 300])
def test_rate_above_what_fits_is_told(run: Run, tmp_path: Path, rate: float | None) -> None:
    arguments = ("--workload", "alpaca", "--num-prompts", 300, "--max-num-seqs", 16)
    record = simulated(run, tmp_path, *arguments, *(() if rate is None else ("--rate", rate)))
    assert record["verdict"].startswith("Queueing, the queue grows: the rate is above what fits")
    assert record["queue"]["grows"]
    assert record["workload"]["arrivals"] == ("all at once" if rate is None else "Poisson, 300/s")


def test_highest_rate_is_searched_and_its_load_reported(run: Run, tmp_path: Path) -> None:
    load = ("--workload", "alpaca", "--num-prompts", 100, "--rate", 4)
    goal = ("--goodput", "ttft:200", "tpot:40", "--find-rate", "--precision", 0.2)
    record = simulated(run, tmp_path, *load, *goal)
    found, best = record["find_rate"], record["find_rate"]["rate"]
    assert [probe["rate"] for probe in found["probes"]][:2] == [4.0, 8.0]
    assert best < found["missed_rate"] <= best * 1.2
    assert {probe["rate"]: probe["is_met"] for probe in found["probes"]}[best]
    assert record["workload"]["arrivals"] == f"Poisson, {best:g}/s"
    assert 90 <= record["requests"]["met_limits"] < 100
    stricter = simulated(run, tmp_path, *load, *goal, "--attain", 1.0)
    assert stricter["find_rate"]["rate"] < best
    both = simulated(run, tmp_path, *load, *goal, "--replicas", 2)
    assert both["find_rate"]["rate"] > best


def test_targets_that_no_rate_meets_are_an_error(run: Run) -> None:
    load = ("--data", "/no/such/folder", "--workload", "alpaca", "--num-prompts", 3)
    ran = run("simulate", *MODEL, *load, "--find-rate", "--goodput", "ttft:0.001")
    assert ran.code == 1
    assert "no rate meets the limits, down to 0.0009766 requests/s" in ran.err


def test_target_of_time_bounds_the_steps_beside_decodes_at_a_price(run: Run, tmp_path: Path) -> None:
    load = ("--workload", "translation-5-shot", "--num-prompts", 60, "--rate", 4, "--no-enable-prefix-caching")
    free = simulated(run, tmp_path, *load, "--itl-target-ms", "none")
    assert free["itl_target_prices"] == []
    bound = simulated(run, tmp_path, *load, "--itl-target-ms", 45)
    beside = "itl_s, prefill beside"
    assert bound["figures"][beside]["p95"] <= 0.045 < free["figures"][beside]["p95"]
    assert bound["figures"]["ttft_s"]["mean"] > free["figures"]["ttft_s"]["mean"]
    [one, eight, many] = bound["itl_target_prices"]
    assert [price["num_decodes"] for price in bound["itl_target_prices"]] == [1, 8, 64]
    assert one["price"] == pytest.approx(0.045 / (0.045 - one["decode_s"]))
    assert one["price"] < eight["price"]
    assert many["decode_s"] > 0.045
    assert many["price"] is None


def test_fits_are_told_and_arrive_at_the_traces_rate(run: Run, tmp_path: Path) -> None:
    record = simulated(run, tmp_path, "--workload", "azure-conv", "--num-prompts", 40)
    fit = "log-normal fit (no azure_llm_2023_conv.csv.gz in /no/such/folder)"
    assert record["title"] == f"OPT-13B on 1 x A100-40GB, azure-conv, lengths: {fit}, seconds"
    assert record["workload"] == {
        "name": "azure-conv", "num_requests": 40, "lengths": fit, "arrivals": "Poisson at the trace's rate"
    }
    assert record["rates"]["duration_s"] > 38 / 5.53


def test_data_of_the_package_needs_no_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record = simulated(run, tmp_path, "--workload", "azure-conv", "--num-prompts", 5, data=())
    assert record["title"] == "OPT-13B on 1 x A100-40GB, azure-conv, seconds"
    assert (record["workload"]["lengths"], record["workload"]["arrivals"]) == ("data", "the trace's")


def test_replicas_share_the_requests_by_a_rule(run: Run, tmp_path: Path) -> None:
    load = ("--workload", "translation-5-shot", "--num-prompts", 60, "--rate", 20)
    record = simulated(run, tmp_path, *load, "--replicas", 2, "--price", 3.6)
    assert record["replicas"]["num_replicas"] == 2
    assert record["replicas"]["routing"] == "prefix"
    assert 1 <= record["replicas"]["computed_tokens_max_over_mean"] <= 2
    assert record["requests"]["finished"] == 60
    assert record["cost"]["price_per_hour"] == 7.2
    in_turn = simulated(run, tmp_path, *load, "--replicas", 2, "--routing", "round-robin")
    assert in_turn["replicas"]["routing"] == "round-robin"
    assert "replicas" not in simulated(run, tmp_path, *load)


def test_engines_of_one_machine_are_not_simulated(run: Run) -> None:
    refused = run("simulate", *MODEL, "-dp", 2)
    assert refused.code != 0
    assert "--replicas simulates engines on devices of their own" in " ".join(refused.err.split())


def test_a_price_makes_a_cost(run: Run, tmp_path: Path) -> None:
    record = simulated(run, tmp_path, "--num-prompts", 20, "--price", 3.6)
    assert record["cost"]["per_million_output_tokens"] == pytest.approx(1e3 / record["rates"]["tokens_per_s"])


def test_prefixes_are_found_unless_switched_off(run: Run, tmp_path: Path) -> None:
    translate = ("--workload", "translation-5-shot", "--num-prompts", 30, "--rate", 10)
    assert simulated(run, tmp_path, *translate)["kv_cache"]["prefix_hit_rate"] > 0.8
    off = simulated(run, tmp_path, *translate, "--no-enable-prefix-caching")
    assert off["kv_cache"]["prefix_hit_rate"] == 0


def test_long_prompts_are_refused_and_told(run: Run, tmp_path: Path) -> None:
    record = simulated(run, tmp_path, "--workload", "arxiv", "--num-prompts", 40, "--rate", 1)
    assert record["requests"]["refused"] > 0
    assert "requests were refused, as longer than 2048 tokens" in record["verdict"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--find-rate",), "find-rate needs a limit: goodput"),
        (("--goodput", "ttft:"), "goodput ttft must be milliseconds of at least 0, got 'ttft:'"),
        (("--rate", 0), "rate must be above 0 requests per second, got 0"),
        (("--workload", "squad"), "workload must be one of alpaca"),
        (("--tensor-parallel-size", 41), "tensor_parallel_size 41 is above the model's 40 attention heads"),
        (("--max-model-len", 3), "none of 1000 requests fits: the longest may have 3 tokens"),
    ],
)
def test_what_cannot_be_is_an_error(run: Run, arguments: tuple[str, object], message: str) -> None:
    ran = run("simulate", *MODEL, *arguments)
    assert ran.code == 1
    assert message in ran.err


def test_hardware_must_be_named(run: Run) -> None:
    ran = run("simulate", "OPT-13B")
    assert ran.code == 1
    assert "hardware must be given" in ran.err


def test_folder_without_config_is_an_error(run: Run, tmp_path: Path) -> None:
    ran = run("simulate", tmp_path, "--hardware", "H100")
    assert ran.code == 1
    assert f"{tmp_path}: no file config.json" in ran.err


def test_bad_row_is_named_by_its_line(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n1,5,-\n")
    ran = run("simulate", *MODEL, "--workload", trace)
    assert ran.code == 1
    assert "trace.csv, line 3: output_tokens must be an integer, got '-'" in ran.err
