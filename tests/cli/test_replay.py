"""`quire replay`: a verdict, the first difference with both plans, a step, a request's life, damaged files."""

import re
from pathlib import Path

import pytest

from quire.scheduling.preemption import PreemptionPolicy
from support.command_line import Run
from support.records import Records
from support.scheduling import Harness, random_run


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a record of some steps with preemptions by swap."""
    records = Records(tmp_path, monkeypatch)
    random_run(14, crowded=True, windowed=True)
    return records.close()


def test_verdict_is_printed(run: Run, path: Path) -> None:
    ran = run("replay", path)
    assert ran.code == 0
    assert "every plan is that of the record" in ran.out
    assert run("replay", path, "--check") == (0, "", "")


def test_first_difference_is_shown_with_both_plans(run: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreemptionPolicy, "choose", lambda *_: "recompute")
    ran = run("replay", path, "--check")
    assert (ran.code, ran.out) == (1, "")
    first, *lines = ran.err.splitlines()
    assert first.startswith("step ")
    assert any(line.startswith("- swap_outs: [(") for line in lines)
    assert "+ swap_outs: []" in lines
    assert any(line.startswith("  rows: ") for line in lines)


def test_replay_stops_behind_a_step_and_shows_it(run: Run, path: Path) -> None:
    lines = run("replay", path, "--until", 7).out.splitlines()
    assert lines[0].startswith("7 steps, ")
    assert lines[1].startswith("step 7: ")
    assert any(line.startswith("  rows: [") for line in lines[2:])


def test_life_of_a_request_is_told(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records(tmp_path, monkeypatch)
    harness = Harness(num_blocks=22, max_num_seqs=2)
    for _ in range(3):
        harness.add(8, max_tokens=5, ignore_eos=True)
    while harness.scheduler.has_requests:
        harness.step()
        harness.now_s += 0.5
    lines = run("replay", records.close(), "--explain", 2).out.splitlines()
    assert [" ".join(line.split()) for line in lines[:-1]] == [
        "step 0 0.000 s queued: 8 prompt tokens, n 1",
        "step 6 2.500 s admitted: 0 tokens found; waited max_num_seqs 4, token_budget 1",
        "step 6 2.500 s first token",
        "step 10 4.500 s branch 0 ends (length); 5 tokens of all",
    ]


def test_damaged_file_is_one_line_with_its_offset(run: Run, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])
    ran = run("replay", path)
    assert (ran.code, ran.out) == (2, "")
    assert re.fullmatch(rf"quire: {path}: cut off in the chunk at offset \d+\n", ran.err)


@pytest.mark.parametrize(
    ("arguments", "told"), [(("--until", 0), "until must be at least 1, got 0"), (("--explain", 99), "no request 99")]
)
def test_wrong_flags_are_told(run: Run, path: Path, arguments: tuple[object, ...], told: str) -> None:
    ran = run("replay", path, *arguments)
    assert ran.code == 1
    assert told in ran.err


def test_missing_file_is_told(run: Run, tmp_path: Path) -> None:
    ran = run("replay", tmp_path / "none.quirelog")
    assert (ran.code, ran.err) == (1, f"quire: {tmp_path}/none.quirelog: No such file or directory\n")
