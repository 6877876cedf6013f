#!/usr/bin/env bash
# Package: torch 2.13.0 (torch.distributed, gloo)
# Expected: all_reduce adds a row's values in one order, that of ranks, wherever the row lies in a tensor, so that a request's
# partial sums have the same bits alone and in a batch; and sums of bfloat16 are added in float32 and rounded once.
# Seen: so it is with two ranks. With three and more a tensor is cut into segments, and each segment's sum begins at another rank:
# of 64 equal rows in one tensor none has the bits of the row alone, and with 4 ranks some third of the float32 values differ. Sums
# of bfloat16 are rounded at each addition: the error of 8 ranks is more than twice that of one rounding. All ranks have the same bits,
# so nothing shows in one run; tensor parallelism by sums is not batch-invariant, even with products that are.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > sums.py <<'PY'
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROWS, WIDTH = 64, 64


def summed(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def run(rank, size, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    x = torch.randn(ROWS * WIDTH, generator=torch.Generator().manual_seed(rank))
    row = x[:WIDTH]
    alone, batch = summed(row), summed(row.repeat(ROWS)).view(ROWS, WIDTH)
    equal = sum(torch.equal(one, alone) for one in batch)
    share = (batch != alone).float().mean().item()
    rounded = x.bfloat16()
    parts = [torch.empty_like(rounded) for _ in range(size)]
    dist.all_gather(parts, rounded)
    exact = torch.stack(parts).double().sum(0)
    found, once = ((y.double() - exact).pow(2).mean().sqrt().item() for y in (summed(rounded), exact.bfloat16()))
    everywhere = [torch.empty_like(batch) for _ in range(size)]
    dist.all_gather(everywhere, batch.contiguous())
    assert all(torch.equal(other, batch) for other in everywhere)
    if rank == 0:
        print(f"{size} ranks: {equal} of {ROWS} equal rows have the bits of the row alone, {share:.0%} of values differ; "
              f"bfloat16 has {found / once:.2f} times the error of one rounding", flush=True)
        assert (equal == ROWS and found < 1.01 * once) if size == 2 else (equal < ROWS and found > 1.2 * once), "it is no longer so"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile

    for size in (2, 3, 4, 8):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (size, f"{folder}/store"), nprocs=size)
PY
venv/bin/python sums.py
