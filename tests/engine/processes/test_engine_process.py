"""The engine process: how it starts, how it ends, and what it says when it does."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import uvloop

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, ModelError, RequestFailedError
from quire.core.frames import LENGTH_BYTES, frame
from quire.core.outputs import KVStats
from quire.core.pooling import PinTask
from quire.engine import launcher
from quire.engine.engine import Engine
from quire.engine.launcher import EngineProcess
from quire.engine.messages import (
    Abort,
    AddRequest,
    Alive,
    BlocksReply,
    Command,
    EngineDeadError,
    EngineState,
    Finish,
    GetBlocks,
    Idle,
    Located,
    Ready,
    Report,
    RequestRefused,
    Stepped,
    is_add,
)
from quire.engine.options import EngineOptions
from quire.engine.processes import client as client_module
from quire.engine.processes import engine_process as process
from quire.engine.processes.client import EngineClient
from quire.engine.processes.engine_process import EngineLoop
from quire.engine.processes.liveness import Heartbeat
from quire.engine.processes.streams import RequestStream
from quire.model.resolve import DEMO_MODEL
from quire.scheduling.limits import AdmissionLimits
from support.engine_process import (
    TIMEOUT_S,
    Recorder,
    add,
    connect,
    holds_nothing,
    is_running,
    read,
    until,
)
from support.fake_executor import expected_tokens
from support.scheduling import Harness, make_request
from support.scripted_engine import FAULT, spawn_scripted
from support.single_steps import SingleSteps
from support.stopping import stopped

pytestmark = pytest.mark.usefixtures("forked_processes")

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
LOOPS = pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


# --- engines that cannot start ----------------------------------------------------------------------------------------


def no_model(tmp_path: Path) -> EngineOptions:
    return EngineOptions(str(tmp_path))


def broken_tokenizer(tmp_path: Path) -> EngineOptions:
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    return EngineOptions(str(tmp_path))


@pytest.mark.parametrize(
    ("options_in", "error"),
    [
        (no_model, ModelError),
        (broken_tokenizer, ModelError),
        (lambda _: EngineOptions("no/such/model"), ModelError),
        (lambda _: EngineOptions(max_model_len=9999), ConfigError),
        (lambda _: EngineOptions(num_kv_blocks=10**12), ConfigError),
    ],
    ids=["no model", "broken tokenizer", "no such folder", "too long", "too much memory"],
)
def test_engine_that_cannot_start_says_why_as_llm_does(
    tmp_path: Path, options_in: Callable[[Path], EngineOptions], error: type[Exception]
) -> None:
    options = options_in(tmp_path)
    child = EngineProcess.spawn(options)
    with pytest.raises(error) as told:
        asyncio.run(EngineClient.connect(child, options, Recorder()))
    assert child.process.returncode is not None
    with pytest.raises(error) as expected:
        LLM(options.model, max_model_len=options.max_model_len, num_kv_blocks=options.num_kv_blocks)
    start = str(expected.value).split(", but")[0]  # the free memory that follows changes all the time
    assert str(told.value).startswith(start)


def loading_engine() -> EngineProcess:
    """Return an engine process that is not ready however long it runs: it was not told what to load."""
    return EngineProcess(*launcher.start_module("quire.engine.processes.engine_process", env=os.environ))


def test_engine_that_dies_while_it_loads_is_dead() -> None:
    child = loading_engine()
    child.process.kill()
    with pytest.raises(EngineDeadError, match=r"ended while it loaded \(killed by signal 9, Killed\)"):
        asyncio.run(EngineClient.connect(child, EngineOptions(), Recorder()))
    assert child.process.returncode == -signal.SIGKILL


@LOOPS
@pytest.mark.parametrize("patience_s", [0.0, 0.05], ids=["at once", "waiting"])
def test_engine_whose_start_is_cancelled_is_ended(
    factory: Callable[[], asyncio.AbstractEventLoop], patience_s: float
) -> None:
    child = loading_engine()

    async def run() -> None:
        connecting = asyncio.create_task(EngineClient.connect(child, EngineOptions(), Recorder()))
        await asyncio.sleep(patience_s)
        connecting.cancel()
        await connecting

    with asyncio.Runner(loop_factory=factory) as runner, pytest.raises(asyncio.CancelledError):
        runner.run(run())
    assert child.process.returncode is not None


def test_engine_whose_server_dies_while_it_loads_ends_by_itself() -> None:
    child = EngineProcess.spawn(EngineOptions())
    child.connection.recv(1)  # after `Located`: torch and the weights come next
    child.connection.close()
    assert child.process.wait(TIMEOUT_S) == 0


def test_engine_ends_with_a_stream_that_ends_within_a_command() -> None:
    child = spawn_scripted()
    child.connection.sendall(frame(Abort(1))[:-1])
    child.connection.shutdown(socket.SHUT_WR)
    assert child.process.wait(TIMEOUT_S) == 0
    child.stop()


def test_command_that_nobody_understands_is_a_fault() -> None:
    async def run() -> None:
        child = spawn_scripted()
        client = await EngineClient.connect(child, EngineOptions(), Recorder())
        client._connection._writer.write(b"\0\0\0\1\xc1")
        assert "the engine has failed: DecodeError" in str(await client.wait_dead())
        await client.close()
        assert child.process.returncode == 1

    asyncio.run(run())


# --- engines that die -------------------------------------------------------------------------------------------------


@LOOPS
def test_death_of_the_engine_ends_every_stream_and_loses_no_finished_output(
    demo_model: Path, factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    recorder = Recorder()

    async def run() -> None:
        options = EngineOptions(str(demo_model), max_num_seqs=8)
        steps = SingleSteps(options)
        client = await EngineClient.connect(steps.child, options, recorder)
        with steps.on() as run_step:    # else answers might be over before the kill
            finished = await add(client, "x", GREEDY)
            unread = await add(client, "x", LONG, "delta")
            while not any(step.finished for step in recorder.processed):
                await step_on(client, recorder, run_step)
            streams = [await add(client, f"{i} = ", LONG, "delta") for i in range(32)]
            readers = [asyncio.create_task(read_to_the_end(stream)) for stream in streams]
            while client.state.num_running < 8:
                await step_on(client, recorder, run_step)
            assert client.num_queued >= 20

            death = asyncio.create_task(client.wait_dead())
            os.kill(client._connection.engine.process.pid, signal.SIGKILL)
            async with asyncio.timeout(TIMEOUT_S):
                errors = await asyncio.gather(*readers)
                told = str(await death)

        assert told == "the engine process ended (killed by signal 9, Killed)"
        assert {str(error) for error in errors} == {told}
        assert len(set(map(id, errors))) == 32, "a shared one would collect tracebacks"
        assert not client.is_alive
        assert not is_running(client._connection.engine.process.pid)
        assert [output.finished for output in await read(finished)] == [True]
        assert len((await anext(unread)).outputs[0].token_ids) > 0
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            await anext(unread)
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            await add(client, "x", GREEDY)
        assert holds_nothing(client)
        assert recorder.aborted_requests == []
        await client.close()
        await client.close()

    async def step_on(client: EngineClient, recorder: Recorder, run_step: Callable[[], None]) -> None:
        num_before = len(recorder.steps)
        run_step()
        await until(lambda: len(recorder.steps) > num_before)

    async def read_to_the_end(stream: RequestStream) -> EngineDeadError:
        with pytest.raises(EngineDeadError) as told:
            await read(stream)
        assert await read(stream) == [], "the error comes once"
        return told.value

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())


def test_death_of_the_engine_is_told_to_all_who_wait_for_a_block_map(demo_model: Path) -> None:
    async def run() -> None:
        client = await connect(EngineOptions(str(demo_model)))
        pid = client._connection.engine.process.pid
        with stopped(pid):
            waiting = [asyncio.create_task(client.block_map(0, 1, TIMEOUT_S)) for _ in range(3)]
            await until(lambda: bool(client._pending))
            os.kill(pid, signal.SIGKILL)
            for task in waiting:
                with pytest.raises(EngineDeadError, match="killed by signal 9"):
                    await task
        assert not client._pending
        await client.close()

    asyncio.run(run())


def test_closing_ends_what_runs_and_the_process(demo_model: Path) -> None:
    async def run() -> None:
        client = await connect(EngineOptions(str(demo_model)))
        stream = await add(client, "x", LONG)
        reader = asyncio.create_task(anext(stream))
        await until(lambda: client.state.num_running == 1)
        await asyncio.gather(client.close(), client.close())
        with pytest.raises(EngineDeadError, match="the engine was closed"):
            await reader
        with pytest.raises(EngineDeadError, match="the engine was closed"):
            await add(client, "x", GREEDY)
        assert str(await client.wait_dead()) == "the engine was closed"
        assert client._connection.engine.process.returncode == 0
        assert client._connection.engine.connection.fileno() == -1
        assert holds_nothing(client)

    asyncio.run(run())


# --- an engine without a model ----------------------------------------------------------------------------------------


async def connect_scripted(point: str = "", nth: int = 0) -> EngineClient:
    return await EngineClient.connect(spawn_scripted(point, nth), EngineOptions(), Recorder())


def test_fault_of_the_engine_ends_it_and_tells_every_stream_what_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    """Also where requests are still being sent: that must not break the stream that the fault is told on.

    No request is to blame for it: a step of one token that no client sent has failed as well.
    """

    async def run() -> None:
        client = await connect_scripted("step", 7)

        async def told() -> str:
            with pytest.raises(EngineDeadError) as error:
                await read(await add(client, [1] * 20, LONG))
            return str(error.value)

        told_each = set()
        while client.is_alive:
            told_each |= set(await asyncio.gather(*(told() for _ in range(100))))
        assert told_each == {f"the engine has failed: RuntimeError: {FAULT}"}
        await client.close()
        assert client._connection.engine.process.returncode == 1

    asyncio.run(run())
    told = capfd.readouterr().err
    assert "the engine ends" in told
    assert "in collect" in told, "with the place"


@LOOPS
def test_large_frames_in_both_directions_never_stop_each_other(
    factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Each prompt is a frame of 100,000 ids, far beyond a socket's buffer, and sent while answers come in."""
    prompt_len, max_tokens = 100_000, 4

    async def run() -> None:
        client = await connect_scripted()
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        prompts = [[i] * prompt_len for i in range(5)]
        streams = await asyncio.gather(*(add(client, prompt, replace(params, seed=3)) for prompt in prompts))
        for prompt, stream in zip(prompts, streams, strict=True):
            expected = expected_tokens(prompt, params, 3, max_tokens, frozenset())
            assert [branch.token_ids for branch in (await read(stream))[-1].outputs] == expected
        await client.close()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())


