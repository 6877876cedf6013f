"""Admission with reserved memory: Orca's policies (Kwon et al. 2023, section 6.1).

`contiguous-max` reserves the longest possible sequence, `contiguous-pow2` the prompt and the next power of two of the
true output length, `contiguous-oracle` the true lengths. The true output length is the request's max_tokens: an oracle
knows it where the end of sequence is ignored. An admitted request never needs more, so none is ever preempted.
"""

from quire.cache.manager import KVCacheManager
from quire.cache.prefix_match import PrefixMatch
from quire.core.config import MemoryPolicy, SchedulerConfig
from quire.core.deltas import WaitReason
from quire.core.errors import ContextLengthError
from quire.core.sequence import NO_ROW, Request
from quire.scheduling.admission import AdmissionControl
from quire.scheduling.queues import RequestQueues
from quire_lab.baselines.contiguous import ContiguousManager


def num_reserved_tokens(policy: MemoryPolicy, num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """Return how many tokens of one sequence are reserved."""
    if policy == "contiguous-max":
        return max_model_len
    output_len = 1 << (max_tokens - 1).bit_length() if policy == "contiguous-pow2" else max_tokens
    return min(num_prompt_tokens + output_len, max_model_len)


class ReservingAdmission(AdmissionControl):
    """Admits a request when there is a chunk for each of its sequences.

    Those that wait for the first one's prompt take theirs when they fork. No request is admitted before that.
    """

    def __init__(self, queues: RequestQueues, cache: KVCacheManager, config: SchedulerConfig) -> None:
        assert isinstance(cache, ContiguousManager), "nothing is reserved in paged memory"
        super().__init__(queues, cache, config)
        self._chunks, self._policy = cache, cache.policy
        self._is_fork_pending = False  # a running request has sequences that have no chunks yet

    def check_admissible(self, request: Request) -> None:
        """Raise ContextLengthError if there could never be a chunk for each sequence."""
        num_tokens, n = self.num_reserved(request), len(request.live)
        num_chunks = self._chunks.num_chunks(num_tokens, when_empty=True)
        if num_chunks < n:
            raise ContextLengthError(
                f"memory_policy {self._policy} reserves {num_tokens} tokens for each of {n} sequences, but only "
                f"{num_chunks} of these fit in {self._cache.num_blocks} KV blocks of {self._cache.block_size} tokens"
            )

    def num_reserved(self, request: Request) -> int:
        """Return how many tokens each sequence of a request reserves."""
        num_prompt_tokens = len(request.prompt_token_ids)
        return num_reserved_tokens(self._policy, num_prompt_tokens, request.max_tokens, self._config.max_model_len)

    def start_step(self) -> None:
        """Begin a step."""
        super().start_step()
        self._is_fork_pending = False

    def reserve(self, request: Request) -> None:
        """Keep back all that is free while sequences of a request have no chunks."""
        self._is_fork_pending |= any(sequence.row == NO_ROW for sequence in request.live)

    def shortage(self, request: Request) -> WaitReason | None:
        """Return what is short: rows for a request's sequences, or chunks, where a fork is pending."""
        if self._queues.num_running_seqs + len(request.live) > self._config.max_num_seqs:
            return "max_num_seqs"
        return "kv_blocks" if self._is_fork_pending else None

    def num_spare_blocks(self, request: Request, match: PrefixMatch) -> int:
        """Return 0 if there is a chunk for each sequence, else -1."""
        return 0 if self._chunks.num_chunks(self.num_reserved(request)) >= len(request.live) else -1
