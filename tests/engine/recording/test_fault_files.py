"""The ring of recent plans: bounded, written at a fault into a file without text, and shown by `quire replay`."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.errors import ConfigError
from quire.core.plan import StepPlan
from quire.core.sequence import Request
from quire.core.version import __version__
from quire.engine.engine import Engine, RecentPlans
from quire.engine.options import EngineOptions
from quire.engine.recording import fault_files
from quire.engine.recording.fault_files import FaultFiles, encode_whole, keep_recent_plans
from quire.engine.recording.record import Closed, Fault, Planned, RecordStart, Repeated, encode_plan
from quire.scheduling.result_recorder import ResultRecorder
from support.faults import raising
from support.records import events_of
from support.scheduling import Harness

decode_events = msgspec.msgpack.Decoder(list[Planned | Repeated]).decode
START = RecordStart(__version__, SchedulerConfig(), CacheConfig(64), has_tokens=False)


class Broken(RuntimeError):
    """A step that has failed, with a text that no file may have."""

    def __init__(self) -> None:
        super().__init__("a prompt that no file may have")


def engine_of(harness: Harness, folder: Path, max_bytes: int = 1 << 20) -> tuple[Engine, list[StepPlan]]:
    """Return an engine with a ring, and a list that its plans are put into."""
    engine, plans = Engine(harness.scheduler, harness.executor), list[StepPlan]()
    engine.recent = RecentPlans(max_bytes, encode_whole)
    engine.recent.on_fault = FaultFiles(START, folder, engine.recent).write
    engine.on_submit = plans.append
    return engine, plans


def fail(engine: Engine, monkeypatch: pytest.MonkeyPatch, at: str = "record") -> None:
    """Run a step that fails as its result is recorded."""
    with monkeypatch.context() as patch:
        patch.setattr(ResultRecorder, at, raising(Broken))
        with pytest.raises(Broken):
            engine.step()


def expanded(events: list[object]) -> Iterator[tuple[bytes | None, Repeated | None]]:
    """Yield each plan of the file of a fault: the whole one before it, and what a repeat has of its own."""
    whole: bytes | None = None
    for event in events:
        if isinstance(event, Planned):
            whole = event.plan
            yield whole, None
        elif isinstance(event, Repeated):
            yield whole, event


def test_fault_writes_the_plans_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(64, max_num_seqs=3)
    engine, plans = engine_of(harness, tmp_path / "faults")
    for length in (9, 5, 7, 30):
        harness.add(length, max_tokens=40, ignore_eos=True, n=1)
    for _ in range(25):
        engine.step()
    fail(engine, monkeypatch)
    (path,) = (tmp_path / "faults").iterdir()
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    start, fault, *events = events_of(path)
    assert start == START
    assert isinstance(fault, Fault)
    assert isinstance(events[-1], Closed)
    assert (fault.first_step, len(plans)) == (1, 26)
    kept = [*expanded(events)]
    assert len(kept) == len(plans)
    for plan, (whole, repeat) in zip(plans, kept, strict=True):
        if repeat is None:
            assert whole == encode_plan(plan)
            rows = plan.rows
        else:
            assert plan.rows == rows
            assert (repeat.table_rows, repeat.table_blocks) == (plan.table_rows, plan.table_blocks)
    assert 1 < sum(repeat is None for _, repeat in kept) < 12
    states = {each.request_id: (each.state, each.num_prompt_tokens) for each in fault.requests}
    assert states == {0: ("running", 9), 1: ("running", 5), 2: ("running", 7), 3: ("waiting", 30)}
    assert fault.error.startswith("Broken\n")
    assert "engine.py" in fault.error
    assert "a prompt that" not in fault.error


def test_ring_keeps_the_latest_plans_within_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(400)
    engine, plans = engine_of(harness, tmp_path, max_bytes=4000)
    for number in range(60):
        harness.add(5 + number % 7, max_tokens=8 + number % 5, ignore_eos=True)
    while harness.scheduler.has_requests:
        engine.step()
        assert engine.recent is not None
        assert engine.recent.num_bytes <= 4000
    harness.add(5)
    fail(engine, monkeypatch)
    _, fault, *events = events_of(next(tmp_path.iterdir()))
    assert isinstance(fault, Fault)
    kept = [*expanded(events[:-1])]
    assert fault.first_step > 1
    assert fault.first_step + len(kept) - 1 == len(plans)
    assert kept[0] == (encode_plan(plans[fault.first_step - 1]), None)
    assert kept[-1][0] == encode_plan(plans[-1])


@pytest.mark.parametrize("number", [1, 2, 16, 17, 64, 65, 150])
def test_each_number_of_repeats_is_read_again(number: int) -> None:
    """A list's head in msgpack, which is left out, is longer from 16 on; a run has 63 repeats at most."""
    recent = RecentPlans(1 << 20, encode_whole)
    for step in range(number):
        recent.add(step / 2, StepPlan(rows=[3], starts=[step], counts=[1], sample_rows=[3], table_blocks=[step]))
    encoded, count, num_before = recent.events()
    assert (count, num_before) == (number, 0)
    events = decode_events(b"\xdd" + count.to_bytes(4, "big") + encoded)   # a list of msgpack
    assert [each.now_s for each in events] == [step / 2 for step in range(number)]
    assert [step for step, each in enumerate(events) if isinstance(each, Planned)] == [*range(0, number, 64)]
    assert all(each.table_blocks == [step] for step, each in enumerate(events) if isinstance(each, Repeated))


