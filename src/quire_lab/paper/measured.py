"""The paper's comparison measured on this machine: a small model for real, a KV pool so small that memory binds."""

import time
from contextlib import ExitStack
from statistics import median
from typing import NamedTuple

from quire import LLM
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
