"""Metrics of one engine under its label `engine`: state, cache, and histograms and rates of its requests.

Families are built for each page from plain numbers: counting costs an addition. All engines yield the same families in
the same order, so that `Metrics` can join their samples.

An aborted request is in none of the histograms that are filled at a request's end: its times depend on the client.
"""

import math
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from quire.core.config import PreemptionKind
from quire.core.deltas import FinishReason, SequenceDelta
from quire.core.kv_identity import FETCH_FAILURES
from quire.core.lora import NO_ADAPTER_USE
from quire.core.outputs import KVStats
from quire.core.owner_labels import OTHER
from quire.core.speculation import MAX_DRAFTS
from quire.core.step_times import StepKind
from quire.engine.messages import EngineState, Ready, Stepped
from quire.engine.metrics.step_ring import StepRing
from quire.engine.options import EngineOptions
from quire.engine.requests.output_processor import FinishedRequest, ProcessedStep

if TYPE_CHECKING:
    from quire.engine.event_publisher import KVEventPublisher

_TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)
_ITL_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
_LATENCY_BOUNDS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)
_STEP_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0,
)
_RESIDENCY_BOUNDS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
)  # fmt: skip
_RATIO_BOUNDS = (0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0, 3.0, 5.0)
_PREEMPTION_BOUNDS = (1, 2, 3, 4, 5, 10, 20)
_CHOICE_BOUNDS = (1, 2, 5, 10, 20)
_STEP_BOUNDS_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# vLLM ends these at max_model_len; with the same buckets for every model, servers can be added up.
_REQUEST_BOUNDS_TOKENS = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]


_HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "vllm:time_to_first_token_seconds": ("Arrival to first output token.", _TTFT_BOUNDS_S),
    "vllm:inter_token_latency_seconds": ("Gaps between output tokens, pooled over tokens.", _ITL_BOUNDS_S),
    "vllm:e2e_request_latency_seconds": ("Arrival to last token.", _LATENCY_BOUNDS_S),
    "vllm:request_queue_time_seconds": ("Arrival to the first step with the request in it.", _LATENCY_BOUNDS_S),
    "vllm:request_inference_time_seconds": ("First step of the request to its last token.", _LATENCY_BOUNDS_S),
    "vllm:request_prefill_time_seconds": ("First step of the request to its first token.", _LATENCY_BOUNDS_S),
    "vllm:request_decode_time_seconds": ("First token to last token.", _LATENCY_BOUNDS_S),
    "vllm:request_time_per_output_token_seconds": ("Mean gap between the tokens of a request.", _ITL_BOUNDS_S),
    "vllm:request_num_preemptions": ("Preemptions of a request.", _PREEMPTION_BOUNDS),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request.", _REQUEST_BOUNDS_TOKENS),
    "vllm:request_prefill_kv_computed_tokens": ("Prompt tokens not found in the cache.", _REQUEST_BOUNDS_TOKENS),
    "vllm:request_generation_tokens": ("Output tokens of a request, all choices.", _REQUEST_BOUNDS_TOKENS),
    "vllm:request_params_n": ("Choices of a request.", _CHOICE_BOUNDS),
    "vllm:request_params_max_tokens": ("Most output tokens of a choice.", _REQUEST_BOUNDS_TOKENS),
    "vllm:iteration_tokens_total": ("Prompts that begin and output tokens in one engine step.", _STEP_BOUNDS_TOKENS),
    "vllm:kv_block_lifetime_seconds": ("Allocation of a KV block to its eviction.", _RESIDENCY_BOUNDS_S),
    "vllm:kv_block_idle_before_evict_seconds": ("Last use of a KV block to its eviction.", _RESIDENCY_BOUNDS_S),
    "vllm:kv_block_reuse_gap_seconds": ("Between two uses of a KV block.", _RESIDENCY_BOUNDS_S),
    "quire:step_computed_tokens": ("Tokens computed in one engine step.", _STEP_BOUNDS_TOKENS),
    "quire:step_prediction_ratio": ("Seconds of a step over those predicted.", _RATIO_BOUNDS),
}
_FAMILIES: Mapping[str, Sequence[float]] = {    # as vLLM divides them
    "request_latency": _LATENCY_BOUNDS_S, "time_to_first_token": _TTFT_BOUNDS_S, "inter_token_latency": _ITL_BOUNDS_S,
    "iteration_tokens": _STEP_BOUNDS_TOKENS, "request_params_n": _CHOICE_BOUNDS,
    "request_num_preemptions": _PREEMPTION_BOUNDS, "request_tokens": _REQUEST_BOUNDS_TOKENS,
    "kv_cache_residency": _RESIDENCY_BOUNDS_S,
}  # fmt: skip