def test_plan_longer_than_the_bound_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(400)
    engine, _ = engine_of(harness, tmp_path, max_bytes=60)
    harness.add(9, max_tokens=9, ignore_eos=True)
    for _ in range(5):
        engine.step()
    fail(engine, monkeypatch)
    assert not [*expanded(events_of(next(tmp_path.iterdir()))[2:])]


def test_oldest_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_files, "MAX_FAULT_FILES", 3)
    files, harness = FaultFiles(START, tmp_path, RecentPlans(1000, encode_whole)), Harness(8)
    (tmp_path / "mine").touch()
    paths = [files.write(Broken(), harness.scheduler) for _ in range(5)]
    assert {*tmp_path.glob("fault-*")} == set(paths[2:])
    assert (tmp_path / "mine").exists()


def test_error_is_written_once(tmp_path: Path) -> None:
    files, harness, error = FaultFiles(START, tmp_path, RecentPlans(1000, encode_whole)), Harness(8), Broken()
    assert files.write(error, harness.scheduler) is not None
    assert files.write(error, harness.scheduler) is None
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize("is_link", [False, True])
def test_temporary_folder_of_other_users_is_left_alone(
    is_link: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_files, "gettempdir", lambda: str(tmp_path))
    folder, elsewhere = tmp_path / f"quire-faults-{os.geteuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if is_link:
        folder.symlink_to(elsewhere)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    files = FaultFiles(START, None, RecentPlans(1000, encode_whole))
    assert files.write(Broken(), Harness(8).scheduler) is None
    assert "other users can write to it" in caplog.text
    assert not [*folder.iterdir()]


def test_engine_goes_on_where_no_file_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    harness = Harness(64)
    engine, _ = engine_of(harness, tmp_path / "file" / "below")
    harness.add(9, max_tokens=4, ignore_eos=True)
    fail(engine, monkeypatch)
    engine.recover(Broken())
    while harness.scheduler.has_requests:
        engine.step()


def test_options_turn_the_ring_off_or_place_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, config, cache = Harness(64), SchedulerConfig(), CacheConfig(64)
    engine = Engine(harness.scheduler, harness.executor)
    keep_recent_plans(engine, EngineOptions(fault_bytes=0), config, cache)
    assert engine.recent is None
    monkeypatch.setattr(fault_files, "gettempdir", lambda: str(tmp_path))
    keep_recent_plans(engine, EngineOptions(), config, cache)
    engine.report_fault(Broken())
    (path,) = (tmp_path / f"quire-faults-{os.geteuid()}").iterdir()
    assert isinstance(events_of(path)[1], Fault)
    with pytest.raises(ConfigError, match="fault_bytes must be at least 0"):
        EngineOptions(fault_bytes=-1)


def test_request_is_named_that_was_being_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(64)
    engine, _ = engine_of(harness, tmp_path)
    for _ in range(3):
        harness.add(4, max_tokens=9, ignore_eos=True)
    record_token, num_calls = ResultRecorder._record_token, 0

    def failing(recorder: ResultRecorder, request: Request, *arguments: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise Broken
        record_token(recorder, request, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ResultRecorder, "_record_token", failing)
    with pytest.raises(Broken):
        engine.step()
    fault = events_of(next(tmp_path.iterdir()))[1]
    assert isinstance(fault, Fault)
    assert [each.is_at for each in fault.requests] == [False, True, False]
