"""Memory bound on the logprobs of all running calls, reserved before a call is queued.

A call reserves its maximum, so that an admitted call never fails for lack of memory.
"""

from collections.abc import Sequence

from quire.core.logprob_table import CANDIDATE_BYTES
from quire.core.prompt_scores import width_of
from quire.core.sequence import Request
from quire.server.errors import invalid, logprob_memory_full
from quire.server.options import Limits


class LogprobMemory:
    """Bytes reserved for packed logprobs, at most `max_logprob_bytes` in all."""

    def __init__(self) -> None:
        self.num_bytes = 0                       # reserved by running calls

    def reserve(self, requests: Sequence[Request], limits: Limits) -> "LogprobReservation":
        """Reserve memory for a call. ApiError 400 if it alone exceeds the bound, 429 if it does with other calls."""
        params = requests[0].params      # the same for all prompts of a call
        if params.logprobs is None and params.prompt_logprobs is None and params.prompt_logprob_token_ids is None:
            return LogprobReservation(self, 0)
        num_candidates = sum(_num_output_candidates(request) for request in requests)
        most = limits.max_output_candidates
        if num_candidates > most:
            invalid(
                f"{len(requests)} prompts with n {params.n}, max_tokens {requests[0].max_tokens} and logprobs "
                f"{params.logprobs} come to {num_candidates} logprobs: one call may have at most {most} "
                f"(max_output_candidates)",
                param="logprobs",
            )
        num_candidates += sum(_num_prompt_candidates(request) for request in requests)
        num_bytes, most = CANDIDATE_BYTES * num_candidates, limits.max_logprob_bytes
        if num_bytes > most:
            invalid(f"the logprobs of the call may take {num_bytes} bytes: at most {most} (max_logprob_bytes)",
                    param="logprobs")  # fmt: skip
        if self.num_bytes + num_bytes > most:
            raise logprob_memory_full(self.num_bytes, most)
        self.num_bytes += num_bytes
        return LogprobReservation(self, num_bytes)


class LogprobReservation:
    """Memory of one call, until it is released."""

    def __init__(self, memory: LogprobMemory, num_bytes: int) -> None:
        self._memory, self._num_bytes = memory, num_bytes

    def release(self) -> None:
        """Release the memory. Idempotent."""
        self._memory.num_bytes -= self._num_bytes
        self._num_bytes = 0


def _num_output_candidates(request: Request) -> int:
    asked = request.params.logprobs
    return 0 if asked is None else request.params.n * request.max_tokens * (asked + 1)


def _num_prompt_candidates(request: Request) -> int:
    asked = request.params.prompt_logprobs
    num_each = (0 if asked is None else asked + 1) + width_of(request.params.prompt_logprob_token_ids)
    return len(request.prompt_token_ids) * num_each
