#!/usr/bin/env bash
# Package: torch 2.13.0 (torch.distributed, gloo)
# Expected: a `Work.wait(timeout)` that times out leaves the work under way, and a later wait finds its result, for a
# receive as for a collective.
# Seen: so it is for an all-gather: the wait raises, `is_completed()` is False, and the next wait has the result. The same
# wait of `irecv` closes the connection of the two ranks for good: `is_completed()` is True, each later wait raises
# "Application timeout caused pair closure", and the other rank's send fails with "Connection closed by peer".
# Date: 2026-11-28
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
cat > wait.py <<'PY'
import os
import time
from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist

FOLDER = os.getcwd()


def outcome(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "done"


def run(rank, kind, results):
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/{kind}", rank=rank, world_size=2)
    own, parts = torch.full((4,), float(rank)), [torch.zeros(4), torch.zeros(4)]
    if rank == 1:
        time.sleep(2)  # the other rank looks meanwhile
        start = {"all-gather": lambda: dist.all_gather(parts, own), "receive": lambda: dist.send(own, 0)}[kind]
        results.put(("rank 1", outcome(start)))
    else:
        work = dist.all_gather(parts, own, async_op=True) if kind == "all-gather" else dist.irecv(parts[1], 1)
        early = outcome(lambda: work.wait(timedelta(seconds=0.25)))
        is_completed = work.is_completed()
        time.sleep(3)
        late = outcome(lambda: work.wait(timedelta(seconds=10)))
        results.put(("rank 0", (early != "done", is_completed, late, parts[1].tolist())))
    time.sleep(2)


def main(kind):
    results = get_context("spawn").Queue()
    processes = [get_context("spawn").Process(target=run, args=(rank, kind, results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    print(f"{kind}: {found}")
    return found


if __name__ == "__main__":
    found = main("all-gather")
    assert found == {"rank 0": (True, False, "done", [1.0] * 4), "rank 1": "done"}
    found = main("receive")
    raised, is_completed, late, part = found["rank 0"]
    assert raised
    assert is_completed, "a wait that timed out leaves the receive under way"
    assert "Application timeout caused pair closure" in late, late
    assert part == [0.0] * 4
    assert "Connection closed by peer" in found["rank 1"], found["rank 1"]
PY
venv/bin/python wait.py
