"""`quire replay`: a verdict, the first difference with both plans, a step, a request's life, damaged files."""

import re
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.core.plan import MeasuredRates, StepPlan
from quire.core.step_times import StepTimes
from quire.execution.worker import Worker
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
    assert lines[0].startswith("steps 1 to 7, ")
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


def test_other_policy_is_told_by_client(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with one short request waits behind eight of another by arrival, and behind one each by fair shares."""
    records = Records(tmp_path, monkeypatch)
    times = StepTimes(step_s=0.01, token_s=0.001, attended_s=0, context_s=0, sample_s=0.001)
    harness = Harness(200, max_num_seqs=2, budget=64, rates=MeasuredRates(step_times=times))
    for _ in range(8):
        harness.add(8, max_tokens=20, ignore_eos=True, client_id="key:1")
    harness.step()
    harness.now_s = 0.1
    harness.add(8, max_tokens=5, ignore_eos=True, client_id="key:2")
    harness.run()
    lines = run("replay", records.close(), "--policy", "fair").out.splitlines()[2:]
    rows = {tuple(fields[:3]): fields for line in lines if (fields := line.split())}
    ttft_s = {key: float(fields[3]) for key, fields in rows.items()}
    assert ttft_s["key:2", "1", "fair"] < 0.2
    assert ttft_s["key:2", "1", "priority"] > 0.9
    assert ("all", "9", "priority") in rows
    assert ("key:1", "8", "fair") in rows


@pytest.fixture
def record_with_tokens(demo_model: Path, tmp_path: Path) -> Path:
    """Return the record of an engine that has been preempted, with drafts."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    settings = {"num_kv_blocks": 24, "max_model_len": 200, "speculative_config": drafts}
    with LLM(str(demo_model), record=str(tmp_path), record_tokens=True, **settings) as llm:
        prompts = ["import os\n" * 6, "def f(x):\n    return", "class A:\n"] * 4
        llm.generate(prompts, SamplingParams(max_tokens=40, n=2, seed=3, ignore_eos=True), use_tqdm=False)
    (path,) = tmp_path.iterdir()
    return path


def test_tokens_are_computed_again(run: Run, record_with_tokens: Path) -> None:
    ran = run("replay", record_with_tokens, "--execute")
    assert ran.code == 0, ran.err
    num_tokens = int(ran.out.splitlines()[1].split()[0].replace(",", ""))
    assert num_tokens >= 12 * 2 * 40 - 24 * 4       # but drafts behind the last token


def test_tokens_of_another_model_are_told(run: Run, record_with_tokens: Path) -> None:
    ran = run("replay", record_with_tokens, "--execute", "--model", Path(__file__).parents[1] / "data" / "demo-draft")
    assert (ran.code, ran.out) == (1, "")
    assert re.match(r"step \d+: request \d+, branch \d has \[.+\] in place of \[.+\]", ran.err)


def test_steps_are_not_executed_without_tokens(run: Run, path: Path) -> None:
    ran = run("replay", path, "--execute")
    assert (ran.code, ran.err) == (1, "quire: execute needs a record with tokens (--record-tokens)\n")


def test_policy_needs_times_of_steps(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records(tmp_path / "none", monkeypatch)
    (tmp_path / "none").mkdir()
    harness = Harness(20)
    harness.add(8, max_tokens=2)
    harness.run()
    ran = run("replay", records.close(), "--policy", "fair", "--check")
    assert (ran.code, ran.out) == (1, "")
    assert "no times of steps" in ran.err


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


# --- files of faults --------------------------------------------------------------------------------------------------


class FaultError(RuntimeError):
    """A step that has failed."""


def test_steps_before_a_fault_are_shown(
    demo_model: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = Worker.execute

    def failing(worker: Worker, plan: StepPlan) -> object:
        if any(new.num_prompt_tokens == 3 for new in plan.new_rows):
            raise FaultError("a prompt that no file may have")
        return execute(worker, plan)

    monkeypatch.setattr(Worker, "execute", failing)
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    folder = tmp_path / "faults"
    with LLM(str(demo_model), num_kv_blocks=64, max_model_len=200, fault_folder=str(folder)) as llm:
        llm.generate([[5, 6, 7, 8]], greedy, use_tqdm=False)
        with pytest.raises(FaultError):
            llm.generate([[5, 6, 7, 8, 9], [7, 8, 9]], greedy, use_tqdm=False)
        llm.generate([[5, 6, 7, 8]], greedy, use_tqdm=False)
    (path,) = folder.iterdir()
    ran = run("replay", path)
    assert ran.code == 0, ran.err
    assert "before a fault, which can be shown (--until STEP) and not made again" in ran.out
    assert "\nFaultError\n" in ran.out
    assert "3 prompt tokens" in ran.out
    assert "a prompt that" not in ran.out
    assert run("replay", path, "--until", 3).out.splitlines()[-1].startswith("  ")
    refused = run("replay", path, "--check")
    assert (refused.code, "the one flag for it is until" in refused.err) == (1, True)
    assert "until must be from 1 to" in run("replay", path, "--until", 99).err
