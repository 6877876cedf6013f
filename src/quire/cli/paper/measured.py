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
from quire.paper.runs import ORACLE, PAGED, POW2, SYSTEMS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_MODEL_LEN, NUM_SEQUENCES_RESERVED = 512, 4  # the pool holds so many sequences of that length
NOTE = (
    "CPU time is that of all threads of the process: other work on the machine disturbs it less than wall time. "
    "Orca (Max) is not compared with the paper's 7: the pool here holds four of its reservations."
)
NUM_PASSES, NUM_PASSES_FULL, NUM_REQUESTS_FULL = 3, 5, 400


@figure("measured", "13, measured", "Tokens per second and batched requests on this machine, the demo model")
def measured(settings: Settings) -> Result:
    """All systems take turns on the same requests, Alpaca's lengths, all asked at once."""
    num_passes = NUM_PASSES_FULL if settings.full else NUM_PASSES
    count = NUM_REQUESTS_FULL if settings.full else max(2, round(settings.trace_s / 3))
    rates, wall_rates, batched = (defaultdict[str, list[float]](list) for _ in range(3))
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
                begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
                outputs = llm.generate([item.prompt_token_ids for item in items], params, use_tqdm=False)
                wall_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
                if number:  # the first pass warms up
                    spans = (each.metrics for each in outputs)
                    running_s = sum((m.finished_s or 0.0) - (m.first_scheduled_s or 0.0) for m in spans if m)
                    num_tokens = sum(item.output_len for item in items)
                    rates[name].append(num_tokens / cpu_s)
                    wall_rates[name].append(num_tokens / wall_s)
                    batched[name].append(running_s / wall_s)
    rows: list[Row] = [
        {"system": name, "batched requests": statistics.median(batched[name]),
         "tokens/CPU s": statistics.median(rates[name]), "lowest": min(rates[name]), "highest": max(rates[name]),
         "tokens/s": statistics.median(wall_rates[name])}
        for name in SYSTEMS
    ]  # fmt: skip
    paper = {POW2: 132.44 / 43.24, ORACLE: 132.44 / 72.75}
    comparisons = [
        Comparison(f"batched requests, {PAGED} over {other}", _ratio(batched, other), told, told)
        for other, told in paper.items()
    ]
    faster = ", ".join(f"{other} {_ratio(rates, other):.2f}" for other in SYSTEMS if other != PAGED)
    notes = [f"Tokens per CPU second, {PAGED} over others, pass by pass: {faster}.", NOTE]

    def draw() -> "Figure":
        plot, panels = new_figure(2, height=3.6)
        units = ("output tokens per CPU second", "batched requests")
        for axes, found, unit in zip(panels, (rates, batched), units, strict=True):
            names = [name.replace(" ", "\n").replace("Transformer", "-\nTrans-\nformer") for name in SYSTEMS]
            bars(axes, names, {"": [statistics.median(found[name]) for name in SYSTEMS]}, "", unit)
        return plot

    return Result(rows, draw, comparisons, notes)


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


def _ratio(found: dict[str, list[float]], other: str) -> float:
    """Return the median over passes of what paged has over another system."""
    return statistics.median(ours / theirs for ours, theirs in zip(found[PAGED], found[other], strict=True))
