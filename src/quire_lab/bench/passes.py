"""One pass over a workload: run it, time it, or watch the KV cache while it runs.

`time_steps` times single steps of every size, to which `quire bench calibrate` fits a `Hardware`.
"""

import time
from typing import TYPE_CHECKING

from quire.core.outputs import KVStats
from quire.core.sampling_params import SamplingParams
from quire_lab.sim.statistics import Timeline
from quire_lab.sim.workloads import WorkItem

if TYPE_CHECKING:
    from quire.llm import LLM
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from quire_lab.sim.calibration import StepSize

if TYPE_CHECKING:
    from quire.llm import LLM


def throughput_pass(llm: "LLM", workload: list[WorkItem]) -> dict[str, float]:
    """Ask everything at once and wait for all of it; return what it took, and what was done per second."""
    prompts, params = greedy_requests(workload)
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wall_s = time.perf_counter() - started_s
    num_output_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "wall_s": wall_s,
        "requests_per_s": len(workload) / wall_s,
        "tokens_per_s": num_output_tokens / wall_s,
        "total_tokens_per_s": (sum(map(len, prompts)) + num_output_tokens) / wall_s,
    }


def latency_pass(llm: "LLM", workload: list[WorkItem], concurrency: int) -> list[Timeline]:
    """Return each request's timeline in a closed loop: `concurrency` clients, each asking anew when answered.

    The model must run at most `concurrency` sequences at once: then a queued request starts in the step after one
    has ended, and counts as sent at that moment. Times are seconds from the start of the pass.
    """
    prompts, params = greedy_requests(workload)
    started_s = time.perf_counter()
    token_times: dict[int, list[float]] = {}
    finished_s: list[float] = []
    for output in llm.stream(prompts, params):
        now_s = time.perf_counter() - started_s
        times = token_times.setdefault(int(output.request_id), [])
        times += [now_s] * (len(output.outputs[0].token_ids) - len(times))
        if output.finished:
            finished_s.append(now_s)
    sent_s = [0.0] * concurrency + finished_s
    return [Timeline(sent, times) for sent, (_, times) in zip(sent_s, sorted(token_times.items()), strict=False)]


def watched_pass(llm: "LLM", workload: list[WorkItem]) -> dict[str, float]:
    """Run the workload once; return what it did to the KV cache, by looking at that after every step.

    Also the warm-up of the timed passes.
    """
    prompts, params = greedy_requests(workload)
    before = llm.kv_stats()
    states: list[tuple[KVStats, float]] = []
    step: set[str] = set()  # requests that have tokens; a request that appears again begins another one
    num_preemptions, seen_s = 0, time.perf_counter()

    def look() -> None:
        nonlocal seen_s
        now_s = time.perf_counter()
        states.append((llm.kv_stats(), now_s - seen_s))
        seen_s = now_s

    for output in llm.stream(prompts, params):
        if output.request_id in step:
            look()
            step.clear()
        step.add(output.request_id)
        if output.finished and output.metrics:
            num_preemptions += output.metrics.num_preemptions
    look()
    return {
        "total_blocks": before.total_blocks,
        "block_size": before.block_size,
        "copied_blocks": llm.kv_stats().copied_blocks - before.copied_blocks,
        "num_preemptions": num_preemptions,
    } | kv_use(states)


def kv_use(states: list[tuple[KVStats, float]]) -> dict[str, float]:
    """Return peaks and waste of states that lasted so many seconds each.

    Waste is over slots of blocks in use, by time: an empty cache does not count.
    """
    used = [(stats, seconds) for stats, seconds in states if stats.used_blocks]
    used_s = sum(seconds for _, seconds in used)
    wasted = [stats.tail_waste_slots / stats.num_sequences for stats, _ in states if stats.num_sequences]
    return {
        "peak_used_blocks": max((stats.used_blocks for stats, _ in states), default=0),
        "peak_waste_slots_per_sequence": max(wasted, default=0.0),
        "mean_tail_waste_ratio": sum(stats.tail_waste_ratio * s for stats, s in used) / used_s if used_s else 0.0,
    }


def greedy_requests(workload: list[WorkItem]) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and parameters: greedy, of exactly the workload's lengths, without detokenization."""
    params = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=item.output_len, detokenize=False)
        for item in workload
    ]
    return [item.prompt_token_ids for item in workload], params


Clock = Callable[[], float]
_DECODE_STEPS = 12  # steps of one measurement


def time_steps(
    llm: "LLM", sizes: list[StepSize], rounds: int, seed: int, clock: Clock = time.perf_counter
) -> dict[StepSize, list[float]]:
    """Return the seconds of a step of every size, once for each round.

    A round goes over all sizes, so that a drift of the machine's speed affects all of them.
    """
    generator = np.random.default_rng(seed)
    times: dict[StepSize, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size, seconds in times.items():
            prompts = generator.integers(llm.vocab_size, size=(size.num_seqs, size.num_tokens)).tolist()
            seconds.append((_decode_s if size.is_decode else _prefill_s)(llm, prompts, clock))
    return times


def _decode_s(llm: "LLM", prompts: list[list[int]], clock: Clock) -> float:
    """Return the mean seconds of a decode step behind the prompts."""
    _prefill_s(llm, prompts, clock)  # from now on the prefix cache has them, if there is one: both times alike in that
    prompt_s = _prefill_s(llm, prompts, clock)
    return (_prefill_s(llm, prompts, clock, 1 + _DECODE_STEPS) - prompt_s) / _DECODE_STEPS


def _prefill_s(llm: "LLM", prompts: list[list[int]], clock: Clock, output_len: int = 1) -> float:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len, detokenize=False)
    started_s = clock()
    llm.generate(prompts, params, use_tqdm=False)
    return clock() - started_s