class BucketCounts:
    """Counts of observed values by bucket: up to and including its bound; the last bucket has no bound."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name, self._documentation, self.bounds = name, documentation, bounds
        self._bound_labels = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self.counts = [0] * len(self._bound_labels)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def family(self, labels: dict[str, str]) -> HistogramMetricFamily:
        """Return the metric family; its counts are cumulative, as in Prometheus' format."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=list(labels))
        buckets = list(zip(self._bound_labels, accumulate(self.counts), strict=True))
        family.add_metric(list(labels.values()), buckets, self.total)
        return family


class RequestHistograms:
    """Histograms of requests and steps."""

    def __init__(self, bounds_by_family: Mapping[str, Sequence[float]]) -> None:
        own = {id(default): bounds_by_family.get(family, default) for family, default in _FAMILIES.items()}
        self._by_name = {
            name: BucketCounts(name, about, own.get(id(default), default))
            for name, (about, default) in _HISTOGRAMS.items()
        }
        about = "quire:step_seconds", "Seconds of one engine step.", _STEP_BOUNDS_S
        self._step_s: dict[str, BucketCounts] = {kind: BucketCounts(*about) for kind in get_args(StepKind)}

    def on_step(self, step: Stepped, processed: ProcessedStep) -> None:
        """Observe a step and the requests that it advanced."""
        values: dict[str, float] = {}
        if step.num_computed_tokens:  # 0: part of a step, of which other servers have parts as well
            values["quire:step_computed_tokens"] = step.num_computed_tokens
        if step.timing is not None and step.timing.seconds is not None:
            self._step_s[step.timing.kind].observe(step.timing.seconds)
        if step.timing is not None and step.timing.ratio is not None:
            values["quire:step_prediction_ratio"] = step.timing.ratio
        if processed.num_output_tokens:
            values["vllm:iteration_tokens_total"] = processed.num_prompt_tokens + processed.num_output_tokens
        _observe_all(self._by_name, values)
        itl_s = self._by_name["vllm:inter_token_latency_seconds"]
        ttft_s = self._by_name["vllm:time_to_first_token_seconds"]
        for gap_s, times in Counter(processed.itl_s).items():  # equal for all with a token in both steps
            itl_s.observe(gap_s, times)
        for metrics in processed.first_tokens:
            assert metrics.first_token_s is not None, "begun without a token"
            ttft_s.observe(metrics.first_token_s - metrics.arrival_s)
        for ended in processed.finished:
            _observe_all(self._by_name, _of_end(ended))
        for life in step.block_lives:
            self._by_name["vllm:kv_block_lifetime_seconds"].observe(life.lifetime_s)
            self._by_name["vllm:kv_block_idle_before_evict_seconds"].observe(life.idle_s)
            for gap_s in life.reuse_gaps_s:
                self._by_name["vllm:kv_block_reuse_gap_seconds"].observe(gap_s)

    def families(self, labels: dict[str, str], own: dict[str, str]) -> Iterator[HistogramMetricFamily]:
        """Yield the families of all histograms; `labels` are those of vLLM's, `own` of Quire's."""
        for name, histogram in self._by_name.items():
            yield histogram.family(labels if name.startswith("vllm:") else own)
        first, *others = (histogram.family({"kind": kind} | own) for kind, histogram in self._step_s.items())
        for other in others:
            first.samples += other.samples
        yield first


def _observe_all(histograms: Mapping[str, BucketCounts], values: Mapping[str, float]) -> None:
    """Count a value in each histogram: `observe` without a call for each."""
    for name, value in values.items():
        histogram = histograms[name]
        histogram.counts[bisect_left(histogram.bounds, value)] += 1
        histogram.total += value


def _of_end(ended: FinishedRequest) -> dict[str, float]:
    metrics = ended.metrics
    scheduled_s, first_token_s, finished_s = metrics.first_scheduled_s, metrics.first_token_s, metrics.finished_s
    assert scheduled_s is not None, f"ended without having run: {metrics}"
    assert first_token_s is not None, f"ended without a token: {metrics}"
    assert finished_s is not None, f"ended at no time: {metrics}"
    values: dict[str, float] = {}
    if ended.num_output_tokens > 1:
        per_token_s = (finished_s - first_token_s) / (ended.num_output_tokens - 1)
        values["vllm:request_time_per_output_token_seconds"] = per_token_s
    return values | {
        "vllm:e2e_request_latency_seconds": finished_s - metrics.arrival_s,
        "vllm:request_queue_time_seconds": scheduled_s - metrics.arrival_s,
        "vllm:request_inference_time_seconds": finished_s - scheduled_s,
        "vllm:request_prefill_time_seconds": first_token_s - scheduled_s,
        "vllm:request_decode_time_seconds": finished_s - first_token_s,
        "vllm:request_num_preemptions": metrics.num_preemptions,
        "vllm:request_prompt_tokens": ended.num_prompt_tokens,
        "vllm:request_prefill_kv_computed_tokens": ended.num_prompt_tokens - metrics.num_cached_tokens,
        "vllm:request_generation_tokens": ended.num_output_tokens,
        "vllm:request_params_n": len(ended.finish_reasons),
        "vllm:request_params_max_tokens": ended.max_tokens,
    }


