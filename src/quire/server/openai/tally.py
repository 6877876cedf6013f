"""What a call has cost so far: for `usage`, and for the log line of the request."""

import msgspec

from quire.core.outputs import RequestMetrics, RequestOutput
from quire.server.service import RequestRecord


class PromptTokensDetails(msgspec.Struct):
    """How many prompt tokens were found in the cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of a call. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Tally:
    """Counts what the outputs of a call bring; `prompt_lengths` in tokens."""

    def __init__(self, prompt_lengths: list[int], n: int) -> None:
        self._num_prompt_tokens = sum(prompt_lengths)
        self._num_output_tokens = 0
        self._num_cached: list[int] = [0] * len(prompt_lengths)
        self._metrics: list[RequestMetrics | None] = [None] * len(prompt_lengths)
        self._finish_reasons: list[str | None] = [None] * (len(prompt_lengths) * n)
        self._n = n

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Take down an output. Each token may come once."""
        self._metrics[prompt_index] = output.metrics
        self._num_cached[prompt_index] = output.num_cached_tokens
        for piece in output.outputs:
            self._num_output_tokens += len(piece.token_ids)
            if piece.finish_reason is not None:
                self._finish_reasons[prompt_index * self._n + piece.index] = piece.finish_reason

    def usage(self) -> Usage:
        """Return the tokens so far."""
        return Usage(
            self._num_prompt_tokens,
            self._num_output_tokens,
            self._num_prompt_tokens + self._num_output_tokens,
            PromptTokensDetails(sum(self._num_cached)),
        )

    def fill(self, record: RequestRecord) -> None:
        """Write down tokens and preemptions of all prompts, and when the first of them began to run and to answer."""
        record.prompt_tokens, record.output_tokens = self._num_prompt_tokens, self._num_output_tokens
        record.cached_tokens = sum(self._num_cached)
        record.finish_reasons = [reason or "abort" for reason in self._finish_reasons]
        metrics = [one for one in self._metrics if one is not None]
        queued = [one.queue_s for one in metrics if one.queue_s is not None]
        first = [one.first_token_s - one.arrival_s for one in metrics if one.first_token_s is not None]
        record.queue_s, record.ttft_s = min(queued, default=None), min(first, default=None)
        record.preemptions = sum(one.num_preemptions for one in metrics)
