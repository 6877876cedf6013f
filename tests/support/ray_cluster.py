"""Ray cluster of nodes of this machine, in a process of its own: `python -m support.ray_cluster NUM_NODES`.

    with RayCluster(2) as cluster:
        cluster.address, cluster.live(), cluster.worker_pids()
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import psutil

from support.nodes import marked_pids

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

LIMIT_S = 120.0
REPLY = "REPLY "
TESTS = Path(__file__).parents[1]
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1",
    "RAY_worker_niceness": "0",  # else 15: ranks that get no CPU on a busy machine, and runs that time out
    "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")]),
}  # fmt: skip


def wait_longer_for_nodes() -> None:
    """Let Ray wait ten times as long for a node of this process as its 30 s, which no setting changes."""
    from ray._private import node

    node.time = SimpleNamespace(monotonic=lambda: time.monotonic() / 10, sleep=time.sleep, time=time.time)


@contextmanager
def cluster(num_nodes: int) -> Iterator["Cluster"]:
    """Run nodes of one CPU each; nothing is left of them. All of them start here, and no rank loads meanwhile."""
    from ray.cluster_utils import Cluster

    wait_longer_for_nodes()
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")       # short: sockets are in it
    os.environ["RAY_TMPDIR"] = folder
    node = {"num_cpus": 1, "object_store_memory": 78 << 20}
    nodes = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    for _ in range(num_nodes - 1):
        nodes.add_node(**node)
    nodes.wait_for_nodes(LIMIT_S)
    os.environ["RAY_ADDRESS"] = nodes.address
    try:
        yield nodes
    finally:
        nodes.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=LIMIT_S)
    assert not alive, f"left behind: {alive}"


class RayCluster:
    """The cluster as a child of this process, which does not import Ray."""

    def __init__(self, num_nodes: int) -> None:
        self._mark = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.ray_cluster", str(num_nodes)],
            env=os.environ | SETTINGS | {"CLUSTER_MARK": self._mark},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.address: str = self._reply()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._process.stdin, self._process.stdout:
            self._process.stdin.close()
            assert self._process.wait(LIMIT_S) == 0
        assert not marked_pids(self._mark)

    def live(self) -> list[str]:
        """Return the states of actors and placement groups that Ray has not ended; not those of `fill`."""
        return self._ask("live")

    def fill(self) -> None:
        """Reserve the CPU of a node."""
        self._ask("fill")

    def empty(self) -> None:
        """Free the CPU that `fill` has reserved, if there is one."""
        self._ask("empty")

    def worker_pids(self) -> list[int]:
        """Return the processes that run for jobs: workers, and what they have started."""
        of_jobs = set(marked_pids("RAY_JOB_ID="))
        return [pid for pid in marked_pids(self._mark) if pid in of_jobs]

    def _ask(self, question: str) -> Any:  # noqa: ANN401 (JSON)
        assert self._process.stdin is not None
        print(question, file=self._process.stdin, flush=True)
        return self._reply()

    def _reply(self) -> Any:  # noqa: ANN401 (JSON)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(REPLY):
                return json.loads(line.removeprefix(REPLY))
        raise AssertionError(f"the cluster ended with {self._process.wait()}")


class State:
    """What Ray knows of the jobs of a cluster, and room that is taken from them."""

    def __init__(self) -> None:
        self._filling: Any = None

    def live(self) -> list[str]:
        from ray._private.state import actors  # `ray list` needs the dashboard
        from ray.util import placement_group_table

        own = "" if self._filling is None else self._filling.id.hex()
        groups = [(each["placement_group_id"], each["state"]) for each in placement_group_table().values()]
        return [
            *(f"actor {each['State']}" for each in actors().values() if each["State"] != "DEAD"),
            *(f"placement group {state}" for group, state in groups if state != "REMOVED" and group != own),
        ]

    def fill(self) -> None:
        from ray.util import placement_group

        self._filling = placement_group([{"CPU": 1.0}])
        assert self._filling.wait(LIMIT_S)

    def empty(self) -> None:
        from ray.util import remove_placement_group

        if self._filling is not None:
            remove_placement_group(self._filling)
            self._filling = None


def main() -> None:
    """Run a cluster, and answer questions on stdin until its end."""
    import ray

    with cluster(int(sys.argv[1])) as nodes:
        ray.init(address=nodes.address, logging_level="ERROR", log_to_driver=False)
        state = State()
        print(f"{REPLY}{json.dumps(nodes.address)}", flush=True)
        for line in sys.stdin:
            for node in nodes.list_all_nodes():
                node.any_processes_alive()  # waits for those that have ended
            print(f"{REPLY}{json.dumps(getattr(state, line.strip())())}", flush=True)
        ray.shutdown()


if __name__ == "__main__":
    main()