RETRY_AFTER_S = 5  # where no estimate is known
WINDOW_S = 30      # older admissions do not count
LONGEST_S = 60     # upper bound: the estimate is rough


class AdmissionRate:
    """Admissions of the last WINDOW_S seconds, in one count per second."""

    def __init__(self) -> None:
        self._busy: set[int] = set()                 # engines that have admitted requests since they were last idle
        self._busy_since_s = 0.0
        self._by_second: deque[tuple[int, int]] = deque(maxlen=WINDOW_S)

    def record(self, num_requests: int, now_s: float, engine: int = 0) -> None:
        """Count requests that left the queue of an engine."""
        if not num_requests:
            return
        if not self._busy:
            self._busy_since_s = now_s
        self._busy.add(engine)
        second = int(now_s)
        if self._by_second and self._by_second[-1][0] == second:
            num_requests += self._by_second.pop()[1]
        self._by_second.append((second, num_requests))

    def rest(self, engine: int = 0) -> None:
        """Record that an engine is idle; once all are, start anew: a rate without requests says nothing."""
        self._busy.discard(engine)
        if not self._busy:
            self._by_second.clear()

    def seconds_to_admit(self, num_requests: int, now_s: float) -> int:
        """Return the whole seconds, 1 to LONGEST_S, until so many requests will have left at the current rate."""
        if not self._busy:
            return RETRY_AFTER_S
        num_recent = sum(num for second, num in self._by_second if second > now_s - WINDOW_S)
        if not num_recent:
            return LONGEST_S
        window_s = min(max(now_s - self._busy_since_s, 1.0), WINDOW_S)
        return min(max(math.ceil(num_requests * window_s / num_recent), 1), LONGEST_S)


Target = Literal["ttft", "itl", "deadline", "all"]  # all: every target that the request has
LATE_GAPS_SHARE = 0.01


class TargetCounts:
    """Requests that had a target, and those that met it. Targets in seconds; infinity: there is none."""

    def __init__(self, ttft_s: float, itl_s: float) -> None:
        self._ttft_s, self._itl_s = ttft_s, itl_s
        self.num_with = dict.fromkeys(get_args(Target), 0)
        self.num_on = dict.fromkeys(get_args(Target), 0)

    def count(self, ended: FinishedRequest) -> None:
        """Count a request that has ended by itself."""
        met = dict[str, bool]()
        if self._ttft_s < math.inf:
            first_token_s = ended.metrics.first_token_s
            met["ttft"] = first_token_s is not None and first_token_s - ended.metrics.arrival_s <= self._ttft_s
        if self._itl_s < math.inf:
            met["itl"] = ended.num_late_gaps <= LATE_GAPS_SHARE * ended.num_gaps
        if ended.met_deadline is not None:
            met["deadline"] = ended.met_deadline
        if not met:
            return
        for target, is_met in (met | {"all": all(met.values())}).items():
            self.num_with[target] += 1
            self.num_on[target] += is_met

    def count_unbegun(self) -> None:
        """Count a request past its deadline that has no first token."""
        for target in ("deadline", "all"):
            self.num_with[target] += 1


Labels = dict[str, str]
Sample = tuple[Labels, float]  # all samples of a family have the same labels in the same order

CACHE_LABELS = (
    "block_size", "cache_dtype", "cpu_offload_gb", "enable_prefix_caching", "gpu_memory_utilization", "num_gpu_blocks",
    "num_gpu_blocks_override", "num_cpu_blocks", "sliding_window", "swap_space_bytes", "kv_cache_size_tokens",
    "kv_cache_max_concurrency",
)  # fmt: skip
REFS = ("1", "2", "3-4", "5-8", "9+")               # keys of KVStats.ref_counts

# Until the first report of the engine. The total of 1 avoids a division by 0.
_NO_STATS = KVStats(
    block_size=1, total_blocks=1, used_blocks=0, cached_blocks=0, free_blocks=0, shared_blocks=0, num_sequences=0,
    tail_waste_slots=0,
)  # fmt: skip
_DISK_STATES = ("is_on", "slots", "stored_blocks", "bytes")   # KVStats.disk's; all else in it is counted since start
_COUNTERS = (
    "copied_blocks", "evicted_blocks", "swapped_out_blocks", "swapped_in_blocks", "recomputed_tokens", "swap_s",
    "recompute_s", "recovery_saved_s", "prefix_queries_tokens", "prefix_hits_tokens",
)  # fmt: skip


