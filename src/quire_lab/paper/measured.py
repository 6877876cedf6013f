"""The paper's comparison measured on this machine: a small model for real, a KV pool so small that memory binds.

Figure 18a, too: attention over scattered blocks against attention over contiguous memory.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from random import Random
from statistics import median
from typing import NamedTuple

import numpy as np

from quire import LLM
from quire.core.arrays import BFLOAT16, Array, DType
from quire.kernels.choice import choose_back_end
from quire.kernels.conversion import converted
from quire.kernels.paged_attention import AttentionSpec, Heads, build_metadata
from quire_lab.bench.passes import greedy_requests
from quire_lab.paper.figures import Comparison, Result, Row, Settings, figure
from quire_lab.paper.plots import Bars
from quire_lab.paper.runs import ORACLE, PAGED, POW2, SYSTEMS
from quire_lab.sim.datasets import workload
from quire_lab.sim.workloads import WorkItem

MAX_MODEL_LEN, NUM_SEQUENCES_RESERVED = 512, 4  # the pool holds so many sequences of that length
NOTE = (
    "CPU time is that of all threads of the process: other work on the machine disturbs it less than wall time. "
    "Orca (Max) is not compared with the paper's 7: the pool here holds four of its reservations."
)
NUM_PASSES, NUM_PASSES_FULL, NUM_REQUESTS_FULL = 3, 5, 400


class Pass(NamedTuple):
    """One system's time over the requests of one round."""

    tokens_per_cpu_s: float
    tokens_per_s: float
    batched_requests: float


@figure("measured", "13, measured", "Tokens per second and batched requests on this machine, the demo model", "alpaca")
def measured(settings: Settings) -> Result:
    """All systems take turns on the same requests, Alpaca's lengths, all asked at once."""
    found = _take_turns(settings)
    batched = {name: median(each.batched_requests for each in passes) for name, passes in found.items()}
    rates = {name: [each.tokens_per_cpu_s for each in passes] for name, passes in found.items()}
    rows: list[Row] = [
        {"system": name, "batched requests": batched[name], "tokens/CPU s": median(rates[name]),
         "lowest": min(rates[name]), "highest": max(rates[name]),
         "tokens/s": median(each.tokens_per_s for each in passes)}
        for name, passes in found.items()
    ]  # fmt: skip
    ratios = {  # pass by pass: the machine's speed changes in between
        other: [median(ours[i] / theirs[i] for ours, theirs in zip(found[PAGED], passes, strict=True)) for i in (0, 2)]
        for other, passes in found.items()
    }
    comparisons = [
        Comparison(f"batched requests, {PAGED} over {other}", ratios[other][1], told, told)
        for other, told in ((POW2, 132.44 / 43.24), (ORACLE, 132.44 / 72.75))
    ]
    faster = ", ".join(f"{other} {ratio:.2f}" for other, (ratio, _) in ratios.items() if other != PAGED)
    notes = [f"Tokens per CPU second, {PAGED} over the other systems, pass by pass: {faster}.", NOTE]
    plots = [
        Bars("", list(SYSTEMS), "output tokens per CPU second", {"": [median(each) for each in rates.values()]}),
        Bars("", list(SYSTEMS), "batched requests", {"": list(batched.values())}),
    ]
    return Result(rows, plots, comparisons, notes)


def _take_turns(settings: Settings) -> dict[str, list[Pass]]:
    """Return the passes of every system, over other requests in every round. The first round only warms up."""
    num_passes = NUM_PASSES_FULL if settings.full else NUM_PASSES
    count = NUM_REQUESTS_FULL if settings.full else max(2, round(settings.trace_s / 3))
    found: dict[str, list[Pass]] = {name: [] for name in SYSTEMS}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(_engine(name)) for name in SYSTEMS}
        vocab_size = engines[PAGED].vocab_size
        for seed in range(settings.seed, settings.seed + num_passes + 1):
            items = workload(
                "alpaca", count, seed=seed, data=settings.data, vocab_size=vocab_size, max_total_len=MAX_MODEL_LEN
            )
            for name, llm in engines.items():
                found[name].append(_serve(llm, items))
    return {name: passes[1:] for name, passes in found.items()}


def _serve(llm: LLM, items: list[WorkItem]) -> Pass:
    prompts, params = greedy_requests(items)
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wall_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    spans = (output.metrics for output in outputs)
    running_s = sum((span.finished_s or 0.0) - (span.first_scheduled_s or 0.0) for span in spans if span)
    num_tokens = sum(item.output_len for item in items)
    return Pass(num_tokens / cpu_s, num_tokens / wall_s, running_s / wall_s)


