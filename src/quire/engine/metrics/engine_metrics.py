"""Metrics of one engine: its state, its cache, and the requests that it serves, under its value of the label `engine`.

Families are built for each page from plain numbers: counting costs an addition. All engines yield the same families in
the same order, so that `Metrics` can join their samples.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from quire.core.config import PreemptionKind
from quire.core.deltas import FinishReason, SequenceDelta
from quire.core.lora import NO_ADAPTER_USE
from quire.core.outputs import KVStats
from quire.core.owner_labels import OTHER
from quire.core.speculation import MAX_DRAFTS
from quire.engine.messages import EngineState, Ready, Stepped
from quire.engine.metrics.admission_rate import AdmissionRate
from quire.engine.metrics.histograms import RequestHistograms
from quire.engine.options import EngineOptions
from quire.engine.requests.output_processor import FinishedRequest, ProcessedStep

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
        self._add(met)

    def count_unbegun(self) -> None:
        """Count a request whose deadline has passed before its first token."""
        for target in ("deadline", "all"):
            self.num_with[target] += 1

    def _add(self, met: dict[str, bool]) -> None:
        if not met:
            return
        for target, is_met in (met | {"all": all(met.values())}).items():
            self.num_with[target] += 1
            self.num_on[target] += is_met


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
_COUNTERS = (
    "copied_blocks", "evicted_blocks", "swapped_out_blocks", "swapped_in_blocks", "recomputed_tokens", "swap_s",
    "recompute_s", "recovery_saved_s", "prefix_queries_tokens", "prefix_hits_tokens",
)  # fmt: skip


@dataclass(slots=True)
class _Counters:
    """Counters since the start of the server."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_aborted: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_late: dict[str, int] = field(default_factory=lambda: {"prompt": 0, "decoding": 0})
    num_accepted_by_position: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    num_finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0))
    num_restarts: int = 0
    num_unmet_before: int = 0  # steps without room for prompts, by the engines before this one


