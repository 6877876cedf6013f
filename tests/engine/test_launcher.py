"""Lifetime of the engine process: it ends with the server, however that ends, and by nothing else."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quire
from quire import SamplingParams
from quire.core.errors import ConfigError
from quire.engine.launcher import STOP_SIGNALS, EngineProcess, start_module
from quire.engine.options import EngineOptions
from quire.engine.processes.client import EngineClient
from support.engine_process import (
    TIMEOUT_S,
    Recorder,
    add,
    is_at_rest,
    is_running,
    open_files,
    read,
    until,
    wait_until,
)
from support.stopping import stopped

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

# A server: prints the engine's process id and what it is doing, then waits, or ends without a word to the engine.
SERVER = """
import asyncio, os, sys
from quire.core.sampling_params import SamplingParams
from quire.engine.launcher import EngineProcess
from quire.engine.processes.client import EngineClient
from quire.engine.options import EngineOptions
from support.engine_process import QUIET_S, Recorder, add, until

async def main(moment):
    options = EngineOptions(max_num_batched_tokens=65536, max_num_seqs=64)
    child = EngineProcess.spawn(options)
    if moment == "loading":
        print(child.process.pid, flush=True)
        await asyncio.Event().wait()
    recorder = Recorder()
    client = await EngineClient.connect(child, options, recorder)
    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    streams = [await add(client, [i], params) for i in range(8)]
    await until(lambda: client.state.num_running == 8)
    if moment == "in a long step":  # as 16,000 tokens make one: 18 seconds on one core
        long = SamplingParams(max_tokens=2, ignore_eos=True)
        streams += [await add(client, [i] * 2000, long) for i in range(30)]
        num_steps = 0
        while num_steps < len(recorder.steps):
            num_steps = len(recorder.steps)
            await asyncio.sleep(3 * QUIET_S)
    print(child.process.pid, flush=True)
    if moment == "at its end":
        return
    await asyncio.Event().wait()

asyncio.run(main(sys.argv[1]))
"""


def server(moment: str, folder: Path) -> subprocess.Popen[str]:
    """Start a server that is about to die, with a folder for whatever files it and its engine may leave."""
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", SERVER, moment],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment,
    )  # fmt: skip


def told_pid(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def engine_of(process: subprocess.Popen[str]) -> int:
    pid = told_pid(process)
    assert is_running(pid)
    return pid


@pytest.mark.parametrize("moment", ["loading", "between steps", "in a long step"])
def test_engine_ends_with_a_server_that_is_killed(moment: str, tmp_path: Path) -> None:
    process = server(moment, tmp_path)
    pid = engine_of(process)
    process.kill()
    process.communicate(timeout=TIMEOUT_S)
    wait_until(lambda: not is_running(pid))
    assert list(tmp_path.iterdir()) == []


def test_engine_ends_with_a_server_that_ends_without_a_word(tmp_path: Path) -> None:
    process = server("at its end", tmp_path)
    pid = told_pid(process)  # and by now both may have ended
    _, told = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert told == ""
    wait_until(lambda: not is_running(pid))
    assert list(tmp_path.iterdir()) == []


def test_engine_holds_one_socket_and_no_file(demo_model: Path) -> None:
    """A port, a pipe of the server's or a lock would outlive what it is for."""
    options = EngineOptions(str(demo_model))

    async def run() -> list[str]:
        with open(os.devnull, encoding="ascii") as ours:
            os.set_inheritable(ours.fileno(), True)
            client = await EngineClient.connect(EngineProcess.spawn(options), options, Recorder())
        pid = client._connection.engine.process.pid
        await until(lambda: is_at_rest(client))
        held = await until(lambda: files if len(files := open_files(pid)) == 1 else [])  # modules load for a while
        await client.close()
        return held

    (held,) = asyncio.run(run())
    assert held.startswith("socket:")


def test_signals_of_a_terminal_and_a_service_manager_are_left_to_the_server(demo_model: Path) -> None:
    """From the very first moment: they come as fast as they can while the engine loads, and while it runs."""
    options = EngineOptions(str(demo_model))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    async def run() -> None:
        child = EngineProcess.spawn(options)
        bombing = asyncio.create_task(bomb(child))
        client = await EngineClient.connect(child, options, Recorder())
        output = (await read(await add(client, "x", GREEDY)))[-1]
        assert len(output.outputs[0].token_ids) == 6
        assert not bombing.done()
        bombing.cancel()
        await client.close()
        assert child.process.returncode == 0

    async def bomb(child: EngineProcess) -> None:
        while True:
            for number in (*STOP_SIGNALS, *STOP_SIGNALS):
                os.kill(child.process.pid, number)
            await asyncio.sleep(0.001)

    asyncio.run(run())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_signal_that_comes_while_a_process_starts_is_not_lost() -> None:
    def interrupted(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:  # noqa: ANN401 (as Popen)
        process = subprocess.Popen(*args, **kwargs)
        signal.raise_signal(signal.SIGTERM)
        assert came == [], "not in the middle"
        return process

    came = list[int]()
    handler = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        child = EngineProcess(*start_module("quire.engine.processes.engine_process", start=interrupted))
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert came == [signal.SIGTERM]
    child.stop()


def test_process_that_cannot_be_started_leaves_no_socket() -> None:
    before = open_files(os.getpid())
    with pytest.raises(FileNotFoundError):
        start_module("quire.engine.processes.engine_process", interpreter="/no/such/python")
    assert set(open_files(os.getpid())) <= set(before), "what others of this process close meanwhile is theirs"


@pytest.mark.parametrize("setting", [{"seed": 2**64}, {"kv_cache_memory": 2**70}, {"model": "caf\udce9"}], ids=str)
def test_setting_that_cannot_be_sent_is_refused(setting: dict[str, int | str]) -> None:
    with pytest.raises(ConfigError, match="64 bits or no valid Unicode"):
        EngineProcess.spawn(EngineOptions(**setting))  # type: ignore[arg-type]


def test_modules_of_the_working_directory_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever serves a model from a folder that others can write to does not run what lies there."""
    for name in ("msgspec", "torch", "logging"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(Path(quire.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    child = EngineProcess.spawn(EngineOptions())
    assert child.connection.recv(1), "it says that it has found the model"
    child.stop()


def test_ending_twice_is_fine() -> None:
    child = EngineProcess.spawn(EngineOptions())
    assert child.stop() == child.stop()
    assert not is_running(child.process.pid)


def test_engine_that_does_not_end_by_itself_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.launcher.STOP_TIMEOUT_S", 0.01)
    child = EngineProcess.spawn(EngineOptions())
    with stopped(child.process.pid):
        assert child.stop() == -signal.SIGKILL