def _engine(name: str) -> LLM:
    """Return the demo model over a pool of NUM_SEQUENCES_RESERVED sequences of full length."""
    system = SYSTEMS[name]
    num_blocks = NUM_SEQUENCES_RESERVED * MAX_MODEL_LEN // 16
    return LLM(
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=num_blocks,
        max_num_batched_tokens=2048 if system.is_own else num_blocks * 16,
        enable_prefix_caching=system.is_own,
        memory_policy=system.memory_policy,
        batching=system.batching,
    )


NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128  # one layer of Llama-3.1-8B
BATCH, BLOCK_SIZE = 8, 16
CONTEXTS = (128, 512, 2048)                     # tokens
NUM_ROUNDS, NUM_ROUNDS_FULL = 11, 51


@figure("kernel", "18a", "Attention of 8 decoding sequences over blocks and over contiguous memory, measured here")
def kernel(settings: Settings) -> Result:
    """Blocks anywhere, blocks in a row, and perhaps torch's attention over a tensor of each sequence, in turns."""
    rounds = NUM_ROUNDS_FULL if settings.full else NUM_ROUNDS
    times_us = {context: _measure(context, rounds, settings.seed) for context in CONTEXTS}
    names = list(times_us[CONTEXTS[0]])
    rows: list[Row] = [
        {"context": context, "memory": name, "CPU us": us}
        for context, each in times_us.items()
        for name, us in each.items()
    ]
    comparisons = [
        Comparison(f"context {context}: {names[0]} over {other}", each[names[0]] / each[other], 1.20, 1.26)
        for context, each in times_us.items()
        for other in names[1:]
    ]

    series = {name: [times_us[context][name] / 1e3 for context in CONTEXTS] for name in names}
    plot = Bars("", [f"{context} tokens" for context in CONTEXTS], "CPU milliseconds per layer", series)
    return Result(rows, [plot], comparisons)


def _contiguous(query: Array, keys: Array, values: Array) -> Callable[[], object]:
    """Return a call of torch's attention. Keys and values [BATCH, NUM_KV_HEADS, context, HEAD_DIM]."""
    import torch  # noqa: PLC0415 (optional: what is compared with)

    from quire.kernels.torch_arrays import to_tensor  # noqa: PLC0415 (loads torch)

    attend = torch.nn.functional.scaled_dot_product_attention
    return partial(
        attend, to_tensor(query).unsqueeze(2), to_tensor(keys), to_tensor(values), scale=HEAD_DIM**-0.5, enable_gqa=True
    )


def _measure(context: int, rounds: int, seed: int) -> dict[str, float]:
    """Return the median CPU microseconds of each way, over all threads: other work on the machine disturbs it less."""
    back_end, generator = choose_back_end("cpu", head_dim=HEAD_DIM), np.random.default_rng(seed)

    def drawn(shape: tuple[int, ...], dtype: DType = BFLOAT16) -> Array:
        return converted(generator.standard_normal(shape, np.float32), dtype)

    num_blocks = BATCH * context // BLOCK_SIZE
    spec = AttentionSpec(Heads(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM), HEAD_DIM**-0.5)
    layout = back_end.cache_layout
    dtype = layout.own_dtype(BFLOAT16)
    shapes = layout.shapes(num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype)
    query = drawn((BATCH, NUM_HEADS, HEAD_DIM))
    calls: dict[str, Callable[[], object]] = {}
    random = Random(seed)  # noqa: S311 (an order)
    orders = {"scattered": generator.permutation(num_blocks), "in a row": np.arange(num_blocks)}
    for name, order in orders.items():  # each over keys of its own: else the second would find them in the caches
        keys, values = (drawn(shape, dtype) for shape in shapes)
        tables = order.reshape(BATCH, -1).astype(np.int32)
        starts, lens = np.arange(BATCH + 1, dtype=np.int32), np.full(BATCH, context, np.int32)
        metadata = build_metadata(tables, starts, lens, BLOCK_SIZE)
        calls[f"blocks {name}"] = partial(back_end.paged_attention, spec, query, keys, values, metadata)
    if find_spec("torch") is not None:
        whole = [drawn((BATCH, NUM_KV_HEADS, context, HEAD_DIM)) for _ in range(2)]
        calls["contiguous, torch"] = _contiguous(query, *whole)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(sorted(calls), len(calls)):  # none always after the same one
            begun_s = time.process_time()
            calls[name]()
            seconds[name].append(time.process_time() - begun_s)
    return {name: statistics.median(times[1:]) * 1e6 for name, times in seconds.items()}
