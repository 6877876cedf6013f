"""Records of random and of real runs: plans are not changed by recording, and are made again by a replay."""

import random
import re
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from quire import LLM, LoRARequest, SamplingParams
from quire.core.config import PreemptionKind
from quire.core.errors import ConfigError
from quire.core.plan import MeasuredRates, StepPlan, StepResult, decode_result
from quire.engine.options import EngineOptions
from quire.engine.recording import record, recorded_scheduler, recorder, snapshot
from quire.engine.recording.record import (
    Closed,
    Planned,
    RecordError,
    RecordStart,
    Resumed,
    Returned,
    Sent,
    Updated,
    chunk,
    encode_event,
    encode_into,
    head,
    read_record,
    shown,
    whole_check,
)
from quire.engine.recording.recorded_scheduler import RecordedScheduler
from quire.engine.recording.replay import DifferenceError
from quire.extension.isas import usable_isas
from quire.scheduling.planner import Planner
from quire.scheduling.preemption import PreemptionPolicy
from quire.scheduling.waiting_lines import Lack
from support.fake_executor import FakeExecutor
from support.openai_server import openai_server
from support.peft_folders import write_adapter
from support.ragged_executor import RaggedExecutor
from support.random_model import write_random_model
from support.records import Records, events_of, replayed, unpacked, whole_record
from support.scheduling import Harness, random_run
from support.server import wait_until
from support.stopping import stopped

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def kind_of(seed: int) -> dict[str, Any]:
    """What a random run of this number is like."""
    executor = {"executor_class": RaggedExecutor} if seed % 5 == 0 else {}
    return {"crowded": seed % 2 == 0, "windowed": seed % 4 < 2, "late": seed % 3 == 0} | executor


@pytest.mark.parametrize("first", [0, 100, *(pytest.param(each, marks=pytest.mark.matrix) for each in (200, 300, 400))])
def test_random_runs_are_repeated(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Harness, "check", lambda harness: None)     # other tests do, of the same runs
    records = Records(tmp_path, monkeypatch)
    num_steps = num_preempted = 0
    for seed in range(first, first + 100):
        harness = random_run(seed, **kind_of(seed))
        run = replayed(events_of(records.close()))
        assert run.num_steps >= harness.num_steps
        assert run.num_requests == len(harness.requests)
        assert run.scheduler.cache.stats() == harness.cache.stats()
        assert run.scheduler.preemption.stats == harness.scheduler.preemption.stats
        num_steps += run.num_steps
        num_preempted += sum(run.scheduler.preemption.stats.num_preemptions.values())
    assert num_steps > 5000
    assert num_preempted > 100


@pytest.mark.parametrize("keeps_tokens", [False, True])
def test_recording_changes_no_plan(keeps_tokens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [random_run(seed, **kind_of(seed)).executor.trace for seed in range(20)]
    records = Records(tmp_path, monkeypatch, keeps_tokens=keeps_tokens)
    for seed, trace in enumerate(plain):
        assert random_run(seed, **kind_of(seed)).executor.trace == trace
        replayed(events_of(records.close()))


def record_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int = 14) -> Path:
    records = Records(tmp_path, monkeypatch)
    random_run(seed, **kind_of(seed))
    return records.close()


# --- mutants ----------------------------------------------------------------------------------------------------------


def other_way_back(policy: PreemptionPolicy, *arguments: Any) -> PreemptionKind:  # noqa: ANN401
    return "recompute"