@dataclass(slots=True)
class _Counters:
    """Counters since the start of the server, and the level of the sleep."""

    targets: TargetCounts
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_disk_tokens: int = 0
    num_peer_tokens: int = 0
    num_generation_tokens: int = 0
    num_aborted: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_late: dict[str, int] = field(default_factory=lambda: {"prompt": 0, "decoding": 0})
    num_accepted_by_position: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    num_finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0))
    num_restarts: int = 0
    num_unmet_before: int = 0  # steps without room for prompts, by the engines before this one
    sleep_level: int = 0       # 0: awake


class NumTokens(NamedTuple):
    """Tokens since the start of the engines: of prompts that have begun, and of outputs."""

    prompt: int
    output: int


class EngineMetrics:
    """Counts of an engine: an `Observer` of its client, which feeds the rate of admissions, too."""

    def __init__(
        self, admissions: AdmissionRate, number: int, model_name: str, options: EngineOptions, kv: KVStats | None
    ) -> None:
        self.num_queued = 0     # requests sent to the engine that have not run yet, for `Metrics.exposition`
        self.steps: StepRing | None = None                          # None: the latest steps are not kept
        self.events: KVEventPublisher | None = None                 # None: what is in the cache is not published
        self._admissions, self._number = admissions, number
        self._options = options
        self._model: Labels = {"model_name": model_name} | self._own
        self._state = EngineState(0, 0, 0)
        self._kv = kv or _NO_STATS
        self._earlier: KVStats | None = None                        # counters of the engines before this one
        self._blocks_by_owner = {OTHER: 0}                          # a label once seen stays, at 0
        self._ready: Ready | None = None                            # None: the engine has not started yet
        self._counters = _Counters(TargetCounts(options.ttft_target_s, options.itl_target_s))
        self._adapters = NO_ADAPTER_USE, 0.0                        # and when they were counted, in seconds since 1970
        self._histograms = RequestHistograms(options.histogram_bounds)

    @property
    def _own(self) -> Labels:
        return {"engine": str(self._number)}

    @property
    def num_tokens(self) -> NumTokens:
        """Tokens since start."""
        return NumTokens(self._counters.num_prompt_tokens, self._counters.num_generation_tokens)

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of running and of waiting requests."""
        num_waiting = max(self._state.num_waiting, self.num_queued)  # the engine reports the latest only after a step
        return self._state.num_running, num_waiting

    # --- events ---------------------------------------------------------------------------------------------------

    def on_step(self, step: Stepped, processed: ProcessedStep) -> None:
        """Count a step of the engine and the requests that it advanced."""
        if step.admissions:
            num_admitted = 0
            for admission in step.admissions:
                num_admitted += not admission.num_preemptions
            self._admissions.record(num_admitted, step.started_s, self._number)
        self._update_state(step.state)
        self._counters.num_prompt_tokens += processed.num_prompt_tokens
        for begun in processed.first_tokens:
            self._counters.num_cached_tokens += begun.num_cached_tokens
            self._counters.num_disk_tokens += begun.num_disk_tokens
            self._counters.num_peer_tokens += begun.num_peer_tokens
        self._counters.num_generation_tokens += processed.num_output_tokens
        for ended in processed.finished:
            self._count_finished(ended)
            self._counters.targets.count(ended)
        late_ids = set()
        for delta in step.deltas:
            if delta.num_draft_tokens:
                self._count_draft(delta.num_draft_tokens, delta.num_accepted_tokens)
            if delta.is_late and delta.request_id not in late_ids:
                late_ids.add(delta.request_id)
                self._count_late(delta)
        self._histograms.on_step(step, processed)
        if self.steps is not None:
            self.steps.record(step, processed)

    def on_idle(self, state: EngineState) -> None:
        """Record that no request waits or runs."""
        self._admissions.rest(self._number)
        self._update_state(state)
        if self.steps is not None:
            self.steps.set_state(state)

    def on_abort(self, ended: FinishedRequest) -> None:
        """Count a request that was aborted by its client or the server."""
        self._counters.num_aborted += 1
        self._count_finished(ended)

    def engine_ready(self, ready: Ready) -> None:
        """Record the figures of an engine that has started."""
        self._ready = ready

    def engine_restarted(self) -> None:
        """Count an engine that replaced a dead one."""
        self._counters.num_restarts += 1

    def fell_asleep(self, level: int) -> None:
        """Record that the engine sleeps."""
        self.engine_died()      # its counters begin anew when it is woken
        self._counters.sleep_level = level

    def woke_up(self) -> None:
        """Record that the engine was woken."""
        self._counters.sleep_level = 0

    def engine_died(self) -> None:
        """Record the death of the engine: counters keep their values, all else becomes 0. Idempotent."""
        self._admissions.rest(self._number)
        self._counters.num_unmet_before += self._state.num_itl_unmet
        self._state = EngineState(0, 0, 0)
        self._kv = self._earlier = _counted_on(self._kv, _NO_STATS)
        self._blocks_by_owner = dict.fromkeys(self._blocks_by_owner, 0)
        used, counted_s = self._adapters
        self._adapters = NO_ADAPTER_USE._replace(max_running=used.max_running), counted_s
        if self.steps is not None:
            self.steps.engine_died()
        if self.events is not None:
            self.events.clear()

    def _update_state(self, state: EngineState) -> None:
        self._state = state
        if state.kv_events and self.events is not None:
            self.events.publish(state.kv_events)
        if state.adapters is not None:
            self._adapters = state.adapters, time.time()
        if state.kv is not None:
            self._kv = state.kv if self._earlier is None else _counted_on(self._earlier, state.kv)
            if state.kv.blocks_by_owner is not None:
                self._blocks_by_owner = dict.fromkeys(self._blocks_by_owner, 0) | state.kv.blocks_by_owner

    def _count_late(self, delta: SequenceDelta) -> None:
        """Count a request past its deadline, by what it did."""
        is_unbegun = delta.error is not None
        self._counters.num_late["prompt" if is_unbegun else "decoding"] += 1
        if is_unbegun:
            self._counters.targets.count_unbegun()

    def _count_draft(self, num_tokens: int, num_accepted: int) -> None:
        self._counters.num_drafts += 1
        self._counters.num_draft_tokens += num_tokens
        for position in range(num_accepted):
            self._counters.num_accepted_by_position[position] += 1

    def _count_finished(self, ended: FinishedRequest) -> None:
        for reason in ended.finish_reasons:
            self._counters.num_finished[reason] += 1

    # --- the page -------------------------------------------------------------------------------------------------

    def families(self) -> Iterator[Metric]:
        """Yield the families of the engine, each with its samples."""
        yield from self._engine_families()
        yield from self._adapter_families()
        yield from self._cache_families()
        yield from self._disk_families()
        yield from self._transfer_families()
        yield from self._image_families()
        yield from self._state_families()
        yield from self._request_families()
        yield from self._target_families()
        yield from self._draft_families()
        yield from self._histograms.families(self._model, self._own)

    def _engine_families(self) -> Iterator[Metric]:
        state, kv, model, own = self._state, self._kv, self._model, self._own
        num_running, num_waiting = self.load
        yield gauge("vllm:num_requests_running", "Requests that hold blocks.", (model, num_running))
        yield gauge("vllm:num_requests_waiting", "Requests in the queue, also preempted ones.", (model, num_waiting))
        waiting = {"capacity": max(0, num_waiting - state.num_deferred), "deferred": state.num_deferred}
        yield gauge("vllm:num_requests_waiting_by_reason", "Requests in the queue.", *by("reason", waiting, model))
        yield gauge("quire:num_requests_swapped", "Requests in the swap space.", (own, state.num_swapped))
        preemptions = {mode: kv.preemptions.get(mode, 0) for mode in get_args(PreemptionKind)}
        num_preemptions = sum(preemptions.values())
        yield counter("vllm:num_preemptions_total", "Requests that lost their blocks.", (model, num_preemptions))
        yield counter("quire:preemptions_total", "Preemptions by the way back.", *by("mode", preemptions, own))
        yield counter("quire:recomputed_tokens_total", "Tokens computed again.", (own, kv.recomputed_tokens))
        yield counter("quire:swap_seconds_total", "Time spent on moving blocks.", (own, kv.swap_s))
        yield counter("quire:recompute_seconds_total", "Time spent on computing tokens again.", (own, kv.recompute_s))
        yield counter("quire:recovery_saved_seconds_total", "Time that auto has saved.", (own, kv.recovery_saved_s))
        weights = ({"dtype": "", "quantization": ""}, 0) if self._ready is None else _weights(self._ready)
        yield gauge("quire:weights_bytes", "Bytes of the weights in memory.", (weights[0] | own, weights[1]))
        graphs = {"captured": state.graphs.num_captured, "failed": state.graphs.num_failed}
        yield gauge("quire:cuda_graphs", "CUDA graphs, and captures that failed.", *by("state", graphs, own))
        level = self._counters.sleep_level
        states = {"awake": level == 0, "weights_offloaded": level == 1, "discard_all": level == 2}
        by_state = by("sleep_state", states, model)
        yield gauge("vllm:engine_sleep_state", "1 for the state that the engine is in.", *by_state)
        restarts = own, self._counters.num_restarts
        yield counter("quire:engine_restarts_total", "Engines that replaced a dead one.", restarts)
        batches = {"published": 0, "dropped": 0} if self.events is None else self.events.num_batches
        yield counter("quire:kv_event_batches_total", "Batches of KV events.", *by("state", batches, own))

    def _adapter_families(self) -> Iterator[Metric]:
        adapters, counted_s = self._adapters
        labels = {
            "max_lora": str(adapters.max_running),
            "running_lora_adapters": ",".join(adapters.running),
            "waiting_lora_adapters": ",".join(adapters.waiting),
        }
        counted = self._model | labels, counted_s
        yield gauge("vllm:lora_requests_info", "When adapters were counted; their names are labels.", counted)
        numbers = {"running": adapters.num_running, "waiting": adapters.num_waiting}
        yield gauge("quire:lora_adapters", "Adapters of requests, by state.", *by("state", numbers, self._own))

    def _cache_families(self) -> Iterator[Metric]:
        kv, model, own = self._kv, self._model, self._own
        blocks = {"free": kv.free_blocks, "cached": kv.cached_blocks, "used": kv.used_blocks}
        ref_counts = {refs: kv.ref_counts.get(refs, 0) for refs in REFS}
        swapped = {"in": kv.swapped_in_blocks, "out": kv.swapped_out_blocks}
        yield gauge("vllm:kv_cache_usage_perc", "Share of the KV cache's blocks in use, 0 to 1.", (model, kv.usage))
        is_known = self._ready is not None
        config = dict.fromkeys(CACHE_LABELS, "") if self._ready is None else _cache_config(self._ready, self._options)
        yield gauge("vllm:cache_config_info", "Sizes of the KV cache, as labels.", (model | config, int(is_known)))
        yield gauge("quire:kv_blocks", "Blocks of the KV cache.", *by("state", blocks, own))
        yield gauge("quire:kv_blocks_pinned", "Used blocks of pinned prefixes.", (own, kv.pinned_blocks))
        yield gauge("quire:kv_blocks_shared", "Blocks in use with several owners.", (own, kv.shared_blocks))
        by_owner = by("owner", self._blocks_by_owner, own)
        yield gauge("quire:kv_blocks_by_owner", "Blocks in use by key and salt.", *by_owner)
        yield gauge("quire:kv_sequences", "Sequences that hold blocks.", (own, kv.num_sequences))
        yield gauge("quire:kv_tail_waste_ratio", "Share of used slots that hold no token.", (own, kv.tail_waste_ratio))
        yield gauge("quire:kv_block_ref_count", "Blocks in use by their owners.", *by("refs", ref_counts, own))
        yield counter("quire:kv_blocks_copied_total", "Blocks copied before a write.", (own, kv.copied_blocks))
        yield counter("quire:kv_blocks_evicted_total", "Cached blocks given up.", (own, kv.evicted_blocks))
        yield counter("quire:kv_blocks_swapped_total", "Blocks swapped out and in.", *by("direction", swapped, own))
        yield counter("vllm:prefix_cache_queries_total", "Tokens looked up.", (model, kv.prefix_queries_tokens))
        yield counter("vllm:prefix_cache_hits_total", "Tokens found.", (model, kv.prefix_hits_tokens))

    def _disk_families(self) -> Iterator[Metric]:
        """Yield the families of the disk tier: 0 where there is none."""
        model, own = self._model, self._own
        disk = defaultdict[str, float](float, self._kv.disk)
        used = disk["stored_blocks"]
        slots = {"used": used, "free": disk["slots"] - used}
        not_written = {"dropped": disk["dropped_blocks"], "failed": disk["failed_blocks"]}
        not_loaded = {"given_up": disk["cancelled_loads"], "slower": disk["slower_loads"]}
        yield gauge("quire:kv_disk_state", "1 while KV blocks are written to the disk.", (own, disk["is_on"]))
        yield gauge("quire:kv_disk_blocks", "Slots of the disk tier.", *by("state", slots, own))
        yield gauge("quire:kv_disk_bytes", "Bytes of the disk tier's files.", (own, disk["bytes"]))
        yield counter("quire:kv_disk_evicted_blocks_total", "Stored blocks evicted.", (own, disk["evicted_blocks"]))
        unwritten = by("reason", not_written, own)
        yield counter("quire:kv_disk_unwritten_blocks_total", "Blocks to be written that were not.", *unwritten)
        unloaded = by("reason", not_loaded, own)
        yield counter("quire:kv_disk_unloaded_total", "Loads that were not made, or not finished.", *unloaded)
        yield counter("quire:kv_disk_bad_blocks_total", "Blocks read that were spoilt.", (own, disk["bad_blocks"]))
        moved = defaultdict[str, float](float, self._kv.transfer)
        queries, hits = ((model, disk[name] + moved[name]) for name in ("queries_tokens", "hits_tokens"))
        yield counter("vllm:external_prefix_cache_queries_total", "Tokens looked up on disks or at peers.", queries)
        yield counter("vllm:external_prefix_cache_hits_total", "Tokens loaded from a disk or from peers.", hits)
        yield counter("vllm:kv_offload_load_bytes_total", "Bytes read.", (model, disk["loaded_bytes"]))
        yield counter("vllm:kv_offload_load_time_total", "Seconds of reads.", (model, disk["load_s"]))
        yield counter("vllm:kv_offload_store_bytes_total", "Bytes written.", (model, disk["written_bytes"]))
        yield counter("vllm:kv_offload_store_time_total", "Seconds of writes.", (model, disk["write_s"]))

    def _transfer_families(self) -> Iterator[Metric]:
        """Yield the families of prefill apart from decoding: 0 where the engine has no part in it."""
        own, moved = self._own, defaultdict[str, float](float, self._kv.transfer)
        ends = "made", "redeemed", "refused", "expired", "given_back", "stateless"
        tickets = {name: moved[f"tickets_{name}"] for name in ends}
        failed = {name: moved[f"failed_{name}"] for name in FETCH_FAILURES}
        peers = {name: moved[f"peers_{name}"] for name in ("connected", "unconnected", "incompatible")}
        num_bytes = {"sent": moved["sent_bytes"], "received": moved["received_bytes"]}
        held = own, moved["held_blocks"]
        yield gauge("quire:kv_transfer_held_blocks", "Blocks and parts of states kept for other engines.", held)
        yield gauge("quire:kv_transfer_consumers", "Engines that are connected to fetch.", (own, moved["consumers"]))
        yield gauge("quire:kv_transfer_peers", "Engines to fetch from, by state.", *by("state", peers, own))
        yield counter("quire:kv_transfer_tickets_total", "Tickets by what became of them.", *by("state", tickets, own))
        yield counter("quire:kv_transfer_bytes_total", "Bytes of blocks and states.", *by("direction", num_bytes, own))
        yield counter("quire:kv_transfer_seconds_total", "Seconds of reads from peers.", (own, moved["receive_s"]))
        yield counter("quire:kv_transfer_failed_total", "Fetches that did not get all.", *by("reason", failed, own))

    def _image_families(self) -> Iterator[Metric]:
        """Yield the families of the encoder cache: 0 for a model that reads text alone."""
        images, model, own = self._kv.images, self._model, self._own
        yield gauge("quire:image_cache_rows", "Rows of encoded images that are kept.", (own, images.get("rows", 0)))
        queries = (model, images.get("queries", 0))
        yield counter("vllm:mm_cache_queries_total", "Images that steps needed encoded.", queries)
        yield counter("vllm:mm_cache_hits_total", "Those that were kept.", (model, images.get("hits", 0)))

    def _state_families(self) -> Iterator[Metric]:
        """Yield the families of the states of sequences: 0 for a model that keeps none."""
        states, own = defaultdict[str, int](int, self._kv.states), self._own
        used, snapshots, kept = states["used_slots"], states["snapshot_slots"], states["kept_slots"]
        slots = {"used": used, "snapshot": snapshots - kept, "kept": kept}
        slots["free"] = states["total_slots"] - used - snapshots
        yield gauge("quire:state_slots", "Slots for states of sequences.", *by("state", slots, own))
        yield counter("quire:state_snapshots_total", "Snapshots that steps have taken.", (own, states["snapshots"]))
        evicted = (own, states["evicted_snapshots"])
        yield counter("quire:state_snapshots_evicted_total", "Snapshots that made room in the tree.", evicted)

    def _request_families(self) -> Iterator[Metric]:
        model, own, requests = self._model, self._own, self._counters
        finished = by("finished_reason", requests.num_finished, model)
        num_prompt_tokens = requests.num_prompt_tokens
        yield counter("vllm:prompt_tokens_total", "Prompt tokens of begun requests.", (model, num_prompt_tokens))
        num_cached, num_disk, num_peer = requests.num_cached_tokens, requests.num_disk_tokens, requests.num_peer_tokens
        num_loaded = num_disk + num_peer
        sources = {
            "local_compute": num_prompt_tokens - num_cached, "local_cache_hit": num_cached - num_loaded,
            "external_kv_transfer": num_loaded,
        }  # fmt: skip
        by_source = by("source", sources, model)
        by_tier = by("source", {"device": num_cached - num_loaded, "disk": num_disk, "p2p": num_peer}, model)
        yield counter("vllm:prompt_tokens_by_source_total", "Prompt tokens of begun requests.", *by_source)
        yield counter("vllm:prompt_tokens_cached_total", "Of those, found in the cache.", (model, num_cached))
        yield counter("vllm:prompt_tokens_cached_by_source_total", "Those, by where they were found.", *by_tier)
        yield counter("vllm:generation_tokens_total", "Output tokens.", (model, requests.num_generation_tokens))
        yield counter("vllm:request_success_total", "Choices that ended, by finish reason.", *finished)
        yield counter("quire:requests_aborted_total", "Requests ended by their client.", (own, requests.num_aborted))
        late = by("state", requests.num_late, own)
        yield counter("quire:requests_late_total", "Requests whose deadlines have passed, by what they did.", *late)

    def _target_families(self) -> Iterator[Metric]:
        """Yield the counts of requests by target, from 0: a share needs both."""
        own, targets = self._own, self._counters.targets
        with_target = by("target", targets.num_with, own)
        yield counter("quire:requests_with_target_total", "Requests that ended, by target of time.", *with_target)
        on_target = by("target", targets.num_on, own)
        yield counter("quire:requests_on_target_total", "Those that met it.", *on_target)
        unmet = "Steps planned in which decodes left no room for prompts within the target."
        num_unmet = self._counters.num_unmet_before + self._state.num_itl_unmet
        yield counter("quire:itl_target_unmet_total", unmet, (own, num_unmet))

    def _draft_families(self) -> Iterator[Metric]:
        """Yield the families of speculative decoding; in vLLM a page without it has none."""
        model, requests = self._model, self._counters
        accepted = {str(position): count for position, count in enumerate(requests.num_accepted_by_position)}
        name = "vllm:spec_decode_num_accepted_tokens"
        yield counter("vllm:spec_decode_num_drafts_total", "Verified drafts.", (model, requests.num_drafts))
        num_tokens = (model, requests.num_draft_tokens)
        yield counter("vllm:spec_decode_num_draft_tokens_total", "Their tokens.", num_tokens)
        yield counter(f"{name}_total", "Accepted ones of these.", (model, sum(accepted.values())))
        yield counter(f"{name}_per_pos_total", "Accepted, by position.", *by("position", accepted, model))


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, documentation: str, *samples: Sample
) -> Metric:
    """Return a family of gauges or counters; the names of counters end with _total."""
    family = kind(name, documentation, labels=list(samples[0][0]))
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)
    return family


gauge, counter = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)


def by(label: str, values: Mapping[str, float], others: Labels | None = None) -> Iterator[Sample]:
    """Yield one sample per value of `label`."""
    return (((others or {}) | {label: name}, value) for name, value in values.items())


def _weights(ready: Ready) -> Sample:
    """Return the bytes of an engine's weights, and their format as labels."""
    method = ready.quantization.partition(":")[0] or "none"
    return {"dtype": ready.dtype, "quantization": method}, ready.weights_bytes


