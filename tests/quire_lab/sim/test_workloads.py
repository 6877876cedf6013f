"""Workloads from seeds and files: lengths as asked, the same every time, and clear errors."""

import gzip
import json
from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire_lab.sim.datasets import DATA_FOLDER
from quire_lab.sim.workloads import WorkItem, length_workload, random_workload, renewed, token_id_workload

PEER_WORKLOADS = Path(__file__).parents[3] / "../shared/peers/workloads.json"

TURNS = """conversation,turn,role,tokens
0,0,gpt,100
0,1,human,5
0,2,gpt,50
1,0,human,7
1,1,gpt,9
1,2,human,11
1,3,gpt,13
2,0,human,17
2,1,human,19
3,0,human,3000
3,1,gpt,1
4,0,system,1
4,1,human,2
5,0,human,23
5,1,gpt,29
"""


def lengths(items: list[WorkItem]) -> list[tuple[int, int]]:
    return [(len(item.prompt_token_ids), item.output_len) for item in items]


def length_file(tmp_path: Path, content: str, name: str = "lengths.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    return path


def test_random_workload_has_the_lengths_and_ids_asked_for() -> None:
    items = random_workload(num_prompts=5, input_len=30, output_len=4, vocab_size=50, seed=0)
    assert lengths(items) == [(30, 4)] * 5
    tokens = {token for item in items for token in item.prompt_token_ids}
    assert min(tokens) >= 0
    assert 40 <= max(tokens) < 50


def test_random_workload_follows_its_seed() -> None:
    assert random_workload(2, 8, 1, 1000, seed=1) == random_workload(2, 8, 1, 1000, seed=1)
    assert random_workload(2, 8, 1, 1000, seed=1) != random_workload(2, 8, 1, 1000, seed=2)


def test_renewed_requests_repeat_the_shapes_with_other_tokens() -> None:
    items = [WorkItem([0, 1, 2], 5, arrival_s=0.5), WorkItem([0, 1, 9], 6)]
    found = renewed(items, count=5, first_round=0)
    assert lengths(found) == [(3, 5), (3, 6), (3, 5), (3, 6), (3, 5)]
    assert [item.prompt_token_ids for item in found] == [[0, 1, 2], [0, 1, 9], [1, 2, 3], [1, 2, 0], [2, 3, 4]]
    assert renewed(items, count=1, first_round=2) == found[4:]


@pytest.mark.parametrize("name", ["lengths.csv", "lengths.csv.gz"])
def test_csv_of_lengths_leaves_out_what_is_empty_or_too_long(tmp_path: Path, name: str) -> None:
    path = length_file(tmp_path, "arrival_s,prompt_tokens,output_tokens\n0,3,4\n1,0,4\n2,3,0\n3,60,41\n4,60,40\n", name)
    assert lengths(length_workload(path, None, max_total_len=100, vocab_size=10, seed=0)) == [(3, 4), (60, 40)]


def test_csv_of_turns_gives_first_questions_and_answers(tmp_path: Path) -> None:
    items = length_workload(length_file(tmp_path, TURNS), None, max_total_len=2048, vocab_size=10, seed=0)
    assert lengths(items) == [(7, 9), (23, 29)]


def test_sample_of_a_csv_is_seeded_and_in_the_files_order(tmp_path: Path) -> None:
    rows = "".join(f"{i},1\n" for i in range(1, 101))
    path = length_file(tmp_path, "prompt_tokens,output_tokens\n" + rows)
    sample = [lengths(length_workload(path, 10, 2048, 10, seed)) for seed in (0, 0, 1)]
    assert sample[0] == sample[1] != sample[2]
    assert len(sample[0]) == 10
    assert sample[0] == sorted(set(sample[0]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has none"),
        ("a,b\n1,2\n", "has a,b"),
        ("prompt_tokens,output_tokens\n1,x\n", "line 2: output_tokens must be an integer, got 'x'"),
        ("prompt_tokens,output_tokens\n1\n", "line 2: output_tokens must be an integer, got None"),
        ("prompt_tokens,output_tokens\n", "no row"),
        ("prompt_tokens,output_tokens\n100,100\n", "at most 50 tokens"),
    ],
)
def test_bad_csv_is_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        length_workload(length_file(tmp_path, content), None, max_total_len=50, vocab_size=10, seed=0)


def test_file_that_is_not_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv.gz"
    path.write_text("prompt_tokens,output_tokens\n1,2\n")
    with pytest.raises(ConfigError, match="no gzip file"):
        length_workload(path, None, max_total_len=50, vocab_size=10, seed=0)


def test_json_list_of_requests(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps([{"prompt": [1, 2], "n_out": 3}, {"prompt": [4], "n_out": 5}]))
    assert token_id_workload(path, None, None) == [WorkItem([1, 2], 3), WorkItem([4], 5)]
    assert token_id_workload(path, None, 1) == [WorkItem([1, 2], 3)]


def test_json_of_named_lists(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"a": [{"prompt": [1], "n_out": 1}], "b": [{"prompt": [2], "n_out": 1}]}))
    assert token_id_workload(path, "b", None) == [WorkItem([2], 1)]
    for name in ("c", None):
        with pytest.raises(ConfigError, match="holds the workloads a, b"):
            token_id_workload(path, name, None)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("{", None, "w.json must hold requests .*: Input data was truncated"),
        ("[]", None, "not empty"),
        ('{"a": []}', "a", "not empty"),
        ("{}", None, "holds the workloads none"),
        ("5", None, "Expected `object | array`"),
        ("[1]", None, "n_out"),
        ('[{"prompt": [1]}]', None, "n_out"),
        ('[{"prompt": [], "n_out": 1}]', None, "n_out"),
        ('[{"prompt": ["a"], "n_out": 1}]', None, "n_out"),
        ('[{"prompt": [1], "n_out": "1"}]', None, "n_out"),
        ('[{"prompt": [1], "n_out": 1}]', "a", "without a name"),
    ],
)
def test_bad_json_is_refused(tmp_path: Path, content: str, name: str | None, message: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        token_id_workload(path, name, None)


def test_sharegpt_turns_give_the_papers_workload() -> None:
    items = length_workload(DATA_FOLDER / "sharegpt_sample_turns.csv.gz", None, 2048, vocab_size=512, seed=0)
    pairs = lengths(items)
    assert len(pairs) == 631
    assert sum(prompt for prompt, _ in pairs) / 631 == pytest.approx(148.9, abs=0.05)
    assert sum(output for _, output in pairs) / 631 == pytest.approx(307.1, abs=0.05)


@pytest.mark.skipif(not PEER_WORKLOADS.exists(), reason="../shared/peers is not here")
@pytest.mark.parametrize(("name", "count"), [("decode1", 1), ("offline64", 64), ("chat32", 32), ("prefix", 32)])
def test_peer_workloads_are_read(name: str, count: int) -> None:
    assert len(token_id_workload(PEER_WORKLOADS, name, None)) == count