def test_other_decision_is_found_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that never swaps differs where the first request was swapped out, and not before."""
    events = events_of(record_of(tmp_path, monkeypatch))
    steps = [each for each in events if isinstance(each, Planned) and "rows" in shown(each.plan)]
    first = next(number for number, each in enumerate(steps, 1) if "swap_outs" in shown(each.plan))
    monkeypatch.setattr(PreemptionPolicy, "choose", other_way_back)
    with pytest.raises(DifferenceError) as found:
        replayed(events)
    assert found.value.step == first
    assert found.value.recorded == steps[first - 1].plan
    assert "swap_outs" not in shown(found.value.planned)


def test_scheduler_that_fails_is_found_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_of(record_of(tmp_path, monkeypatch))
    plan_running, num_calls = Planner.plan_running, 0

    def failing(planner: Planner, *arguments: Any) -> int:  # noqa: ANN401
        nonlocal num_calls
        num_calls += 1
        if num_calls == 9:
            raise KeyError("here")
        return plan_running(planner, *arguments)

    monkeypatch.setattr(Planner, "plan_running", failing)
    with pytest.raises(DifferenceError) as found:
        replayed(events)
    planned = [each for each in events if isinstance(each, Planned)][:9]
    assert found.value.step == sum("rows" in shown(each.plan) for each in planned)
    assert (found.value.recorded, found.value.why) == (planned[-1].plan, "KeyError('here')")


def one_more(values: list[int]) -> list[int]:
    return [value + 1 for value in values]


@pytest.mark.parametrize(
    ("field", "latest"), [("table_blocks", 4), ("starts", 64), ("rows", 64), ("counts", 64), ("sample_tokens", 64)]
)
def test_engine_that_plans_otherwise_than_its_recorder_ends_the_record(
    field: str, latest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another block shows in the next step that takes one; another entry of a decode, in the next plan looked at whole.

    What differs stays: a decision is in the state of a scheduler.
    """
    records = Records(tmp_path, monkeypatch)
    harness = Harness(256, block_size=4)
    for length in (5, 6, 7):
        harness.add(length, max_tokens=200, ignore_eos=True)
    scheduler = harness.scheduler
    assert isinstance(scheduler, RecordedScheduler)
    num_steps = 0
    for _ in range(10):
        harness.step()
    scheduler._send()
    assert records.recorder is not None
    assert not records.recorder.is_over

    def check(plan: StepPlan) -> int:
        return whole_check(msgspec.structs.replace(plan, **{field: one_more(getattr(plan, field))}))

    def encode(event: Sent, batch: bytearray, at: int) -> None:
        if isinstance(event, Returned) and field == "table_blocks":
            event = msgspec.structs.replace(event, blocks=one_more(event.blocks))
        encode_into(event, batch, at)

    monkeypatch.setattr(recorded_scheduler, "whole_check", check)
    monkeypatch.setattr(recorded_scheduler, "encode_into", encode)
    while not records.recorder.is_over:
        harness.step()
        scheduler._send()
        num_steps += 1
        assert num_steps <= latest
    closed = events_of(records.path)[-1]
    assert isinstance(closed, Closed)
    assert closed.reason.startswith(f"step {10 + num_steps} could not be repeated: another plan")


# --- damage -----------------------------------------------------------------------------------------------------------


def test_cut_file_is_read_to_the_cut_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = record_of(tmp_path, monkeypatch).read_bytes()
    path = tmp_path / "cut"
    for length in {0, 9, 10, 11, *range(0, len(whole), 97), len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(RecordError, match=r"offset \d+"):
            events_of(path)


def test_spoilt_byte_is_named_with_its_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = record_of(tmp_path, monkeypatch).read_bytes()
    path, rng = tmp_path / "spoilt", random.Random(3)
    for _ in range(200):
        spoilt = bytearray(whole)
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
        path.write_bytes(spoilt)
        with pytest.raises(RecordError, match=r"offset \d+"):
            events_of(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"GGUF", "begins with other bytes"),
        (head()[:-1] + b"\x07", "format 7; this Quire reads format 1"),
        (head() + chunk([encode_event(Planned(0.0, None))]), "it has no start"),
        (head() + chunk([b"\x93abc"]), "damaged in the chunk at offset 10"),
    ],
    ids=["other file", "other format", "no start", "no events"],
)  # fmt: skip
def test_other_files_are_refused(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=told):
        events_of(path)


def test_record_of_another_version_is_refused_with_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (start, *_) = events_of(record_of(tmp_path, monkeypatch))
    assert isinstance(start, RecordStart)
    path = tmp_path / "other"
    path.write_bytes(head() + chunk([encode_event(msgspec.structs.replace(start, version="0.0.1"))]))
    with pytest.raises(RecordError, match=rf"Quire 0\.0\.1, and this is Quire {re.escape(start.version)}"):
        events_of(path)