class EngineMetrics:
    """Counts of an engine: an `Observer` of its client, which feeds the rate of admissions, too."""

    def __init__(
        self, admissions: AdmissionRate, number: int, model_name: str, options: EngineOptions, kv: KVStats | None
    ) -> None:
        self.num_queued = 0     # requests sent to the engine that have not run yet, for `Metrics.exposition`
        self._admissions, self._number = admissions, number
        self._options = options
        self._model: Labels = {"model_name": model_name} | self._own
        self._state = EngineState(0, 0, 0)
        self._kv = kv or _NO_STATS
        self._earlier: KVStats | None = None                        # counters of the engines before this one
        self._blocks_by_owner = {OTHER: 0}                          # a label once seen stays, at 0
        self._weights: Sample = {"dtype": "", "quantization": ""} | self._own, 0
        self._cache_config: Sample = dict.fromkeys(CACHE_LABELS, ""), 0
        self._counters = _Counters()
        self._adapters = NO_ADAPTER_USE, 0.0                        # and when they were counted, in seconds since 1970
        self._histograms = RequestHistograms()
        self._targets = TargetCounts(options.ttft_target_s, options.itl_target_s)

    @property
    def _own(self) -> Labels:
        return {"engine": str(self._number)}

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
        self._counters.num_generation_tokens += processed.num_output_tokens
        for ended in processed.finished:
            self._count_finished(ended)
            self._targets.count(ended)
        late_ids = set()
        for delta in step.deltas:
            if delta.num_draft_tokens:
                self._count_draft(delta.num_draft_tokens, delta.num_accepted_tokens)
            if delta.is_late and delta.request_id not in late_ids:
                late_ids.add(delta.request_id)
                self._count_late(delta)
        self._histograms.on_step(step, processed)

    def on_idle(self, state: EngineState) -> None:
        """Record that no request waits or runs."""
        self._admissions.rest(self._number)
        self._update_state(state)

    def on_abort(self, ended: FinishedRequest) -> None:
        """Count a request that was aborted by its client or the server."""
        self._counters.num_aborted += 1
        self._count_finished(ended)

    def engine_ready(self, ready: Ready) -> None:
        """Record the format and size of the weights."""
        method = ready.quantization.partition(":")[0] or "none"
        self._weights = {"dtype": ready.dtype, "quantization": method} | self._own, ready.weights_bytes
        self._cache_config = _cache_config(ready, self._options), 1

    def engine_restarted(self) -> None:
        """Count an engine that replaced a dead one."""
        self._counters.num_restarts += 1

    def engine_died(self) -> None:
        """Record the death of the engine: counters keep their values, all else becomes 0. Idempotent."""
        self._admissions.rest(self._number)
        self._counters.num_unmet_before += self._state.num_itl_unmet
        self._state = EngineState(0, 0, 0)
        self._kv = self._earlier = _counted_on(self._kv, _NO_STATS)
        self._blocks_by_owner = dict.fromkeys(self._blocks_by_owner, 0)
        used, counted_s = self._adapters
        self._adapters = NO_ADAPTER_USE._replace(max_running=used.max_running), counted_s

    def _update_state(self, state: EngineState) -> None:
        self._state = state
        if state.adapters is not None:
            self._adapters = state.adapters, time.time()
        if state.kv is not None:
            self._kv = state.kv if self._earlier is None else _counted_on(self._earlier, state.kv)
            if state.kv.blocks_by_owner is not None:
                self._blocks_by_owner = dict.fromkeys(self._blocks_by_owner, 0) | state.kv.blocks_by_owner

    def _count_late(self, delta: SequenceDelta) -> None:
        """Count a request whose deadline has passed, by what it did."""
        is_unbegun = delta.error is not None
        self._counters.num_late["prompt" if is_unbegun else "decoding"] += 1
        if is_unbegun:
            self._targets.count_unbegun()

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
        yield from self._request_families()
        yield from self._target_families()
        yield from self._draft_families()
        yield from self._histograms.families(self._model, self._own)

    def _engine_families(self) -> Iterator[Metric]:
        state, kv, model, own = self._state, self._kv, self._model, self._own
        num_waiting = max(state.num_waiting, self.num_queued)      # the engine reports the latest only after a step
        yield gauge("vllm:num_requests_running", "Requests that hold blocks.", (model, state.num_running))
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
        yield gauge("quire:weights_bytes", "Bytes of the weights in memory.", self._weights)
        graphs = {"captured": state.graphs.num_captured, "failed": state.graphs.num_failed}
        yield gauge("quire:cuda_graphs", "CUDA graphs, and captures that failed.", *by("state", graphs, own))
        restarts = own, self._counters.num_restarts
        yield counter("quire:engine_restarts_total", "Engines that replaced a dead one.", restarts)

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
        config, number = self._cache_config
        yield gauge("vllm:cache_config_info", "Sizes of the KV cache, as labels.", (model | config, number))
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

    def _request_families(self) -> Iterator[Metric]:
        model, own, requests = self._model, self._own, self._counters
        finished = by("finished_reason", requests.num_finished, model)
        num_prompt_tokens = requests.num_prompt_tokens
        yield counter("vllm:prompt_tokens_total", "Prompt tokens of begun requests.", (model, num_prompt_tokens))
        yield counter("vllm:generation_tokens_total", "Output tokens.", (model, requests.num_generation_tokens))
        yield counter("vllm:request_success_total", "Choices that ended, by finish reason.", *finished)
        yield counter("quire:requests_aborted_total", "Requests ended by their client.", (own, requests.num_aborted))
        late = by("state", requests.num_late, own)
        yield counter("quire:requests_late_total", "Requests whose deadlines have passed, by what they did.", *late)

    def _target_families(self) -> Iterator[Metric]:
        """Yield the counts of requests by target, from 0: a share needs both."""
        own, targets = self._own, self._targets
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
    modes = earlier.preemptions.keys() | kv.preemptions.keys()
    preemptions = {mode: earlier.preemptions.get(mode, 0) + kv.preemptions.get(mode, 0) for mode in modes}
    return replace(kv, preemptions=preemptions, **sums)
