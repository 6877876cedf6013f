"""Kill matrix of two nodes: each process is killed and stopped in each phase; both nodes end, and a restart serves.

A process that only supervises is the server of node 0, and the command of node 1. `make matrix` runs all rows between
two network namespaces, or between two addresses where the system does not permit these.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path

import pytest

from quire.extension.isas import usable_isas
from support.kill_matrix import Asking, Run, check_end, check_goes_on, expected_tokens, reach
from support.namespaces import Machine, loopback_addresses, may_make_namespaces, two_namespaces
from support.nodes import NodeCommand, free_port
from support.server import wait_until

pytestmark = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")

PROCESSES = ("server", "engine", "command", "member")
PHASES = ("joining", "loading", "idle", "prefill", "decode", "leaving")
SUPERVISORS = ("server", "command")


class NodesRun(Run):
    """A server and the command of node 1, on a machine each."""

    def __init__(self, model: Path, machines: tuple[Machine, Machine], folder: Path, port: int) -> None:
        (folder / "secret").write_text("0123456789abcdef")
        first, self._second = machines
        flags = [
            "--master-addr", first.address, "--master-port", str(port), "--node-secret-file", str(folder / "secret"),
        ]  # fmt: skip
        super().__init__(model, folder, *flags, within=first.prefix)
        self._command: NodeCommand | None = None

    @property
    def command(self) -> NodeCommand:
        """The command of node 1, which has been started."""
        assert self._command is not None
        return self._command

    def start_command(self) -> None:
        self._command = NodeCommand(*self._flags, "--node-rank", "1", within=self._second.prefix)

    def start(self) -> None:
        self.start_server()
        self.start_command()

    def complete(self) -> None:
        """Start the other node."""
        (self.start_command if self._command is None else self.start_server)()

    def pid(self, process: str) -> int | None:
        if process in ("server", "engine"):
            return super().pid(process)
        own = self.command.process.pid
        found = [own] if process == "command" else [pid for pid in self.command.pids() if pid != own]
        return found[0] if found else None

    def pids(self) -> list[int]:
        return super().pids() + ([] if self._command is None else self._command.pids())

    def close(self) -> None:
        if self._command is not None:
            self._command.close()
        super().close()


@contextmanager
def machines_of(kind: str) -> Iterator[tuple[Machine, Machine]]:
    if kind == "addresses":
        yield loopback_addresses()
        return
    if not may_make_namespaces():
        pytest.skip("the system does not permit network namespaces (ip netns)")
    with two_namespaces() as machines:
        yield machines


def reach_phase(run: NodesRun, phase: str, process: str) -> Asking | None:
    """Bring a run to a phase; return the request that runs in it."""
    if phase != "joining":
        return reach(run, phase)
    (run.start_server if process in ("server", "engine") else run.start_command)()  # not the other node
    wait_until(lambda: run.pid(process) is not None)
    return None


def check_row(
    process: str, phase: str, fault: str, model: Path, kind: str, folder: Path, *, starts_again: bool = True
) -> None:
    """Run a row: reach the phase, strike the process, watch the end, start again."""
    with machines_of(kind) as machines, ExitStack() as stack:
        port = free_port() if kind == "addresses" else 29501

        def new_run() -> NodesRun:
            run = NodesRun(model, machines, folder, port)
            stack.callback(run.close)
            return run

        run = new_run()
        asking = reach_phase(run, phase, process)
        pid = run.pid(process)
        assert pid is not None
        if fault == "stop" and process in SUPERVISORS:
            check_goes_on(run, pid, phase, asking, waits=phase == "joining")
        else:
            check_end(run, pid, fault, asking)
        if not starts_again:
            return
        again = new_run()
        again.start()
        again.server.wait_ready()
        assert again.token_ids() == expected_tokens(model)
        again.server.signal(signal.SIGTERM)
        assert again.server.wait() == 0
        status, output = again.command.wait()
        assert (status, output.splitlines()[-1]) == (1, "quire: rank 0 was closed")
        assert not again.pids()


def test_both_nodes_end_and_a_restart_serves(demo_model: Path, tmp_path: Path) -> None:
    check_row("server", "prefill", "kill", demo_model, "addresses", tmp_path)


def test_run_goes_on_beside_a_command_that_was_stopped(demo_model: Path, tmp_path: Path) -> None:
    check_row("command", "idle", "stop", demo_model, "addresses", tmp_path, starts_again=False)


def test_nodes_in_namespaces_end(demo_model: Path, tmp_path: Path) -> None:
    check_row("engine", "loading", "kill", demo_model, "namespaces", tmp_path, starts_again=False)


@pytest.mark.matrix
@pytest.mark.parametrize(("process", "phase", "fault"), list(product(PROCESSES, PHASES, ("kill", "stop"))))
def test_kill_matrix(process: str, phase: str, fault: str, demo_model: Path, tmp_path: Path) -> None:
    kind = "namespaces" if may_make_namespaces() else "addresses"
    check_row(process, phase, fault, demo_model, kind, tmp_path)