def _cache_config(ready: Ready, options: EngineOptions) -> Labels:
    """Return the settings and figures of a KV cache by CACHE_LABELS, as vLLM writes them: None, True."""
    limits = ready.limits
    num_tokens = limits.num_blocks * limits.block_size
    swap_bytes = ready.num_swap_blocks * limits.block_size * ready.kv_bytes_per_token
    values = (
        limits.block_size, ready.kv_cache_dtype or "auto", 0, options.enable_prefix_caching,
        options.gpu_memory_utilization, limits.num_blocks, options.num_kv_blocks, ready.num_swap_blocks,
        ready.sliding_window, swap_bytes, num_tokens, f"{num_tokens / limits.max_model_len:.2f}",
    )  # fmt: skip
    return dict(zip(CACHE_LABELS, map(str, values), strict=True))


def _counted_on(earlier: KVStats, kv: KVStats) -> KVStats:
    """Return the statistics of an engine with the counters of earlier engines added."""
    sums = {name: getattr(earlier, name) + getattr(kv, name) for name in _COUNTERS}
    names = earlier.disk.keys() | kv.disk.keys()
    disk = {name: kv.disk.get(name, 0) + (name not in _DISK_STATES) * earlier.disk.get(name, 0) for name in names}
    counted = earlier.images.keys() | kv.images.keys()
    images = {name: kv.images.get(name, 0) + (name != "rows") * earlier.images.get(name, 0) for name in counted}
    counts = ("snapshots", "evicted_snapshots")
    states = {name: each + (name in counts) * earlier.states.get(name, 0) for name, each in kv.states.items()}
    modes = earlier.preemptions.keys() | kv.preemptions.keys()
    preemptions = {mode: earlier.preemptions.get(mode, 0) + kv.preemptions.get(mode, 0) for mode in modes}
    return replace(kv, preemptions=preemptions, disk=disk, images=images, states=states, **sums)
