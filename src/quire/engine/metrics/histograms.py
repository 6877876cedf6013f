"""Histograms of the latencies, lengths and parameters of requests. Names, meanings and buckets are vLLM's.

An aborted request is in none of the histograms that are filled at a request's end: its times depend on the client.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import get_args

from prometheus_client.metrics_core import HistogramMetricFamily

from quire.core.step_times import StepKind
from quire.engine.messages import Stepped
from quire.engine.requests.output_processor import FinishedRequest, ProcessedStep

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
    "vllm:request_num_preemptions": ("Preemptions of a request.", _PREEMPTION_BOUNDS),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request.", _REQUEST_BOUNDS_TOKENS),
    "vllm:request_generation_tokens": ("Output tokens of a request, all choices.", _REQUEST_BOUNDS_TOKENS),
    "vllm:request_params_n": ("Choices of a request.", _CHOICE_BOUNDS),
    "vllm:request_params_max_tokens": ("Most output tokens of a choice.", _REQUEST_BOUNDS_TOKENS),
    "vllm:iteration_tokens_total": ("Prompts that begin and output tokens in one engine step.", _STEP_BOUNDS_TOKENS),
    "quire:step_computed_tokens": ("Tokens computed in one engine step.", _STEP_BOUNDS_TOKENS),
    "quire:step_prediction_ratio": ("Seconds of a step over those predicted.", _RATIO_BOUNDS),
}


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

    def __init__(self) -> None:
        self._by_name = {name: BucketCounts(name, *about) for name, about in _HISTOGRAMS.items()}
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
    return {
        "vllm:e2e_request_latency_seconds": finished_s - metrics.arrival_s,
        "vllm:request_queue_time_seconds": scheduled_s - metrics.arrival_s,
        "vllm:request_inference_time_seconds": finished_s - scheduled_s,
        "vllm:request_prefill_time_seconds": first_token_s - scheduled_s,
        "vllm:request_decode_time_seconds": finished_s - first_token_s,
        "vllm:request_num_preemptions": metrics.num_preemptions,
        "vllm:request_prompt_tokens": ended.num_prompt_tokens,
        "vllm:request_generation_tokens": ended.num_output_tokens,
        "vllm:request_params_n": len(ended.finish_reasons),
        "vllm:request_params_max_tokens": ended.max_tokens,
    }
