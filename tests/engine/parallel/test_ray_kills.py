"""Kill matrix of ranks that Ray places: each process is killed and stopped in each phase, on a cluster of two nodes.

What is left is looked for on all nodes, among processes and in Ray's own state. With `--restart-engine` the server
starts the whole set again; where the server itself ends, another one serves. A process that only supervises is the
server, and the actor, which has the rank's process as a child. `make ray` runs all rows.
"""

import importlib.util
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from itertools import product
from pathlib import Path

import psutil
import pytest

from quire.engine.parallel.node import PROCESS_MODULE
from quire.extension.isas import usable_isas
from support.kill_matrix import Asking, Run, check_end, check_goes_on, expected_tokens, reach
from support.ray_cluster import RayCluster
from support.server import is_running, wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

SUPERVISORS = ("server", "actor")
PROCESSES = ("server", "engine", "actor", "member")
SET = PROCESSES[1:]
PHASES = ("loading", "idle", "prefill", "decode", "leaving")
SERVING = ("idle", "prefill", "decode")
FAULTS = ("kill", "stop")
ROWS = [*product(("server", "engine"), ("placing",), FAULTS), *product(PROCESSES, PHASES, FAULTS)]


class RayRun(Run):
    """A server, and an actor with a rank's process on another node."""

    def __init__(self, model: Path, cluster: RayCluster, folder: Path) -> None:
        flags = ["--distributed-executor-backend", "ray", "--restart-engine", "1"]
        super().__init__(model, folder, *flags, env={"RAY_ADDRESS": cluster.address})
        self._cluster = cluster

    def complete(self) -> None:
        """Free the place that the run waits for."""
        self._cluster.empty()

    def pid(self, process: str) -> int | None:
        if process in ("server", "engine"):
            return super().pid(process)
        text = {"actor": "ray::RankActor", "member": PROCESS_MODULE}[process].encode()
        return next((pid for pid in self._cluster.worker_pids() if text in _command_line(pid)), None)

    def pids(self) -> list[int]:
        return super().pids() + self._cluster.worker_pids()

    def close(self) -> None:
        """Kill what still runs, that of other runs on the cluster, too."""
        super().close()
        for pid in self._cluster.worker_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_left(self) -> None:
        """Wait until nothing is left on the nodes, and in Ray's state."""
        wait_until(lambda: not self._cluster.live() and not self.pids())


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster(2) as cluster:
        yield cluster


def reach_phase(run: RayRun, phase: str, cluster: RayCluster) -> Asking | None:
    """Bring a run to a phase; return the request that runs in it."""
    if phase != "placing":
        return reach(run, phase)
    cluster.fill()
    run.start()
    wait_until(lambda: cluster.live() == ["placement group PENDING"])
    return None


def check_restart(run: RayRun, pid: int, fault: str, asking: Asking | None) -> None:
    """Kill or stop a process of the set; the request ends, all of the set ends, and the server starts another one."""
    before = [run.pid(each) for each in SET]
    os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    wait_started_again(run, before)
    if asking is not None:
        asking.wait_ended()


def wait_started_again(run: RayRun, before: list[int | None]) -> None:
    """Wait until the processes of a set have ended, and another one serves."""
    wait_until(lambda: not any(map(is_running, filter(None, before))))
    wait_until(lambda: run.pid("engine") not in (None, *before))
    wait_until(run.is_healthy)


def check_serves(run: RayRun, model: Path) -> None:
    """Ask, and drain the server; nothing is left."""
    assert run.token_ids() == expected_tokens(model)
    run.server.signal(signal.SIGTERM)
    assert run.server.wait() == 0
    run.wait_left()


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(("process", "phase", "fault"), ROWS)
def test_kill_matrix(
    process: str, phase: str, fault: str, cluster: RayCluster, demo_model: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        stack.callback(cluster.empty)

        def new_run() -> RayRun:
            run = RayRun(demo_model, cluster, tmp_path)
            stack.callback(run.close)
            return run

        run = new_run()
        asking = reach_phase(run, phase, cluster)
        pid = run.pid(process)
        assert pid is not None
        if fault == "stop" and process in SUPERVISORS:
            check_goes_on(run, pid, phase, asking, waits=phase == "placing")
        elif process != "server" and phase in SERVING:
            check_restart(run, pid, fault, asking)
            check_serves(run, demo_model)
            return
        else:
            check_end(run, pid, fault, asking)
        run.wait_left()
        cluster.empty()
        again = new_run()
        again.start()
        again.server.wait_ready()
        check_serves(again, demo_model)


@pytest.mark.parametrize("fault", FAULTS)
def test_rank_of_a_stopped_actor_is_missed(fault: str, cluster: RayCluster, demo_model: Path, tmp_path: Path) -> None:
    with closing(RayRun(demo_model, cluster, tmp_path)) as run:
        asking = reach(run, "decode")
        actor, member = run.pid("actor"), run.pid("member")
        assert actor is not None
        assert member is not None
        os.kill(actor, signal.SIGSTOP)
        check_restart(run, member, fault, asking)
        check_serves(run, demo_model)


def test_run_goes_on_without_a_raylet_until_ray_gives_up_its_node(demo_model: Path, tmp_path: Path) -> None:
    with RayCluster(3) as cluster, closing(RayRun(demo_model, cluster, tmp_path)) as run:
        reach(run, "idle")
        engine, actor, member = (run.pid(each) for each in SET)
        raylet = psutil.Process(actor).ppid()
        os.kill(raylet, signal.SIGSTOP)
        assert run.token_ids() == expected_tokens(demo_model)
        wait_started_again(run, [engine, member])
        assert run.pid("member") not in (None, member)
        os.kill(raylet, signal.SIGCONT)  # Ray ends it, and what it has started
        wait_until(lambda: not is_running(raylet))
        check_serves(run, demo_model)