@pytest.mark.parametrize(
    "last_bytes",
    [frame(Idle(EngineState(0, 0, 0)))[:2], frame(Idle(EngineState(0, 0, 0)))[:7], b""],
    ids=["part of a length", "part of a report", "nothing"],
)
def test_engine_that_dies_within_a_report_is_dead(last_bytes: bytes) -> None:
    async def run() -> None:
        child = stand_in_engine(last_bytes)
        client = await EngineClient.connect(child, EngineOptions(), Recorder())
        stream = await add(client, [1], GREEDY)
        with pytest.raises(EngineDeadError, match=r"the engine process ended \(exit status 7\)"):
            await read(stream)
        await client.close()

    asyncio.run(run())


def test_report_that_nobody_understands_ends_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        client = await EngineClient.connect(stand_in_engine(b"\0\0\0\1\xc1"), EngineOptions(), Recorder())
        told = str(await client.wait_dead())
        assert "could not be handled" in told
        with pytest.raises(EngineDeadError, match="could not be handled"):
            await add(client, [1], GREEDY)
        await client.close()
        assert client._connection.engine.process.returncode is not None

    asyncio.run(run())
    assert "a report of the engine could not be handled" in caplog.text


def test_long_step_that_gets_on_is_progress_and_one_that_does_not_is_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """This engine gives a sign of life for whatever it hears."""
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(client_module, "time", clock)
    then = f"[s.sendall({frame(Alive())!r}) for _ in iter(lambda: s.recv(1 << 20), b'')]"

    async def run() -> None:
        client = await EngineClient.connect(stand_in_engine(b"", then), EngineOptions(), Recorder())
        clock.now_s += 100
        assert client.stalled_s == 0
        stream = await add(client, [1], GREEDY)
        for _ in range(3):
            clock.now_s += 100
            assert client.stalled_s == 100
            client._connection._writer.write(b"x")
            await until(lambda: client.stalled_s == 0)
        client._connection.engine.process.kill()
        with pytest.raises(EngineDeadError):
            await read(stream)
        assert client.stalled_s == 0, "the dead do not stall"
        await client.close()

    asyncio.run(run())


