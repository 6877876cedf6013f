"""Traces: times, lengths and shared prefixes as they stand in the files."""

import gzip
import json
from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire_lab.sim.datasets import DATA_FOLDER
from quire_lab.sim.workloads import TraceSlice, WorkItem, is_trace, trace_workload

AZURE = "arrival_s,prompt_tokens,output_tokens\n0.0,3,4\n1.5,5,1\n2.0,90,20\n2.0,0,5\n8.5,7,2\n"


def written(tmp_path: Path, name: str, content: str) -> Path:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    return path


def mooncake(tmp_path: Path, *rows: tuple[float, int, int, list[int]]) -> Path:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(keys, row, strict=True))) for row in rows]
    return written(tmp_path, "trace.jsonl.gz", "\n".join(lines) + "\n")


def shape(items: list[WorkItem]) -> list[tuple[float | None, int, int]]:
    return [(item.arrival_s, len(item.prompt_token_ids), item.output_len) for item in items]


@pytest.mark.parametrize("name", ["azure.csv", "azure.csv.gz"])
def test_csv_trace_has_its_times_and_leaves_out_what_is_empty_or_too_long(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name, AZURE)
    assert is_trace(path)
    items = trace_workload(path, TraceSlice(max_total_len=100), vocab_size=50, seed=0)
    assert shape(items) == [(0.0, 3, 4), (1.5, 5, 1), (8.5, 7, 2)]
    assert all(0 <= token < 50 for item in items for token in item.prompt_token_ids)


def test_slice_begins_later_ends_sooner_and_plays_faster(tmp_path: Path) -> None:
    part = TraceSlice(num_prompts=2, max_total_len=200, start_s=1.0, speed_up=2.0)
    items = trace_workload(written(tmp_path, "azure.csv", AZURE), part, vocab_size=50, seed=0)
    assert shape(items) == [(0.0, 5, 1), (0.25, 90, 20)]


def test_requests_share_exactly_the_spans_whose_hash_ids_they_share(tmp_path: Path) -> None:
    path = mooncake(tmp_path, (0, 1100, 5, [0, 1, 2]), (500, 1500, 6, [0, 1, 7]), (2000, 600, 7, [9, 1]))
    items = trace_workload(path, TraceSlice(), vocab_size=500, seed=0)
    assert shape(items) == [(0.0, 1100, 5), (0.5, 1500, 6), (2.0, 600, 7)]
    first, second, third = (item.prompt_token_ids for item in items)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1100]
    assert third[512:] == first[512:600]
    assert third[:512] != first[:512]


def test_rows_out_of_order_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    path = mooncake(tmp_path, (3000, 10, 1, [0]), (1000, 20, 1, [1]))
    assert shape(trace_workload(path, TraceSlice(), 50, 0)) == [(0.0, 20, 1), (2.0, 10, 1)]


def test_prompts_follow_the_seed(tmp_path: Path) -> None:
    path = written(tmp_path, "azure.csv", AZURE)
    assert trace_workload(path, TraceSlice(), 500, seed=1) == trace_workload(path, TraceSlice(), 500, seed=1)
    assert trace_workload(path, TraceSlice(), 500, seed=1) != trace_workload(path, TraceSlice(), 500, seed=2)


@pytest.mark.parametrize("name", ["w.json", "w.txt", "lengths.csv", "empty.csv", "bad.csv.gz"])
def test_other_files_are_no_traces(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("" if name == "empty.csv" else "prompt_tokens,output_tokens\n1,2\n")
    assert not is_trace(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\n0,1,1\n1,x,1\n", "line 3: prompt_tokens must be .*, got 'x'"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\nnan,1,1\n", "line 2: .*must be a time"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\n0,1\n", "line 2: output_tokens .* got None"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\n0,0,1\n", "no row"),
        ("t.jsonl", "{", "line 1: Input data was truncated"),
        ("t.jsonl", "[]\n", "line 1: Expected `object`"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 5}\n', "output_length"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 5.5, "output_length": 1}\n', "int"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}\n', ">= 0"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [4]}\n', "do not cover"),
        ("t.jsonl", "", "no row"),
    ],
)
def test_bad_trace_is_refused_with_its_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trace_workload(written(tmp_path, name, content), TraceSlice(), vocab_size=50, seed=0)


def test_trace_that_is_not_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="no gzip file"):
        trace_workload(path, TraceSlice(), vocab_size=50, seed=0)


@pytest.mark.parametrize(("name", "num_rows", "rate"), [("code", 8819, 2.57), ("conv", 19366, 5.53)])
def test_azure_traces_have_their_rate(name: str, num_rows: int, rate: float) -> None:
    path = DATA_FOLDER / f"azure_llm_2023_{name}.csv.gz"
    assert is_trace(path)
    items = trace_workload(path, TraceSlice(max_total_len=1024, speed_up=4.0), vocab_size=2, seed=0)
    whole = trace_workload(path, TraceSlice(max_total_len=10**9, start_s=3000.0), vocab_size=2, seed=0)
    assert 0 < len(items) + len(whole) < num_rows
    assert len(items) / (items[-1].arrival_s or 0.0) == pytest.approx(4 * rate * len(items) / num_rows, rel=0.05)


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_mooncake_traces_share_prefixes(name: str) -> None:
    path = DATA_FOLDER / f"mooncake_{name}.jsonl.gz"
    items = trace_workload(path, TraceSlice(num_prompts=300, max_total_len=20_000), vocab_size=500, seed=0)
    assert len({tuple(item.prompt_token_ids[:512]) for item in items}) < len(items)
