"""One pass over a workload: run it, time it, or watch the KV cache while it runs."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from quire.core.outputs import KVStats, RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.paper.statistics import Timeline
from quire.paper.workloads import WorkItem

if TYPE_CHECKING:
    from quire.llm import LLM


class ThroughputPass(NamedTuple):
    """Everything asked at once: what it took."""

    wall_s: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def requests_per_s(self) -> float:
        """Requests finished per second."""
        return self.num_requests / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.num_output_tokens / self.wall_s

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and output tokens per second."""
        return (self.num_prompt_tokens + self.num_output_tokens) / self.wall_s


@dataclass(slots=True)
class KVUse:
    """What a pass did to the KV cache. Waste is over slots of blocks in use, weighted by time."""

    total_blocks: int
    block_size: int
    peak_used_blocks: int = 0
    peak_waste_slots_per_sequence: float = 0.0
    copied_blocks: int = 0
    num_preemptions: int = 0
    observed_s: float = 0.0
    waste_ratio_s: float = 0.0  # integral of the waste ratio over time

    @property
    def mean_tail_waste_ratio(self) -> float:
        """Share of the slots in use that held no token, on average over the pass."""
        return self.waste_ratio_s / self.observed_s if self.observed_s else 0.0

    def observe(self, stats: KVStats, elapsed_s: float) -> None:
        """Count a state of the cache that lasted for `elapsed_s`."""
        self.peak_used_blocks = max(self.peak_used_blocks, stats.used_blocks)
        if stats.num_sequences:
            waste = stats.tail_waste_slots / stats.num_sequences
            self.peak_waste_slots_per_sequence = max(self.peak_waste_slots_per_sequence, waste)
        if stats.used_blocks:
            self.observed_s += elapsed_s
            self.waste_ratio_s += stats.tail_waste_ratio * elapsed_s


def throughput_pass(llm: "LLM", workload: list[WorkItem]) -> ThroughputPass:
    """Ask everything at once and wait for all of it."""
    prompts, params = _requests(workload)
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wall_s = time.perf_counter() - started_s
    return ThroughputPass(
        wall_s=wall_s,
        num_requests=len(workload),
        num_prompt_tokens=sum(len(item.prompt_token_ids) for item in workload),
        num_output_tokens=sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
    )


def latency_pass(llm: "LLM", workload: list[WorkItem], concurrency: int) -> list[Timeline]:
    """Return each request's timeline in a closed loop: `concurrency` clients, each asking anew when answered.

    The model must run at most `concurrency` sequences at once: then a queued request starts in the step after one
    has ended, and counts as sent at that moment. Times are seconds from the start of the pass.
    """
    prompts, params = _requests(workload)
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


def watched_pass(llm: "LLM", workload: list[WorkItem]) -> KVUse:
    """Run the workload once, looking at the KV cache after every step; also the warm-up of the timed passes."""
    prompts, params = _requests(workload)
    before = llm.kv_stats()
    use = KVUse(before.total_blocks, before.block_size)
    seen_s = time.perf_counter()
    for outputs in _by_step(llm.stream(prompts, params)):
        now_s = time.perf_counter()
        use.observe(llm.kv_stats(), now_s - seen_s)
        seen_s = now_s
        use.num_preemptions += sum(o.metrics.num_preemptions for o in outputs if o.finished and o.metrics)
    use.copied_blocks = llm.kv_stats().copied_blocks - before.copied_blocks
    return use


def _by_step(outputs: Iterator[RequestOutput]) -> Iterator[list[RequestOutput]]:
    """Group a stream: a request that comes up again, or the end of the stream, begins another group."""
    group: dict[str, RequestOutput] = {}
    for output in outputs:
        if output.request_id in group:
            yield list(group.values())
            group = {}
        group[output.request_id] = output
    if group:
        yield list(group.values())


def _requests(workload: list[WorkItem]) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and parameters: greedy, of exactly the workload's lengths, without detokenization."""
    params = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=item.output_len, detokenize=False)
        for item in workload
    ]
    return [item.prompt_token_ids for item in workload], params
