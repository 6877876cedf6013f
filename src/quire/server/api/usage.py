"""Usage of an API request: tokens and times of its engine requests, for the response's usage and the log line."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.deltas import FinishReason
from quire.core.outputs import CompletionOutput, RequestMetrics
from quire.server.http.request_log import RequestRecord


class TokenUsage(NamedTuple):
    """Tokens of an API request. A prompt counts once, however many choices it has."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


@dataclass(slots=True, eq=False)
class RequestUsage:
    """Usage of the engine request for one prompt, so far."""

    metrics: RequestMetrics
    num_prompt_tokens: int
    num_output_tokens: int = 0                                             # sum over all branches
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)  # finished branches alone

    def append(self, piece: CompletionOutput) -> None:
        """Count the new tokens of one branch."""
        self.num_output_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            self.finish_reasons[piece.index] = piece.finish_reason


def total_usage(requests: Sequence[RequestUsage]) -> TokenUsage:
    """Return the tokens of all requests together."""
    num_prompt_tokens = num_output_tokens = num_cached_tokens = 0
    for request in requests:
        num_prompt_tokens += request.num_prompt_tokens
        num_output_tokens += request.num_output_tokens
        num_cached_tokens += request.metrics.num_cached_tokens
    return TokenUsage(num_prompt_tokens, num_output_tokens, num_cached_tokens)


def request_times(metrics: RequestMetrics | None, num_output_tokens: int) -> dict[str, float | None]:
    """Return the times of a finished request with one answer, in vLLM's names; None for those that are unknown.

    Times are in ms; the first token's is counted from the first step of the request, the queue's from its arrival.
    """
    scheduled_s = first_token_s = finished_s = queue_s = None
    if metrics is not None:
        scheduled_s, first_token_s, finished_s = metrics.first_scheduled_s, metrics.first_token_s, metrics.finished_s
        queue_s = metrics.queue_s
    generation_s = _between(first_token_s, finished_s)
    inference_s = _between(scheduled_s, finished_s)
    itl_s = None if generation_s is None or num_output_tokens < 2 else generation_s / (num_output_tokens - 1)
    return {
        "time_to_first_token_ms": _ms(_between(scheduled_s, first_token_s)),
        "generation_time_ms": _ms(generation_s),
        "queue_time_ms": _ms(queue_s),
        "mean_itl_ms": _ms(itl_s),
        "tokens_per_second": num_output_tokens / inference_s if inference_s else None,
    }


def _between(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else end_s - begin_s


def _ms(duration_s: float | None) -> float | None:
    return None if duration_s is None else 1000 * duration_s


def fill_record(record: RequestRecord, requests: Sequence[RequestUsage], n: int) -> TokenUsage:
    """Set the fields of a log line: tokens and preemptions of all prompts, the earliest queue time and TTFT.

    Return the tokens.
    """
    record.prompt_tokens, record.output_tokens, record.cached_tokens = usage = total_usage(requests)
    record.finish_reasons, record.preemptions = [], 0
    for request in requests:
        metrics = request.metrics
        for index in range(n):
            record.finish_reasons.append(request.finish_reasons.get(index, "abort"))
        record.preemptions += metrics.num_preemptions
        queue_s = metrics.queue_s
        if queue_s is not None and (record.queue_s is None or queue_s < record.queue_s):
            record.queue_s = queue_s
        if metrics.first_token_s is not None:
            ttft_s = metrics.first_token_s - metrics.arrival_s
            record.ttft_s = ttft_s if record.ttft_s is None else min(record.ttft_s, ttft_s)
    return usage
