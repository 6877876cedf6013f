"""Ranks on a Ray cluster of two nodes of this machine: `python tests/ray_ranks.py MODE MODEL`; prints what holds.

small: answers of two ranks have the bits of one, and a killed actor ends the run. full: nodes by number, a server that
starts the whole set again, refusals, and an engine process that is killed.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from quire import LLM, RequestOutput, SamplingParams
from quire.core.errors import EngineError, RankLostError
from support.server import running_server, wait_until

LIMIT_S = 120.0
MEMBER = "quire.engine.nodes.member"
PROMPTS = [[5, 9, 11, 200, 31] * 9, [7] * 40, [5, 9, 11, 200, 31] * 9 + [4, 4]]
SAMPLED = SamplingParams(temperature=0.9, seed=4, max_tokens=12, logprobs=2, prompt_logprobs=1, ignore_eos=True, n=2)
LONG = SamplingParams(max_tokens=1000, ignore_eos=True)
SETTINGS: dict[str, Any] = {"num_kv_blocks": 64, "max_model_len": 512, "max_num_batched_tokens": 33}
ON_RAY: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Run two nodes of one CPU each; nothing is left of them."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")       # short: sockets are in it
    node = {"num_cpus": 1, "object_store_memory": 78 << 20}
    os.environ["RAY_TMPDIR"] = folder
    nodes = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    nodes.add_node(**node)
    nodes.wait_for_nodes()
    os.environ["RAY_ADDRESS"] = nodes.address
    try:
        yield nodes
    finally:
        nodes.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=LIMIT_S)
    assert not alive, f"left behind: {alive}"


def members() -> list[psutil.Process]:
    """Return the processes of ranks that Ray has started for this one or its children."""
    return [each for each in psutil.Process().children(recursive=True) if MEMBER in " ".join(command_of(each))]


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def bits(outputs: list[RequestOutput]) -> list[object]:
    return [(o.prompt_logprobs, [(c.token_ids, c.logprobs) for c in o.outputs]) for o in outputs]


def answers(model: str, **settings: Any) -> list[object]:  # noqa: ANN401
    with LLM(model, **SETTINGS, **settings) as llm:
        return bits(llm.generate(PROMPTS, SAMPLED, use_tqdm=False))


def small(model: str) -> None:
    expected = answers(model)
    with LLM(model, **SETTINGS, **ON_RAY) as llm:
        assert bits(llm.generate(PROMPTS, SAMPLED, use_tqdm=False)) == expected
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


def full(model: str) -> None:
    expected = answers(model)
    assert answers(model, **ON_RAY, nnodes=2) == expected       # and again, in the places that were freed
    assert answers(model, **ON_RAY, nnodes=2) == expected
    print("TWO NODES", flush=True)
    assert "not found 4 machines with 1 free CPUs each within 2 s" in refusal(
        model, tensor_parallel_size=4, nnodes=4, start_timeout=4.0
    )
    print("REFUSED", flush=True)
    server(model)
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


def server(model: str) -> None:
    """Kill the actor, the rank and the engine in turn: the server starts the whole set again, and answers as before."""
    flags = ["-tp", "2", "--distributed-executor-backend", "ray", "--num-kv-blocks", "64", "--max-model-len", "512"]
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with running_server(model, *flags, "--restart-engine", "3", env={"RAY_ADDRESS": os.environ["RAY_ADDRESS"]}) as http:

        def token_ids() -> list[int]:
            return http.post("/v1/completions", body).json()["choices"][0]["token_ids"]

        expected = token_ids()
        for name in ("ACTOR", "RANK", "ENGINE"):
            before = {each.pid for each in members()}
            (member,) = members()
            engine = next(p for p in psutil.Process().children(True) if "quire.engine.process" in command_of(p))
            victim = {"ACTOR": member.parent(), "RANK": member, "ENGINE": engine}[name]
            assert victim is not None
            victim.kill()
            wait_until(lambda: http.get("/health").status_code == 503)
            wait_until(lambda: http.get("/health").status_code == 200)
            assert token_ids() == expected
            assert before.isdisjoint(each.pid for each in members())
            print(name, "KILLED", flush=True)
        http.signal(signal.SIGTERM)
        assert http.wait() == 0
        wait_until(lambda: not members())


if __name__ == "__main__":
    with cluster():
        {"small": small, "full": full}[sys.argv[1]](sys.argv[2])
