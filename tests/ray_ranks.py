"""Ranks on a Ray cluster of nodes of this machine: `python tests/ray_ranks.py MODE MODEL`; prints what holds.

small: answers of two ranks have the bits of one, and a killed actor ends the run. full: nodes by number, refusals, and
a server that starts the whole set again after each of its processes was killed, and after the loss of a node.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import psutil
import ray
from ray.cluster_utils import Cluster

from quire import LLM, SamplingParams
from quire.core.errors import EngineError, RankLostError
from support.rank_answers import PROMPTS, SAMPLED, answers
from support.ray_cluster import LIMIT_S, cluster
from support.server import ServerProcess, is_running, running_server, wait_until

MEMBER = "quire.engine.parallel.process"
LONG = SamplingParams(max_tokens=1000, ignore_eos=True)
SETTINGS: dict[str, Any] = {"num_kv_blocks": 64, "max_model_len": 512, "max_num_batched_tokens": 33}
ON_RAY: dict[str, Any] = {
    "tensor_parallel_size": 2, "distributed_executor_backend": "ray",
    "stall_limit": 120.0,  # what is killed is noticed at once; what a busy machine slows down is not lost
}  # fmt: skip


def members() -> list[psutil.Process]:
    """Return the processes of ranks that Ray has started for this one or its children."""
    return [each for each in psutil.Process().children(recursive=True) if MEMBER in " ".join(command_of(each))]


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def answers_of(model: str, **settings: Any) -> list[object]:  # noqa: ANN401
    with LLM(model, **SETTINGS, **settings) as llm:
        return answers(llm.generate(PROMPTS, SAMPLED, use_tqdm=False))


def small(model: str) -> None:
    expected = answers_of(model)
    with LLM(model, **SETTINGS, **ON_RAY) as llm:
        assert answers(llm.generate(PROMPTS, SAMPLED, use_tqdm=False)) == expected
        (member,) = members()
        actor = member.parent()
        assert actor is not None
        assert "RankActor" in " ".join(actor.cmdline())
        print("SAME BITS", flush=True)
        outputs = llm.stream(PROMPTS[:1], LONG)
        next(outputs)
        actor.kill()
        try:
            for _ in outputs:
                pass
        except RankLostError:
            print("LOST", flush=True)
        wait_until(lambda: not members())
    assert not ray.is_initialized()
    print("DONE", flush=True)


def full(model: str, nodes: Cluster) -> None:
    expected = answers_of(model)
    assert answers_of(model, **ON_RAY, nnodes=2) == expected       # and again, in the places that were freed
    assert answers_of(model, **ON_RAY, nnodes=2) == expected
    print("TWO NODES", flush=True)
    assert "not found 4 machines with 1 free CPUs each within 2 s" in refusal(
        model, tensor_parallel_size=4, nnodes=4, start_timeout=4.0
    )
    print("REFUSED", flush=True)
    server(model, nodes)
    print("DONE", flush=True)


def refusal(model: str, **settings: Any) -> str:  # noqa: ANN401
    """Return the error of a run that cannot start; nothing is left of it."""
    try:
        LLM(model, **SETTINGS, **(ON_RAY | settings))
    except EngineError as error:
        assert not members()
        assert not ray.is_initialized()
        return str(error)
    raise AssertionError("not refused")


def server(model: str, nodes: Cluster) -> None:
    """Kill the actor, the rank, the engine and the node of the rank in turn, each while a request runs.

    The request ends with the error of a dead engine, the server starts the whole set again, after the loss of a node on
    another one, and answers as before.
    """
    flags = [
        "-tp", "2", "--distributed-executor-backend", "ray", "--num-kv-blocks", "64", "--max-model-len", "512",
        "--restart-engine", "4",
    ]  # fmt: skip
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with running_server(model, *flags, env={"RAY_ADDRESS": os.environ["RAY_ADDRESS"]}) as http:

        def token_ids() -> list[int]:
            return http.post("/v1/completions", body).json()["choices"][0]["token_ids"]

        expected = token_ids()
        for name in ("ACTOR", "RANK", "ENGINE", "NODE"):
            (member,) = members()
            before = [member.pid, http.engine_pid()]
            assert ended_by(http, partial(kill, name, member, http.engine_pid(), nodes)) == "engine_unhealthy"
            wait_until(partial(have_ended, before))
            wait_until(lambda: http.get("/health").status_code == 200)
            assert token_ids() == expected
            print(name, "KILLED", flush=True)
        http.signal(signal.SIGTERM)
        assert http.wait() == 0
        wait_until(lambda: not members())


def ended_by(http: ServerProcess, fault: Callable[[], None]) -> str:
    """Cause a fault while a request runs; return the code of the error that ends its stream."""
    body = {"prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{http.url}/v1/completions", json=body, timeout=LIMIT_S) as response:
        events = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        next(events)
        fault()
        *_, error, done = events
    assert done == "[DONE]"
    return json.loads(error)["error"]["code"]


def have_ended(pids: list[int]) -> bool:
    return not any(map(is_running, pids))


def kill(name: str, member: psutil.Process, engine_pid: int, nodes: Cluster) -> None:
    """Kill a process, or all processes of the node on which the rank is."""
    if name == "NODE":
        ancestors = {each.pid for each in member.parents()}
        (node,) = [each for each in nodes.worker_nodes if raylet_pid(each) in ancestors]
        nodes.remove_node(node, allow_graceful=False)
        return
    actor = member.parent()
    assert actor is not None
    {"ACTOR": actor, "RANK": member, "ENGINE": psutil.Process(engine_pid)}[name].kill()


def raylet_pid(node: Any) -> int:  # noqa: ANN401 (Ray's)
    """Return the process of a node that starts its actors."""
    (raylet,) = node.all_processes["raylet"]
    return raylet.process.pid


if __name__ == "__main__":
    mode, path = sys.argv[1:]
    with cluster({"small": 2, "full": 3}[mode]) as started:
        small(path) if mode == "small" else full(path, started)
