"""Tensor parallelism on one machine: N ranks of one thread, in both modes, beside one process with N threads.

    python bench/tensor_parallel.py MODEL [--ranks 2] [--turns 3] [--quick]

Each measurement loads the model in a process of its own; the ways take turns, A B C, C B A. `decode1` is the median
time between tokens of one sequence, `offline64` the time of 64 requests that are asked at once. A figure is the median
over turns, a ratio that of one turn, with extremes. Of the ranks it also prints the median time that a step's plan
takes to be sent to the others, the exchanges of a step and the bytes that a rank gets for a token, and the memory of
each process (PSS).
"""

import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from quire import LLM
from quire.cli.bench.machine import machine_facts
from quire.cli.bench.passes import latency_pass
from quire.engine.parallel.leader import RankSet
from quire.model.sharding import Mode
from quire.model.source import read_folder
from quire.sim.cost import Exchanges
from quire.sim.workloads import WorkItem

WAYS = ("process", "gather", "reduce")
MIB = 1 << 20


def main(
    model: Annotated[Path, typer.Argument(help="folder in Hugging Face format, bfloat16")],
    ranks: int = 2,
    turns: int = 3,
    quick: Annotated[bool, typer.Option("--quick", help="few tokens: whether it runs")] = False,
    way: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Compare ranks with threads."""
    if way:
        print(json.dumps(measure(model, ranks, way, quick=quick)))
        return
    print(machine_facts(), f"{ranks} ranks of one thread, one process with {ranks} threads", sep="\n")
    found: dict[str, list[dict[str, float]]] = {each: [] for each in WAYS}
    for turn in range(turns):
        for each in WAYS if turn % 2 == 0 else WAYS[::-1]:
            command = [sys.executable, __file__, str(model), "--ranks", str(ranks), "--way", each]
            run = subprocess.run([*command, *["--quick"] * quick], capture_output=True, text=True, check=False)
            if run.returncode:
                raise SystemExit(run.stderr)
            found[each].append(json.loads(run.stdout.splitlines()[-1]))
    for name, unit in (("decode1", "ms per token"), ("offline64", "s")):
        values = {each: [turn[name] for turn in found[each]] for each in WAYS}
        shown = ", ".join(f"{each} {spread(values[each])}" for each in WAYS)
        print(f"{name}, {unit}: {shown}")
        for ours, theirs in (("gather", "process"), ("reduce", "process"), ("reduce", "gather")):
            ratios = [a / b for a, b in zip(values[ours], values[theirs], strict=True)]
            print(f"  {ours} / {theirs} {spread(ratios)}")
    last = found["gather"][-1]
    print(f"a plan is sent in {last['decode1_send']:.0f} us with 1 sequence, {last['offline64_send']:.0f} us with many")
    for each in WAYS[1:]:
        last = found[each][-1]
        print(f"{each}: exchanges, bytes for a token: {last['exchanged']}; memory (PSS), MiB: {last['memory']}")


def spread(values: list[float]) -> str:
    """Return the median and the extremes."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def measure(model: Path, num_ranks: int, way: str, *, quick: bool) -> dict[str, object]:
    """Return the figures of one way, in this process."""
    torch.set_num_threads(num_ranks)
    send, times_s = RankSet.send_plan, list[float]()

    def timed(ranks: RankSet, plan: object) -> None:
        began_s = time.perf_counter()
        send(ranks, plan)  # type: ignore[arg-type]
        times_s.append(time.perf_counter() - began_s)

    RankSet.send_plan = timed  # type: ignore[method-assign,assignment]
    options: dict[str, Any] = {}
    if way != "process":
        options = {"tensor_parallel_size": num_ranks, "tensor_parallel_mode": way}
    num_tokens = 8 if quick else 96
    found: dict[str, object] = {}
    with LLM(str(model), dtype="bfloat16", kv_cache_memory="1GiB", max_num_seqs=64, max_model_len=1024,
             enable_prefix_caching=False, **options) as llm:  # fmt: skip
        for name, num_requests in (("decode1", 1), ("offline64", 4 if quick else 64)):
            items = [WorkItem([3 + (row * 31 + i) % 900 for i in range(48)], num_tokens) for row in range(num_requests)]
            latency_pass(llm, items[:1], concurrency=1)
            times_s.clear()
            began_s = time.perf_counter()
            timelines = latency_pass(llm, items, concurrency=num_requests)
            took_s = time.perf_counter() - began_s
            gaps = [b - a for each in timelines for a, b in pairwise(each.token_times_s)]
            found[name] = took_s if name == "offline64" else 1000 * statistics.median(gaps)
            found[f"{name}_send"] = 1e6 * statistics.median(times_s) if times_s else 0.0
        found["memory"] = [pss_bytes(pid) // MIB for pid in processes()]
    if way != "process":
        mode: Mode = "gather" if way == "gather" else "reduce"
        found["exchanged"] = Exchanges.of(read_folder(model).spec, torch.bfloat16.itemsize, num_ranks, mode)
    return found


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
