"""Figure 18a, measured: attention over scattered blocks against attention over contiguous memory, on this machine."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from random import Random

import torch

from quire.kernels.back_end import choose_back_end
from quire.kernels.paged_attention import AttentionSpec, Heads, build_metadata
from quire_lab.paper.figures import Comparison, Result, Row, Settings, figure
from quire_lab.paper.plots import Bars

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128  # of one layer of Llama-3.1-8B
BATCH, BLOCK_SIZE, DTYPE = 8, 16, torch.bfloat16
CONTEXTS = (128, 512, 2048)                     # tokens
NUM_ROUNDS, NUM_ROUNDS_FULL = 11, 51


@figure("kernel", "18a", "Attention of 8 decoding sequences over blocks and over contiguous memory, measured here")
def kernel(settings: Settings) -> Result:
    """Blocks anywhere, blocks in a row, and torch's attention over a tensor for each sequence, in turns."""
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


def _measure(context: int, rounds: int, seed: int) -> dict[str, float]:
    """Return the median CPU microseconds of each way, over all threads: other work on the machine disturbs it less."""
    back_end, generator = choose_back_end(torch.device("cpu"), head_dim=HEAD_DIM), torch.Generator().manual_seed(seed)
    num_blocks = BATCH * context // BLOCK_SIZE
    spec = AttentionSpec(Heads(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM), HEAD_DIM**-0.5)
    layout = back_end.cache_layout
    dtype = layout.own_dtype(DTYPE)
    shapes = layout.shapes(num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype)
    query = torch.randn(BATCH, NUM_HEADS, HEAD_DIM, generator=generator).to(DTYPE)
    calls: dict[str, Callable[[], object]] = {}
    random = Random(seed)  # noqa: S311 (an order)
    orders = {"scattered": torch.randperm(num_blocks, generator=generator), "in a row": torch.arange(num_blocks)}
    for name, order in orders.items():  # each over keys of its own: else the second would find them in the caches
        keys, values = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        tables = order.view(BATCH, -1).int()
        starts, lens = torch.arange(BATCH + 1).int(), torch.full((BATCH,), context).int()
        metadata = build_metadata(tables, starts, lens, BLOCK_SIZE)
        calls[f"blocks {name}"] = partial(back_end.paged_attention, spec, query, keys, values, metadata)
    shape = (BATCH, NUM_KV_HEADS, context, HEAD_DIM)
    whole_keys, whole_values = (torch.randn(shape, generator=generator).to(DTYPE) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    calls["contiguous, torch"] = partial(
        attend, query.unsqueeze(2), whole_keys, whole_values, scale=spec.scale, enable_gqa=True
    )
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(sorted(calls), len(calls)):  # none always after the same one
            begun_s = time.process_time()
            calls[name]()
            seconds[name].append(time.process_time() - begun_s)
    return {name: statistics.median(times[1:]) * 1e6 for name, times in seconds.items()}
