"""Model of a step's time: seconds from its work alone. The worker fits it, the scheduler plans chunks of prompts by it.

A step reads all weights, multiplies its tokens with them, multiplies each query with the keys that it sees, and reads
the contexts of its rows. Each part has a price, and the sum is the step's time. Tokens behind which the next one is
drawn have a price of their own: they need logits, but there are few in a step, and the first few cost little while the
weights are read. The scheduler has no clock: prices come with the results of steps, so a recorded run can be repeated.
"""

import math
from typing import Literal, NamedTuple


class StepWork(NamedTuple):
    """Work of a step, for the prediction of its time.

    num_tokens: those of chunks, behind which nothing is drawn; num_attended: pairs of a query and a token that it sees;
    num_context: tokens of the contexts, the new ones included, over all rows; num_samples: tokens behind which the next
    one is drawn, each draft too.
    """

    num_tokens: float = 0
    num_attended: float = 0
    num_context: float = 0
    num_samples: float = 0

    def __add__(self, other: tuple[float, ...]) -> "StepWork":  # type: ignore[override]
        """Return the work of both."""
        num_tokens, num_attended, num_context, num_samples = other
        return StepWork(
            self.num_tokens + num_tokens, self.num_attended + num_attended, self.num_context + num_context,
            self.num_samples + num_samples,
        )  # fmt: skip


def chunk_work(start: int, num_tokens: int, num_samples: int = 0) -> StepWork:
    """Return the work of tokens [start, start + num_tokens) of one sequence, the last `num_samples` with a sample."""
    num_attended = num_tokens * start + num_tokens * (num_tokens + 1) / 2
    num_context = start + num_tokens if num_tokens else 0
    return StepWork(num_tokens - num_samples, num_attended, num_context, num_samples)


StepKind = Literal["decode", "mixed", "prefill"]  # decodes only, prompts beside decodes, prompts only


class StepTiming(NamedTuple):
    """Seconds of a step, and their ratio to the seconds that the prices before it predicted.

    `seconds` is None without a measurement, `ratio` without a prediction. Short steps are compared in lots, in the
    timing of the last one.
    """

    kind: StepKind
    seconds: float | None = None
    ratio: float | None = None


class StepTimes(NamedTuple):
    """Prices in seconds: of a step by itself, and of each unit of its work. None is negative, and step_s is above 0.

    margin: at least 1; nine of ten of the steps with chunks that were measured last took at most so many times what was
    predicted.
    """

    step_s: float
    token_s: float
    attended_s: float
    context_s: float
    sample_s: float
    margin: float = 1.0

    def seconds(self, work: StepWork) -> float:
        """Return the likely seconds of a step."""
        return (
            self.step_s + self.token_s * work.num_tokens + self.attended_s * work.num_attended
            + self.context_s * work.num_context + self.sample_s * work.num_samples
        )  # fmt: skip

    def most_tokens(self, start: int, seconds: float) -> int:
        """Return the most tokens from position `start` of a sequence on that add at most so many seconds to a step."""
        left = seconds - self.context_s * start
        if left <= 0:
            return 0
        half_pair = self.attended_s / 2                 # half_pair k^2 + per_token k = left
        per_token = self.token_s + self.context_s + self.attended_s * (start + 0.5)
        rate = per_token + math.sqrt(per_token * per_token + 4 * half_pair * left)
        return int(min(2 * left / rate, _MOST_TOKENS)) if rate > 0 else _MOST_TOKENS

    def prompt_seconds(
        self, start: int, num_tokens: int, tokens_per_step: int, decode_s: float = 0.0, target_s: float = math.inf
    ) -> float:  # fmt: skip
        """Return the likely seconds until a sequence has computed tokens [start, start + num_tokens) in whole steps.

        Without decodes (decode_s 0) a step has at most `tokens_per_step`; beside decodes that take decode_s by
        themselves, as many as fit into the target, if it can be held.
        """
        chunk_s = self.seconds(chunk_work(start, num_tokens)) - self.step_s
        if not decode_s:
            return chunk_s + self.step_s * math.ceil(num_tokens / tokens_per_step)
        if target_s == math.inf:
            return chunk_s + decode_s * math.ceil(num_tokens / tokens_per_step)
        return chunk_s / max(1 - decode_s / target_s, _LEAST_SHARE)


_MOST_TOKENS = 1 << 30
_LEAST_SHARE = 1 / 9  # least part of the time for prompts, beside decodes over the target: scheduling/time_budget.py
