"""Tensor parallelism on one machine: N ranks of one thread, in both modes, beside one process with N threads.

    python bench/tensor_parallel.py MODEL [--ranks 2] [--turns 3] [--tokens 96] [--requests 64]

Each way has loaded the model in processes of its own, which sleep while the others take their turns, A B C, C B A.
`decode1` is the median time between tokens of one sequence, `offline` the time of `--requests` requests that are asked
at once. A figure is the median over turns, a ratio that of one turn, with extremes. Of the ranks it also prints the
median time that a step's plan takes to be sent to the others, the exchanges of a step and the bytes that a rank gets
for a token, and the memory of each process (PSS).
"""

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from quire import LLM
from quire.engine.parallel.rank_set import RankSet
from quire.extension.isas import set_threads_of_kernels
from quire.model.sharding import Mode
from quire.model.source import read_folder
from quire_lab.bench.passes import latency_pass
from quire_lab.bench.report import machine_facts
from quire_lab.sim.hardware import Exchanges
from quire_lab.sim.workloads import WorkItem

WAYS = ("process", "gather", "reduce")
MIB = 1 << 20


def main(
    model: Annotated[Path, typer.Argument(help="folder in Hugging Face format, bfloat16")],
    ranks: int = 2,
    turns: int = 3,
    tokens: Annotated[int, typer.Option(help="of each answer")] = 96,
    requests: Annotated[int, typer.Option(help="asked at once")] = 64,
    way: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Compare ranks with threads."""
    if way:
        measure(model, ranks, way, tokens, requests)
        return
    print(machine_facts(), f"{ranks} ranks of one thread, one process with {ranks} threads", sep="\n")
    found: dict[str, list[dict[str, float]]] = {each: [] for each in WAYS}
    command = [sys.executable, __file__, str(model), "--ranks", str(ranks)]
    command += ["--tokens", str(tokens), "--requests", str(requests)]
    with ExitStack() as stack:
        runs = {each: stack.enter_context(started([*command, "--way", each])) for each in WAYS}
        for turn in range(turns):
            for each in WAYS if turn % 2 == 0 else WAYS[::-1]:
                found[each].append(asked(runs[each]))
    for name, unit in (("decode1", "ms per token"), ("offline", "s")):
        values = {each: [turn[name] for turn in found[each]] for each in WAYS}
        shown = ", ".join(f"{each} {spread(values[each])}" for each in WAYS)
        print(f"{name}, {unit}: {shown}")
        for ours, theirs in (("gather", "process"), ("reduce", "process"), ("reduce", "gather")):
            ratios = [a / b for a, b in zip(values[ours], values[theirs], strict=True)]
            print(f"  {ours} / {theirs} {spread(ratios)}")
    last = found["gather"][-1]
    print(f"a plan is sent in {last['decode1_send']:.0f} us with 1 sequence, {last['offline_send']:.0f} us with many")
    for each in WAYS[1:]:
        last = found[each][-1]
        print(f"{each}: exchanges, bytes for a token: {last['exchanged']}; memory (PSS), MiB: {last['memory']}")


def spread(values: list[float]) -> str:
    """Return the median and the extremes."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def started(command: list[str]) -> subprocess.Popen[str]:
    """Start a way, and return it when it has loaded."""
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    if run.stdout.readline() != "ready\n":
        raise SystemExit(f"{command[-1]} ended with status {run.wait()}")
    return run


def asked(run: subprocess.Popen[str]) -> dict[str, float]:
    """Let a way measure once; return its figures."""
    assert run.stdin is not None
    assert run.stdout is not None
    run.stdin.write("measure\n")
    run.stdin.flush()
    return json.loads(run.stdout.readline())  # type: ignore[no-any-return]


def measure(model: Path, num_ranks: int, way: str, num_tokens: int, num_at_once: int) -> None:
    """Print the figures of one way, in this process, for each line that is read."""
    set_threads_of_kernels(num_ranks)
    send, times_s = RankSet.send_plan, list[float]()

    def timed(ranks: RankSet, plan: object) -> None:
        began_s = time.perf_counter()
        send(ranks, plan)  # type: ignore[arg-type]
        times_s.append(time.perf_counter() - began_s)

    RankSet.send_plan = timed  # type: ignore[method-assign,assignment]
    options: dict[str, Any] = {}
    if way != "process":
        options = {"tensor_parallel_size": num_ranks, "tensor_parallel_mode": way}
    with LLM(str(model), dtype="bfloat16", kv_cache_memory="1GiB", max_num_seqs=64, max_model_len=1024,
             enable_prefix_caching=False, **options) as llm:  # fmt: skip
        print("ready", flush=True)
        for _ in sys.stdin:
            found: dict[str, object] = {"memory": [pss_bytes(pid) // MIB for pid in processes()]}
            if way != "process":
                mode: Mode = "gather" if way == "gather" else "reduce"
                found["exchanged"] = Exchanges.of(read_folder(model).spec, torch.bfloat16.itemsize, num_ranks, mode)
            for name, num_requests in (("decode1", 1), ("offline", num_at_once)):
                found |= passed(llm, name, num_requests, num_tokens, times_s)
            print(json.dumps(found), flush=True)


def passed(llm: LLM, name: str, num_requests: int, num_tokens: int, times_s: list[float]) -> dict[str, object]:
    """Return the figures of one pass; `times_s` are those in which plans were sent."""
    items = [WorkItem([3 + (row * 31 + i) % 900 for i in range(48)], num_tokens) for row in range(num_requests)]
    latency_pass(llm, items[:1], concurrency=1)
    times_s.clear()
    began_s = time.perf_counter()
    timelines = latency_pass(llm, items, concurrency=num_requests)
    took_s = time.perf_counter() - began_s
    gaps = [b - a for each in timelines for a, b in pairwise(each.token_times_s)]
    value = took_s if name == "offline" else 1000 * statistics.median(gaps)
    return {name: value, f"{name}_send": 1e6 * statistics.median(times_s) if times_s else 0.0}


def processes() -> list[int]:
    """Return this process and its children."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [os.getpid(), *map(int, children)]


def pss_bytes(pid: int) -> int:
    """Return the memory of a process, pages shared by several divided among them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    typer.run(main)