def test_chunk_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAX_CHUNK_BYTES", 1000)
    path = tmp_path / "long"
    path.write_bytes(head() + chunk([bytes(100_000)]))
    with pytest.raises(RecordError, match="too long"):
        events_of(path)


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "stateful"), [*((seed, False) for seed in range(15)), *((seed, True) for seed in range(15, 20))]
)
def test_files_follow_each_other_and_the_latest_two_stay(
    seed: int, stateful: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each begins with the state of the scheduler at any moment between two steps, and is replayed by itself."""
    monkeypatch.setattr(Harness, "check", lambda harness: None)
    monkeypatch.setattr(recorder, "_CHUNK_BYTES", 300)
    monkeypatch.setattr(recorder, "_MOST_STATE", 1e9)
    records = Records(tmp_path, monkeypatch, max_bytes=3000)
    harness = random_run(seed, **kind_of(seed), stateful=stateful)
    records.close()
    assert records.recorder is not None
    kept = records.recorder.paths
    assert sorted(tmp_path.glob("1-*.quirelog")) == sorted(kept)
    assert not any(b"client " in part for path in kept for part in unpacked(path))
    runs = [replayed(events_of(path)) for path in kept]
    for earlier, later in pairwise(runs):
        assert later.first_step == earlier.num_steps + 1
    runs[-1].scheduler.check()
    assert runs[-1].num_steps >= harness.num_steps
    assert runs[-1].scheduler.cache.stats() == harness.cache.stats()


def test_record_whose_bound_has_no_room_for_the_state_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "_CHUNK_BYTES", 1000)
    records = Records(tmp_path, monkeypatch, max_bytes=4000)
    random_run(14, **kind_of(14))
    assert "of 4000 bytes, its bound, the state of the scheduler takes" in caplog.text
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < 4000
    run = replayed(events_of(records.path))
    assert run.num_steps > 0
    assert "its bound" in (run.end or "")


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [("tuple", "", [1, 2, 3.0])],
        [("tuple", "", [[1], 1, 2.0]), ("object", "os:_Environ", [0])],
        [("tuple", "", [[1], 1, 2.0]), ("object", "builtins:object", [0])],
        [("tuple", "", [[1], 1, 2.0]), ("object", "quire.engine.recording.recorder:Recorder", [0])],
        [("tuple", "", [[1], 1, 2.0]), ("object", "quire.core.version:__version__", [0])],
        [("tuple", "", [[1], 1, 2.0]), ("method", "join", ["text"])],
        [("tuple", "", [[1], 1, 2.0]), ("method", "__class__", [[2]]), ("replay", "", [])],
        [("tuple", "", [[1], 1, 2.0]), ("view", "", [b"memory"])],
        [("tuple", "", [[1], 1, 2.0]), ("defaultdict", "eval", [])],
        [("tuple", "", [[1], 1, 2.0]), ("container", "partial", [])],
        [("tuple", "", [[1], 1, 2.0]), ("call", "print", [])],
        [("tuple", "", [[0], 1, 2.0])],
        [("tuple", "", [[7], 1, 2.0])],
    ],
    ids=str,
)  # fmt: skip
def test_state_that_is_none_of_a_scheduler_is_refused(
    nodes: list[snapshot.Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (start, *_) = events_of(record_of(tmp_path, monkeypatch))
    with pytest.raises(RecordError, match="the state at the beginning of the record cannot be read"):
        replayed([start, Resumed(msgspec.msgpack.encode(nodes))])


@pytest.mark.parametrize("state", [b"", b"no nodes", msgspec.msgpack.encode(1)])
def test_state_that_is_no_list_of_nodes_is_refused(
    state: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (start, *_) = events_of(record_of(tmp_path, monkeypatch))
    with pytest.raises(RecordError, match="the state at the beginning of the record cannot be read"):
        replayed([start, Resumed(state)])


def run_llm(folder: Path, **settings: Any) -> list[str]:  # noqa: ANN401
    """Generate twice, the second time behind the first answers; return the texts."""
    prompts = [f"def {name}(first, second):\n" for name in ("add", "sub", "add_all", "add", "mul", "div")]
    with LLM(num_kv_blocks=24, max_model_len=200, record=str(folder), **settings) as llm:
        first = llm.generate(prompts, replace_n(GREEDY, 2), use_tqdm=False)
        longer = [f"{each.prompt}{each.outputs[0].text}\n" for each in first]
        second = llm.generate(longer, GREEDY, use_tqdm=False)
    return [output.text for each in (*first, *second) for output in each.outputs]


def replace_n(params: SamplingParams, n: int) -> SamplingParams:
    return replace(params, n=n, temperature=1.0, seed=7)


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduling_policy": "fair"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"num_swap_blocks": 40, "preemption_mode": "swap", "record_tokens": True},
    ],
    ids=["fair", "speculation", "swaps, with tokens"],
)
def test_engine_is_repeated(settings: dict[str, Any], demo_model: Path, tmp_path: Path) -> None:
    run_llm(tmp_path, **settings)
    run = replayed(whole_record(tmp_path))
    assert run.num_requests >= 12
    assert sum(run.scheduler.preemption.stats.num_preemptions.values()) > 0
    assert run.scheduler.cache.prefixes.num_found > 0


def test_run_with_adapters_is_repeated(tmp_path: Path) -> None:
    folder, records = tmp_path / "model", tmp_path / "records"
    folder.mkdir()
    model = write_random_model(folder)
    adapters = [LoRARequest(f"lora-{i}", i, str(write_adapter(tmp_path / f"{i}", model, i))) for i in (1, 2)]
    prompts = [{"prompt_token_ids": [5 + i % 4] * (20 + i)} for i in range(9)]
    settings = {"enable_lora": True, "max_loras": 1, "num_kv_blocks": 24, "block_size": 8, "record": str(records)}
    with LLM(model, **settings) as llm:
        llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=[None, *adapters] * 3)
    events = whole_record(records)
    run = replayed(events)
    assert run.num_requests == 9
    lacks = {reason for each in events if isinstance(each, Planned) for _, reason, _ in each.lacks}
    assert lacks == {"adapter"}
    assert not any(b"lora-" in part for path in records.iterdir() for part in unpacked(path))


_REPLAY = """
import sys
from pathlib import Path
from quire.engine.recording.record import read_record
from quire.engine.recording.replay import RecordReplay
(_, start), *others = read_record(Path(sys.argv[1]))
run = RecordReplay(start)
for _, event in others:
    run.apply(event)
loaded = {name.partition(".")[0] if "_kernels" not in name else "_kernels" for name in sys.modules}
print(run.num_steps, sorted(loaded & {"torch", "_kernels", "llguidance", "transformers", "tokenizers"}))
"""


@pytest.mark.skipif(len(usable_isas()) < 2, reason="needs two instruction sets of the C++ kernels")
def test_nothing_of_the_machine_is_in_the_plans(demo_model: Path, tmp_path: Path) -> None:
    """Engines with other kernels and threads make the same plans; another process repeats them without any kernel."""
    plans = []
    for number, isa in enumerate((usable_isas()[0], usable_isas()[-1])):
        with LLM(num_kv_blocks=24, max_model_len=200, record=str(tmp_path / str(number)), cpu_isa=isa) as llm:
            for first in (5, 5, 300):
                prompts = [{"prompt_token_ids": [*range(first, first + length)]} for length in (9, 40, 41, 70, 90)]
                llm.generate(prompts, replace_n(GREEDY, 2), use_tqdm=False)
        events = whole_record(tmp_path / str(number))
        plans.append([each.plan for each in events if isinstance(each, Planned)])
    assert plans[0] == plans[1]
    (path,) = (tmp_path / "0").iterdir()
    environment = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    ran = subprocess.run(
        [sys.executable, "-c", _REPLAY, str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    num_steps = sum("rows" in shown(plan) for plan in plans[0])
    assert ran.stdout == f"{num_steps} []\n"


def test_record_of_an_engine_that_is_killed_is_whole(demo_model: Path, tmp_path: Path) -> None:
    engine = EngineOptions(str(demo_model), num_kv_blocks=64, record=str(tmp_path))
    with openai_server(engine) as server:
        body = {"prompt": "import os", "max_tokens": 30, "ignore_eos": True}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        server.child.process.kill()
        server.wait_until(lambda: not server.service.client.is_alive)
    run = replayed(whole_record(tmp_path))
    assert (run.num_requests, run.num_steps) == (1, 30)


def test_recorder_that_gets_no_cpu_time_at_the_end_writes_all(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.launcher.STOP_TIMEOUT_S", 0.01)
    llm = LLM(str(demo_model), num_kv_blocks=24, max_model_len=200, record=str(tmp_path))
    llm.generate(["import os"], GREEDY, use_tqdm=False)
    scheduler = llm._engine.engine.scheduler
    assert isinstance(scheduler, RecordedScheduler)
    line, closing = scheduler.sink, threading.Thread(target=llm.close)
    assert isinstance(line, recorded_scheduler.Line)
    with stopped(line._process.pid):
        closing.start()
        wait_until(lambda: line._is_over)
        until_s = time.monotonic() + 0.1
        wait_until(lambda: time.monotonic() > until_s)
    closing.join()
    whole_record(tmp_path)


def test_record_has_no_prompt_no_answer_and_no_salt(demo_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    engine = EngineOptions(str(demo_model), num_kv_blocks=64, record=str(folder))
    secrets = "a prompt that no record may have, with words enough to be found", "salt-of-mine", "key-of-mine"
    with openai_server(engine, api_key=(secrets[2],)) as server:
        server.http.headers["Authorization"] = f"Bearer {secrets[2]}"
        tokens = server.http.post("/tokenize", json={"prompt": secrets[0]}).json()["tokens"]
        body = {"prompt": secrets[0], "max_tokens": 20, "cache_salt": secrets[1], "stop": ["never said"], "logprobs": 1}
        answer = server.http.post("/v1/completions", json=body | {"return_token_ids": True}).json()
    whole_record(folder)
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    content = b"".join(unpacked(path))
    for text in (*secrets, "words enough", "never said", answer["choices"][0]["text"]):
        assert text.encode() not in content
    for ids in (tokens, answer["choices"][0]["token_ids"]):
        for start in range(len(ids) - 3):
            some = ids[start : start + 3]
            assert array("i", some).tobytes() not in content
            assert msgspec.msgpack.encode(some)[1:] not in content


def test_folder_that_cannot_be_written_is_an_error(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"record: .*/file/below"):
        LLM(record=str(tmp_path / "file" / "below"), num_kv_blocks=16)


def test_baselines_are_not_recorded() -> None:
    with pytest.raises(ConfigError, match="record needs batching 'continuous'"):
        EngineOptions(record="somewhere", memory_policy="contiguous-max")


def test_requests_that_lack_something_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread prepares is ready when it is: the record tells when."""
    records, rng = Records(tmp_path, monkeypatch), random.Random(5)
    asked: Callable[..., Lack | None] = lambda request: rng.choice([None, Lack("grammar"), Lack("adapter", True)])  # noqa: E731
    harness = Harness(60, unprepared=asked)
    for number in range(12):
        harness.add(5 + number, max_tokens=6, ignore_eos=True)
    while harness.scheduler.has_requests:
        harness.step()
    run = replayed(events_of(records.close()))
    assert run.num_steps == harness.num_steps
    assert any(event.lacks for event in events_of(records.path) if isinstance(event, Planned))


class MeasuringExecutor(FakeExecutor):
    """Measures other numbers in each step."""

    def collect(self) -> StepResult:
        number = float(len(self.trace))
        return structs.replace(
            super().collect(), rates=MeasuredRates(100 + number), step_s=number / 8, step_ratio=1 + number / 1024
        )


def test_record_has_what_each_step_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that only decode are sent together."""
    records, harness = Records(tmp_path, monkeypatch), Harness(60, executor_class=MeasuringExecutor)
    harness.add(9, max_tokens=90, ignore_eos=True)
    harness.run()
    results = [decode_result(each.result) for each in events_of(records.close()) if isinstance(each, Updated)]
    assert [(each.rates.prefill_tokens_per_s, each.step_s, each.step_ratio) for each in results] == [
        (100 + number, number / 8, 1 + number / 1024) for number in range(harness.num_steps)
    ]


def test_all_is_sent_once_no_request_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is idle may be killed hours later."""
    records, harness = Records(tmp_path, monkeypatch), Harness(60)
    for _ in range(2):
        harness.add(9, max_tokens=30, ignore_eos=True)
        harness.run()
        assert records.recorder is not None
        assert records.recorder._replay.num_steps == harness.num_steps
    replayed(events_of(records.close()))


def test_planning_that_fails_and_is_rolled_back_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder fails at the same place, with a part of a plan that is told as none."""
    real = Planner.plan_running

    def failing(planner: Planner, step: Any, *arguments: Any) -> Any:  # noqa: ANN401
        budget = real(planner, step, *arguments)
        if step.now_s == 7:
            raise RuntimeError("in the middle of a plan")
        return budget

    monkeypatch.setattr(Planner, "plan_running", failing)
    records, harness = Records(tmp_path, monkeypatch), Harness(60)
    harness.add(9, max_tokens=30, ignore_eos=True)
    for _ in range(6):
        harness.step()
    harness.now_s = 7.0
    with pytest.raises(RuntimeError, match="in the middle"):
        harness.step()
    harness.scheduler.roll_back()
    harness.now_s = 8.0
    harness.run()
    assert replayed(events_of(records.close())).scheduler.cache.stats() == harness.cache.stats()


def test_events_have_the_offsets_of_their_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_CHUNK_BYTES", 1000)
    path = record_of(tmp_path, monkeypatch)
    offsets = sorted({offset for offset, _ in read_record(path)})
    assert offsets[0] == 10
    assert len(offsets) > 3