def test_sign_of_life_behind_the_end_of_all_work_is_no_work() -> None:
    async def run() -> None:
        client = await EngineClient.connect(stand_in_engine(b""), EngineOptions(), Recorder())
        client._handle_report(Idle(EngineState(0, 0, 0)))
        client._handle_report(Alive())
        assert client.stalled_s == 0
        await client.close()

    asyncio.run(run())


def test_request_that_has_failed_keeps_its_reason_when_the_engine_dies() -> None:
    async def run() -> None:
        client = await EngineClient.connect(stand_in_engine(b"", "s.recv(1 << 20)"), EngineOptions(), Recorder())
        stream = await add(client, [1], GREEDY)
        stream.fail(RequestFailedError("its own fault"))
        await client.close()
        with pytest.raises(RequestFailedError, match="its own fault"):
            await read(stream)

    asyncio.run(run())


def test_engine_ends_with_any_of_its_threads() -> None:
    code = (
        "import threading, time; from quire.engine.processes import engine_process as process; "
        "process.serve = lambda *_: (threading.Thread(target=lambda: 1 / 0).start(), time.sleep(60)); process.main()"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ended = subprocess.run(
            [sys.executable, "-c", code, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], capture_output=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    assert ended.returncode == 1
    assert b"a thread of the engine has died" in ended.stderr
    assert b"ZeroDivisionError" in ended.stderr


def stand_in_engine(last_bytes: bytes, then: str = "pass") -> EngineProcess:
    """Return a process that says it is ready and what comes last, waits for a word, and ends with status 7."""
    limits = AdmissionLimits(10, 16, 10, 160)
    ready = Ready(limits, 100, 100, frozenset(), "none", "none", 0, 0, 0)
    said = frame(Located("/nowhere")) + frame(ready) + last_bytes
    code = f"import socket; s = socket.socket(fileno=0); s.sendall({said!r}); s.recv(1); {then}; raise SystemExit(7)"
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen([sys.executable, "-c", code], stdin=theirs)
    return EngineProcess(child, ours)


# --- the loop ---------------------------------------------------------------------------------------------------------


NO_HEARTBEAT = Heartbeat(lambda: 0, lambda: None)


class Script:
    """Drives an `EngineLoop` over a real scheduler: each report is answered with the next commands, or with none."""

    class OverError(Exception):
        """The engine has come to rest, and nothing more is asked of it."""

    def __init__(self, *answers: list[Command]) -> None:
        self.harness = Harness(num_blocks=64, max_model_len=80, caching=True)
        self.engine = Engine(self.harness.scheduler, self.harness.executor)
        self.reports: list[Report] = []
        self._commands = SimpleQueue[bytes]()
        self._answers = iter(answers)

    def run(self) -> list[Report]:
        loop = EngineLoop(self.engine, self._commands, self._take, NO_HEARTBEAT)
        with pytest.raises(Script.OverError):
            loop.run()
        return self.reports

    def _take(self, report: Report) -> None:
        self.reports.append(report)
        commands = next(self._answers, [])
        if isinstance(report, Idle) and not commands:
            raise Script.OverError
        for command in commands:
            self._commands.put(frame(command)[LENGTH_BYTES:])


def request(request_id: int, prompt_len: int = 10, **params: object) -> AddRequest:
    own = SamplingParams(max_tokens=30, ignore_eos=True, **params)  # type: ignore[arg-type]
    return AddRequest(make_request(request_id, [request_id] * prompt_len, own))


def pin(request_id: int, prompt_len: int = 10) -> AddRequest:
    made = make_request(request_id, [5] * prompt_len, SamplingParams(max_tokens=1, temperature=0.0))
    made.task = PinTask()
    return AddRequest(made)


def kv_of(report: Report) -> KVStats:
    assert isinstance(report, Stepped | Idle)
    assert report.state.kv is not None
    return report.state.kv


def test_burst_of_requests_is_added_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_ADD_BYTES_PER_STEP", 3 * len(frame(request(1))))
    script = Script([request(number) for number in range(1, 9)])
    steps = [report.state for report in script.run() if isinstance(report, Stepped)]
    assert [state.num_running + state.num_waiting for state in steps[:4]] == [4, 8, 8, 8], "a bound is passed by one"
    ended = [delta for report in script.reports if isinstance(report, Stepped) for delta in report.deltas]
    assert sorted(delta.request_id for delta in ended if delta.finish_reason is not None) == [*range(1, 9)]


def test_abort_does_not_wait_behind_requests_that_are_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_ADD_BYTES_PER_STEP", 1)
    script = Script([request(1)], [], [*(request(number) for number in range(2, 6)), Abort(5), Abort(1)])
    steps = [report for report in script.run() if isinstance(report, Stepped)]
    assert [step.state.num_running for step in steps[:5]] == [1, 1, 1, 2, 3], "the first was aborted before others came"
    assert {delta.request_id for step in steps[2:] for delta in step.deltas} == {2, 3, 4}
    for command in (request(1), Abort(1)):
        assert is_add(frame(command)[LENGTH_BYTES:]) == isinstance(command, AddRequest)


def test_burst_of_aborts_is_handled_over_several_steps_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_COMMANDS_PER_STEP", 2)
    monkeypatch.setattr(process, "MAX_ADD_BYTES_PER_STEP", 1)  # a request per step
    aborts: list[Command] = [Abort(number) for number in range(1, 6)]
    script = Script([request(number) for number in range(1, 6)], [], [], [], [], [*aborts, request(9), Abort(9)])
    reports = script.run()
    steps = [report.state for report in reports if isinstance(report, Stepped)]
    assert [step.num_running + step.num_waiting for step in steps] == [1, 2, 3, 4, 5, 3, 1]
    assert [type(report) for report in reports[-2:]] == [Stepped, Idle], "no report between the last aborts"
    assert kv_of(reports[-1]).used_blocks == 0


def test_abort_frees_its_blocks_before_the_next_step() -> None:
    first, second, third, last = Script([request(1), request(2)], [], [Abort(1), Abort(2)]).run()
    assert isinstance(first, Idle)
    assert isinstance(second, Stepped)
    assert isinstance(third, Stepped)
    assert kv_of(third).used_blocks > 0
    assert isinstance(last, Idle)
    assert kv_of(last).used_blocks == 0
    assert last.state.num_running == last.state.num_waiting == 0


def test_requests_that_come_together_run_together() -> None:
    _, step, *_ = Script([request(i, prompt_len=3) for i in range(5)]).run()
    assert isinstance(step, Stepped)
    assert [admission.request_id for admission in step.admissions] == [0, 1, 2, 3, 4]
    assert step.num_computed_tokens == 15


def test_finish_ends_one_branch_and_leaves_the_others() -> None:
    reports = Script([request(1, n=3)], [], [Finish(1, 1), Finish(1, 7), Finish(9, 0)]).run()
    indices = [[delta.index for delta in report.deltas] for report in reports if isinstance(report, Stepped)]
    assert indices[:2] == [[0, 1, 2]] * 2
    assert indices[2:] == [[0, 2]] * 28


def test_request_that_comes_and_goes_at_once_is_followed_by_a_report() -> None:
    assert [type(report) for report in Script([request(1), Abort(1)]).run()] == [Idle, Idle]


def test_pin_stays_until_it_is_aborted() -> None:
    reports = Script([pin(-1), pin(-2, 30)], [], [], [], [Abort(-1)]).run()
    states = [report.state for report in reports if isinstance(report, Stepped | Idle)]
    assert [(state.pins, state.num_pinned_blocks) for state in states] == [
        ((), 0),
        ((-1,), 3 + 8),      # the budget of a step is 16
        ((-1,), 3 + 8),
        ((-1, -2), 3 + 8 - 2),
        ((-1, -2), 9),
        ((-2,), 8),
    ]
    assert kv_of(reports[-1]).pinned_blocks == kv_of(reports[-1]).used_blocks == 8


def test_request_that_pins_have_made_impossible_is_refused_and_the_engine_goes_on() -> None:
    """It was checked against limits from before the pin; so was a pin that would break what was let in meanwhile."""
    group = request(2, n=4)  # 2 blocks, and 4 times 8: 34
    _, refused, *_ = reports = Script([pin(-1, 79), pin(-3, 43), group, request(3, n=2)]).run()
    assert isinstance(refused, RequestRefused)
    assert (refused.request_id, refused.param, refused.code) == (2, "prompt", "context_length_exceeded")
    assert "64 (num_kv_blocks), 31 of them pinned" in refused.message
    steps = [report for report in reports if isinstance(report, Stepped)]
    assert {delta.request_id for step in steps for delta in step.deltas} == {-1, -3, 3}

    _, refused, *_ = Script([group, pin(-1, 79), pin(-2, 79)]).run()
    assert isinstance(refused, RequestRefused)
    assert (refused.request_id, refused.code) == (-2, None)
    assert "a request that was let in needs 34" in refused.message


def test_state_follows_every_step() -> None:
    reports = Script([request(i, prompt_len=9) for i in range(3)]).run()  # the budget of a step is 16
    steps = [report for report in reports if isinstance(report, Stepped)]
    assert [(step.state.num_running, step.state.num_waiting) for step in steps[:2]] == [(2, 1), (3, 0)]
    assert [kv_of(step).num_sequences for step in steps[:2]] == [2, 3]
    assert steps[-1].state.num_running == kv_of(steps[-1]).used_blocks == 0


def test_blocks_are_shown_between_two_steps_and_at_rest() -> None:
    show = GetBlocks(5, first=1, count=2)
    reports = Script([show], [], [request(1, prompt_len=8)], [], [show]).run()
    assert [type(report) for report in reports[:5]] == [Idle, BlocksReply, Idle, Stepped, Stepped]
    at_rest, amid = [report for report in reports if isinstance(report, BlocksReply)]
    assert at_rest.command == amid.command == show
    assert [(entry.block, entry.state) for entry in at_rest.map.blocks] == [(1, "free"), (2, "free")]
    assert [entry.state for entry in amid.map.blocks] == ["used", "used"]
    assert [(holder.request_id, holder.num_tokens) for holder in amid.map.holders] == [(1, 9)]


def test_owners_are_counted_from_time_to_time_and_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "OWNER_COUNT_INTERVAL_S", 3600.0)
    command = request(1)
    command.request.owner = "key-1"
    first, *steps, last = Script([command]).run()
    assert kv_of(first).blocks_by_owner == kv_of(last).blocks_by_owner == {}
    counts = [kv_of(step).blocks_by_owner for step in steps]
    assert counts == [{"key-1": 3}, *[None] * (len(steps) - 2), {}]


def test_lost_block_is_found_when_the_quiet_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_CHECK_DELAY_S", 0.0)
    harness = Harness(num_blocks=64)
    harness.cache._pool.allocate(1)
    loop = EngineLoop(Engine(harness.scheduler, harness.executor), SimpleQueue(), lambda report: None, NO_HEARTBEAT)
    with pytest.raises(AssertionError, match="but held"):
        loop.run()


def test_lost_block_is_found_although_somebody_watches_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look is a command, a second after the one before; the quiet lasts all the same."""
    monkeypatch.setattr(process, "IDLE_CHECK_DELAY_S", 20.0)
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: float(num_looks)))
    harness, commands = Harness(num_blocks=64), SimpleQueue[bytes]()
    harness.cache._pool.allocate(1)
    num_looks = 0

    def look(report: Report) -> None:
        nonlocal num_looks
        if isinstance(report, Idle):
            num_looks += 1
            commands.put(frame(GetBlocks(num_looks, 0, 1))[LENGTH_BYTES:])

    loop = EngineLoop(Engine(harness.scheduler, harness.executor), commands, look, NO_HEARTBEAT)
    with pytest.raises(AssertionError, match="but held"):
        loop.run()
    assert 20 <= num_looks < 40, "a slice of the check between two commands is enough"


def test_blocks_are_looked_for_once_in_a_quiet_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "IDLE_CHECK_DELAY_S", 0.0)
    num_begun = num_checks = 0
    show = GetBlocks(1, 0, 1)
    script = Script([request(1)], *[[]] * 30, *[[show], []] * 3)

    def checking() -> Iterator[None]:
        nonlocal num_begun, num_checks
        num_begun += 1
        yield
        num_checks += 1

    monkeypatch.setattr(script.harness.scheduler, "checking", checking)
    assert len([report for report in script.run() if isinstance(report, BlocksReply)]) == 3
    assert (num_begun, num_checks) == (2, 1), "dropped when a request came, but not for a look at the blocks"
