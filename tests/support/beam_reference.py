"""Beam search as the textbook has it: every continuation of every beam scored and sorted, nothing cut short."""

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from quire.core.sampling_params import BeamSearchParams


class Found(NamedTuple):
    """A hypothesis: its generated tokens, the sum of their logprobs, its score, and why it ended."""

    token_ids: list[int]
    logprob: float
    score: float
    finish_reason: str


def reference_search(
    logprobs_after: Callable[[list[int]], Sequence[float]],
    params: BeamSearchParams,
    max_tokens: int,
    eos: frozenset[int],
) -> list[Found]:
    """Return the hypotheses, the best first. `logprobs_after` tells the logprobs of all tokens after generated ones,
    -inf of those that are not allowed.

    Step by step what transformers' `_beam_search` does with `early_stopping=False`.
    """
    width, penalty = params.beam_width, params.length_penalty
    running: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[Found] = []
    for length in range(1, max_tokens + 1):
        everything = [
            ([*tokens, token], total + logprob)
            for tokens, total in running
            for token, logprob in enumerate(logprobs_after(tokens))
            if logprob > -inf
        ]
        candidates = sorted(everything, key=lambda each: -each[1])[: max(2, 1 + len(eos)) * width]
        for tokens, total in candidates[:width]:
            if tokens[-1] in eos or length == max_tokens:
                reason = "stop" if tokens[-1] in eos else "length"
                finished.append(Found(tokens, total, total / length**penalty, reason))
        finished = sorted(finished, key=lambda each: -each.score)[:width]
        running = [each for each in candidates if each[0][-1] not in eos][:width]
        if not running or (len(finished) == width and running[0][1] / length**penalty <= finished[-1].score):
            break
    return finished
