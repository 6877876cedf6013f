"""Quire on Ray Serve, on a small cluster of this machine: `python tests/ray_serve.py MODE PORT`; 0 if all holds.

small: start, one answer, one to two engine replicas under load. full: one to three and back under load, an upgrade
while serving, and a replica that is killed; no request fails but those of the killed replica. ranks: an engine of two
ranks, which has two bundles of CPUs and their threads, answers as one of one rank.
"""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx
import psutil
import ray
from ray import serve
from ray.util import placement_group_table

from fleet_soak import end_of_stream
from quire.cluster.deployment import ENGINES, DeployOptions, deploy
from quire.engine.options import EngineOptions
from quire.server.options import ServerOptions
from support.ray_cluster import wait_longer_for_nodes

LIMIT_S = 240.0
ENGINE = EngineOptions(num_kv_blocks=256, max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=64)


@contextmanager
def cluster() -> Iterator[None]:
    """Run a cluster of this machine; nothing is left of it."""
    wait_longer_for_nodes()
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")       # short: sockets are in it
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=78 << 20, log_to_driver=False, _temp_dir=folder
    )
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    children = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(children, timeout=LIMIT_S)
    assert not alive, f"left behind: {alive}"


def options(max_replicas: int) -> DeployOptions:
    return DeployOptions(
        max_replicas=max_replicas, cpus_per_engine=0.5, cpus_per_ingress=0.25, queued_tokens_per_replica=200,
        upscale_delay_s=0.2, downscale_delay_s=2.0, metrics_interval_s=0.2,
    )  # fmt: skip


def num_running() -> int:
    """Return the engine replicas that serve."""
    found = serve.status().applications["quire"].deployments[ENGINES].replica_states
    return found.get("RUNNING", 0)  # type: ignore[call-overload,no-any-return]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a state of the cluster."""
    async with asyncio.timeout(LIMIT_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.1)


class Load:
    """Clients that ask without a pause, until they are stopped."""

    def __init__(self, url: str, num_clients: int) -> None:
        self.ends = Counter[str]()
        self._is_over = False
        self._http = httpx.AsyncClient(base_url=url, timeout=LIMIT_S)
        self._clients = [asyncio.create_task(self._ask(number)) for number in range(num_clients)]

    async def _ask(self, number: int) -> None:
        while not self._is_over:
            prompt = [300 + number] * 200 + [301 + self.ends.total()] * 200
            body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "stream": True}
            response = await self._http.post("/v1/completions", json=body)
            if response.status_code == 503:
                end = "lost" if response.json()["error"]["code"] == "engine_unhealthy" else response.text
            else:
                end = end_of_stream(response.text, 1) if response.status_code == 200 else response.text
            self.ends[end] += 1

    async def stop(self) -> Counter[str]:
        """Let every client have its answer; return how requests have ended."""
        self._is_over = True
        await asyncio.gather(*self._clients)
        await self._http.aclose()
        return self.ends


def engine_process() -> psutil.Process:
    """Return the actor of an engine replica: the parent of an engine's process."""
    found = next(
        each for each in psutil.process_iter(["cmdline"])
        if "quire.engine.processes.engine_process" in " ".join(each.info["cmdline"] or ()) and _is_ours(each)
    )  # fmt: skip
    parent = found.parent()
    assert parent is not None, "an engine without its replica"
    return parent


def _is_ours(process: psutil.Process) -> bool:
    return os.getpid() in [each.pid for each in process.parents()]


async def run(port: int, *, is_full: bool) -> None:
    """Deploy, and look at what clients get."""
    server, url = ServerOptions(port=port), f"http://127.0.0.1:{port}"
    most = 3 if is_full else 2
    await asyncio.to_thread(deploy, ENGINE, server, options(most))
    body = {"prompt": "def area(", "max_tokens": 8, "temperature": 0}
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        answer = (await http.post("/v1/completions", json=body)).json()
        print("ANSWER", answer["choices"][0]["text"].encode().hex(), flush=True)
        refused = await http.post("/v1/completions", json=body | {"max_tokens": 5000})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded"), refused.text
        assert num_running() == 1
        load = Load(url, 16)
        await until(lambda: num_running() == most)
        print("SCALED UP", flush=True)
        if is_full:
            ends = await load.stop()
            assert set(ends) == {"answered"}, ends
            await until(lambda: num_running() == 1)
            print("SCALED DOWN", flush=True)
            load = Load(url, 4)
            upgraded = EngineOptions(num_kv_blocks=200, max_model_len=512, max_num_seqs=4)
            await asyncio.to_thread(deploy, upgraded, server, options(most))
            ends = await load.stop()
            assert set(ends) == {"answered"}, ends
            print("UPGRADED", flush=True)
            load = Load(url, 16)
            await until(lambda: num_running() >= 2)
            killed = engine_process()
            before = load.ends.total()
            killed.send_signal(signal.SIGKILL)
            await until(lambda: load.ends.total() > before + 60)
            ends = await load.stop()
            assert set(ends) <= {"answered", "lost"}, ends
            assert ends["lost"] <= 16, ends
            print("KILLED", flush=True)
        else:
            ends = await load.stop()
            assert set(ends) == {"answered"}, ends
        again = (await http.post("/v1/completions", json=body)).json()
        assert again["choices"][0]["text"] == answer["choices"][0]["text"]


async def run_ranks(port: int) -> None:
    """Deploy an engine of two ranks, and look at its answer, its CPUs and its processes."""
    engine = replace(ENGINE, tensor_parallel_size=2)
    await asyncio.to_thread(deploy, engine, ServerOptions(port=port), options(1))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as http:
        body = {"prompt": "def area(", "max_tokens": 8, "temperature": 0}
        answer = (await http.post("/v1/completions", json=body)).json()
    print("ANSWER", answer["choices"][0]["text"].encode().hex(), flush=True)
    bundles = [each["bundles"] for each in placement_group_table().values() if each["state"] == "CREATED"]
    assert [{"CPU": 0.5}, {"CPU": 0.5}] in [list(each.values()) for each in bundles], bundles
    children = engine_process().children()
    (process,) = (child for child in children if "quire.engine.processes.engine_process" in child.cmdline())
    (rank,) = process.children()
    assert process.environ()["OMP_NUM_THREADS"] == "2", "one thread for each rank"
    print("RANKS", flush=True)
    rank.kill()
    await until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    print("ENDED", flush=True)


if __name__ == "__main__":
    mode, asked_port = sys.argv[1], int(sys.argv[2])
    with cluster():
        asyncio.run(run_ranks(asked_port) if mode == "ranks" else run(asked_port, is_full=mode == "full"))
    print("DONE", flush=True)
