"""The paper's comparison measured on this machine: a small model for real, a KV pool so small that memory binds."""

import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING

from quire import LLM, SamplingParams
from quire.paper.datasets import workload
from quire.paper.figures import Comparison, Result, Row, Settings, figure
from quire.paper.plots import bars, new_figure
from quire.paper.runs import MAX, ORACLE, PAGED, SYSTEMS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_MODEL_LEN, NUM_SEQUENCES_RESERVED = 512, 4  # the pool holds so many sequences of that length
NUM_PASSES, NUM_PASSES_FULL, NUM_REQUESTS_FULL = 3, 5, 400


@figure("measured", "13, measured", "Tokens per second and batched requests on this machine, the demo model")
def measured(settings: Settings) -> Result:
    """All systems take turns on the same requests, Alpaca's lengths, all asked at once."""
    num_passes = NUM_PASSES_FULL if settings.full else NUM_PASSES
    count = NUM_REQUESTS_FULL if settings.full else max(2, round(settings.trace_s / 3))
    rates, batched = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with ExitStack() as stack:
        engines = {name: stack.enter_context(_engine(name)) for name in SYSTEMS}
        vocab_size = engines[PAGED].vocab_size
        for number in range(num_passes + 1):
            items = workload(
                "alpaca", count, seed=settings.seed + number, data=settings.data, vocab_size=vocab_size,
                max_total_len=MAX_MODEL_LEN,
            )  # fmt: skip
            params = [
                SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=item.output_len, detokenize=False)
                for item in items
            ]
            for name, llm in engines.items():
                begun_s = time.perf_counter()
                outputs = llm.generate([item.prompt_token_ids for item in items], params, use_tqdm=False)
                wall_s = time.perf_counter() - begun_s
                if number:  # the first pass warms up
                    spans = (each.metrics for each in outputs)
                    running_s = sum((m.finished_s or 0.0) - (m.first_scheduled_s or 0.0) for m in spans if m)
                    rates[name].append(sum(item.output_len for item in items) / wall_s)
                    batched[name].append(running_s / wall_s)
    rows: list[Row] = [
        {"system": name, "tokens/s": statistics.median(rates[name]), "lowest": min(rates[name]),
         "highest": max(rates[name]), "batched requests": statistics.median(batched[name])}
        for name in SYSTEMS
    ]  # fmt: skip
    medians = {name: statistics.median(ratio) for name, ratio in _ratios(batched).items()}
    comparisons = [
        Comparison(f"batched requests, {PAGED} over {other}", medians[other], paper, paper)
        for other, paper in ((ORACLE, 132.44 / 72.75), (MAX, 132.44 / 7.0))
    ]

    def draw() -> "Figure":
        plot, panels = new_figure(2, height=3.6)
        for axes, found, unit in zip(panels, (rates, batched), ("output tokens/s", "batched requests"), strict=True):
            names = [name.replace(" ", "\n").replace("erT", "er-\nT") for name in SYSTEMS]
            bars(axes, names, {"": [statistics.median(found[name]) for name in SYSTEMS]}, "", unit)
        return plot

    return Result(rows, draw, comparisons)


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


def _ratios(found: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return what paged has over each system, pass by pass."""
    ours = found[PAGED]
    return {name: [one / other for one, other in zip(ours, theirs, strict=True)] for name, theirs in found.items()}
