"""Host time of a step of the CUDA worker, without a GPU: all that runs in Python between two results.

    python bench/gpu_host.py [--steps 200]

Scheduler, plan, gathering and upload of inputs, graph, sampling and result are those of a GPU. Instead of a graph's
replay hidden states of zeros are returned, and logits of a few tokens; tensors are in host memory: an op on a small
tensor stands for a launch. `decodes` are steps in which every row advances by one token, `mixed` ones have a chunk of a
prompt, too. Aim: under 0.5 ms with 32 sequences, mixed.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median, quantiles
from unittest.mock import patch

import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.core.plan import StepPlan
from quire.engine.engine import Engine
from quire.execution.cuda.cuda_graphs import MIXED_TOKENS, CudaGraphRunner
from quire.execution.cuda.cuda_worker import AsyncCudaExecutor, CudaWorker
from quire.execution.device import Device
from quire.execution.worker import StepCompute
from quire.extension.isas import set_threads_of_kernels
from quire.kernels.reference.back_ends import TORCH
from quire.model.decoder import Decoder

SEQUENCES = (1, 32, 256)
NUM_LOGITS = 32
CHUNK = 32  # tokens of a prompt beside the decodes


def worker_with_graphs(device: Device, compute: StepCompute, max_num_batched_tokens: int) -> AsyncCudaExecutor:
    """Return the executor of a GPU whose graphs, all captured at start, compute nothing."""
    worker = CudaWorker(compute)
    hidden = torch.zeros(MIXED_TOKENS[-1], 8)  # any width: nothing reads them

    def capture(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        result = call()
        return lambda: result

    num_rows, max_blocks = compute.batch.block_tables.shape
    worker._graphs = CudaGraphRunner(
        lambda batch: hidden[: len(batch.token_ids)], max_blocks, compute.model.device, capture, num_rows,
        draw=lambda batch, draws: torch.ones(2, len(draws.rows), dtype=torch.int64), idle_row=num_rows,  # sound
    )  # fmt: skip
    worker._graphs.capture_all(MIXED_TOKENS[-1])
    return AsyncCudaExecutor(worker)


def measure(num_seqs: int, num_steps: int, *, is_mixed: bool) -> list[tuple[float, float]]:
    """Return the seconds of steps of `num_seqs` sequences, and those of the CPU in them.

    The last sequence is a prompt in chunks if `is_mixed`.
    """
    times, plans = defaultdict[bool, list[tuple[float, float]]](list), list[StepPlan]()
    step = Engine.step

    def timed(self: Engine) -> object:
        self.on_submit = plans.append
        plans.clear()
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
        deltas = step(self)
        taken_s = time.perf_counter() - started_s, time.thread_time() - started_cpu_s
        if len(plans) == 1 and len(plans[0].rows) == num_seqs:
            times[max(plans[0].counts) > 1].append(taken_s)
        return deltas

    with (
        patch("quire.engine.loading.choose_back_end", lambda *args, **how: TORCH),  # the tensors of a GPU's worker
        patch("quire.execution.device.HostDevice.executor", worker_with_graphs),
        patch.object(Engine, "step", timed),
        patch.object(Decoder, "logits", lambda self, hidden: torch.zeros(len(hidden), NUM_LOGITS)),
        LLM(
            device="cpu", max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs + CHUNK - 1, max_model_len=2048,
            num_kv_blocks=8192, enable_prefix_caching=False, dtype="float32",
        ) as llm,
    ):  # fmt: skip
        params = [SamplingParams(temperature=0.0, max_tokens=num_steps + 50, ignore_eos=True)] * num_seqs
        prompts = [[5, 6, 7]] * num_seqs
        if is_mixed:
            prompts[-1] = [5] * min(CHUNK * num_steps, 2000)
            params[-1] = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
    return times[is_mixed][5:]


def main() -> None:
    """Print the median of each case, with the fifth and the ninety-fifth percentile; then those of the CPU's time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    set_threads_of_kernels(1)
    for num_seqs in SEQUENCES:
        for is_mixed in (False, True):
            cells = []
            for times_s in zip(*measure(num_seqs, steps, is_mixed=is_mixed), strict=True):
                cuts = [1e3 * each for each in quantiles(times_s, n=20)]
                cells.append(f"{1e3 * median(times_s):.2f} ms ({cuts[0]:.2f} to {cuts[-1]:.2f})")
            kind = "mixed" if is_mixed else "decodes"
            print(f"{num_seqs:4} {kind:8} {cells[0]}, of the CPU {cells[1]}, {len(times_s)} steps")


if __name__ == "__main__":
    main()
