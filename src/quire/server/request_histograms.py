"""How long requests and their parts took, and how many tokens they had. Names, meanings and buckets are vLLM's.

A request that its client gave up is in none that its end would fill: its times are the client's, not the engine's.
"""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from quire.engine.output_processor import EndedRequest, ProcessedStep
from quire.server.metric_families import Histogram, Labels

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
_STEP_BOUNDS_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# vLLM ends these at the model's longest request; the same ones for every model can be added up over servers.
_REQUEST_BOUNDS_TOKENS = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]


class RequestHistograms:
    """One histogram for each thing that is worth its quantiles."""

    def __init__(self) -> None:
        self._ttft_s = Histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first output token.", _TTFT_BOUNDS_S
        )
        self._itl_s = Histogram(
            "vllm:inter_token_latency_seconds", "Gaps between output tokens, pooled over tokens.", _ITL_BOUNDS_S
        )
        self._e2e_s = Histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _LATENCY_BOUNDS_S)
        self._queue_s = Histogram(
            "vllm:request_queue_time_seconds", "Arrival to the first step with the request in it.", _LATENCY_BOUNDS_S
        )
        self._prefill_s = Histogram(
            "vllm:request_prefill_time_seconds", "First step of the request to its first token.", _LATENCY_BOUNDS_S
        )
        self._decode_s = Histogram(
            "vllm:request_decode_time_seconds", "First token to last token.", _LATENCY_BOUNDS_S
        )
        self._prompt_tokens = Histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", _REQUEST_BOUNDS_TOKENS
        )
        self._generation_tokens = Histogram(
            "vllm:request_generation_tokens", "Output tokens of a request, all choices.", _REQUEST_BOUNDS_TOKENS
        )
        self._step_tokens = Histogram(
            "vllm:iteration_tokens_total", "Tokens computed in one engine step.", _STEP_BOUNDS_TOKENS
        )

    def stepped(self, num_computed_tokens: int, processed: ProcessedStep) -> None:
        """Take down a step and what it meant to requests."""
        self._step_tokens.observe(num_computed_tokens)
        for gap_s, times in Counter(processed.gaps_s).items():      # who got a token in both steps has the same gap
            self._itl_s.observe(gap_s, times)
        for metrics, _ in processed.begun:
            assert metrics.first_token_s is not None, "begun without a token"
            self._ttft_s.observe(metrics.first_token_s - metrics.arrival_s)
        for ended in processed.ended:
            self._ended(ended)

    def families(self, labels: Labels) -> Iterator[Metric]:
        """Yield all of them."""
        return (histogram.family(labels) for histogram in vars(self).values())

    def _ended(self, ended: EndedRequest) -> None:
        metrics = ended.metrics
        scheduled_s, first_token_s, finished_s = metrics.first_scheduled_s, metrics.first_token_s, metrics.finished_s
        assert scheduled_s is not None, f"ended without having run: {metrics}"
        assert first_token_s is not None, f"ended without a token: {metrics}"
        assert finished_s is not None, f"ended at no time: {metrics}"
        self._e2e_s.observe(finished_s - metrics.arrival_s)
        self._queue_s.observe(scheduled_s - metrics.arrival_s)
        self._prefill_s.observe(first_token_s - scheduled_s)
        self._decode_s.observe(finished_s - first_token_s)
        self._prompt_tokens.observe(ended.num_prompt_tokens)
        self._generation_tokens.observe(ended.num_output_tokens)
