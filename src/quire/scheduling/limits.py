"""Limits of requests: what can ever run, checked before a request is queued, and deadlines of those queued.

A request must fit into the pool without the pinned blocks, and no pin is accepted that would break a promise. The
scheduler refuses by these limits; the server and `LLM` check them before they queue a request.

A deadline gives no rank: it only ends a request. One without a token fails; an answer that has begun ends with what is
there.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NoReturn

from quire.cache.block_table import blocks_for, worst_case_blocks
from quire.cache.manager import KVCacheManager
from quire.cache.states import most_slots
from quire.core.deltas import SequenceDelta
from quire.core.errors import ContextLengthError, InvalidRequestError
from quire.core.pooling import MAX_PINNED_PREFIXES, PinTask
from quire.core.sequence import Request, Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The longest sequence, the rows of a step, and the whole pool of KV blocks, of which some are pinned."""

    num_blocks: int           # 0: the model keeps no keys and values
    block_size: int           # tokens
    max_num_seqs: int
    max_model_len: int        # prompt and output together, tokens
    num_state_slots: int = 0      # 0: the model keeps no states
    num_pinned_blocks: int = 0    # also those that a pin under way may take

    def most_tokens(self, num_prompt_tokens: int, n: int) -> int:
        """Return the most output tokens that a request could be given: by the model's length and by the pool."""
        full = num_prompt_tokens // self.block_size
        blocks_per_branch = full + (self.num_blocks - self.num_pinned_blocks - full) // n
        longest = min(self.max_model_len, blocks_per_branch * self.block_size)
        return longest - num_prompt_tokens

    def check_admissible(self, num_prompt_tokens: int, max_tokens: int, n: int) -> None:
        """Raise InvalidRequestError if such a request could never run, even alone."""
        if n > self.max_num_seqs:
            raise InvalidRequestError(
                f"n is {n}, but at most {self.max_num_seqs} sequences run at once (max_num_seqs)", param="n"
            )
        if self.num_state_slots and most_slots(n) > self.num_state_slots:
            raise InvalidRequestError(
                f"n is {n}: as many sequences may need {most_slots(n)} slots for their states, but there are "
                f"{self.num_state_slots} (num_state_slots)", param="n"
            )
        if num_prompt_tokens + max_tokens > self.max_model_len:
            self._refuse_length(num_prompt_tokens, max_tokens)
        if self.num_blocks == 0:
            return
        need = worst_case_blocks(num_prompt_tokens, max_tokens, n, self.block_size)
        if need > self.num_blocks - self.num_pinned_blocks:
            pinned = f", {self.num_pinned_blocks} of them pinned" if self.num_pinned_blocks else ""
            raise ContextLengthError(
                f"a prompt of {num_prompt_tokens} tokens with max_tokens {max_tokens} and n {n} may need {need} KV "
                f"blocks of {self.block_size} tokens, but there are {self.num_blocks} (num_kv_blocks){pinned}"
            )

    def check_length(self, least_tokens: int) -> None:
        """Raise ContextLengthError for a prompt that is too long even if it has no more than `least_tokens`."""
        if least_tokens >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt is too long: it has {least_tokens} tokens or more, but this model's maximum context "
                f"length is {self.max_model_len} tokens (max_model_len), the first token of the answer among them",
                excess=(least_tokens, self.max_model_len - 1),
            )

    def check_pinnable(self, num_tokens: int, num_pins: int, most_needed: int) -> None:
        """Raise InvalidRequestError if a prefix cannot be pinned beside `num_pins` prefixes.

        A sequence of max_model_len still fits, and so does each accepted request;
        `most_needed` is the worst case of the largest, in blocks.
        """
        if num_pins >= MAX_PINNED_PREFIXES:
            raise InvalidRequestError(f"{num_pins} prefixes are pinned already, and no more can be", param="prompt")
        own, longest = blocks_for(num_tokens, self.block_size), blocks_for(self.max_model_len, self.block_size)
        reserved = max(longest, most_needed)
        if own + reserved > self.num_blocks - self.num_pinned_blocks:
            reason = f"max_model_len {self.max_model_len}" if longest == reserved else "a request that was let in"
            raise InvalidRequestError(
                f"a prefix of {num_tokens} tokens takes {own} KV blocks of {self.block_size} tokens, but of all "
                f"{self.num_blocks} (num_kv_blocks) {self.num_pinned_blocks} are pinned and {reason} needs {reserved}",
                param="prompt",
            )

    def _refuse_length(self, num_prompt_tokens: int, max_tokens: int) -> NoReturn:
        """Refuse in OpenAI's words: litellm and langchain recognize a context that is too long by them."""
        length = num_prompt_tokens + max_tokens
        given = f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: together {length}"
        excess = None
        limit = f"this model's maximum context length is {self.max_model_len} tokens (max_model_len)"
        if num_prompt_tokens >= self.max_model_len:
            given = f"the prompt is too long: it has {num_prompt_tokens} tokens"
            limit += ", the first token of the answer among them"
            excess = num_prompt_tokens, self.max_model_len - 1
        raise ContextLengthError(f"{given}, but {limit}", excess=excess)


def check_pinnable(
    num_tokens: int, requests: Collection[Request], cache: KVCacheManager, limits: AdmissionLimits
) -> None:
    """Raise InvalidRequestError if a prefix of so many tokens cannot be pinned beside all accepted requests."""
    if not cache.prefixes.can_be_found:
        raise InvalidRequestError("nothing can be pinned: prefix caching is off (enable_prefix_caching)")
    num_pins = len(cache.pins) + sum(isinstance(request.task, PinTask) for request in requests)
    limits.check_pinnable(num_tokens, num_pins, _most_needed_blocks(requests, cache.block_size))


def num_pinned_blocks(requests: Collection[Request], cache: KVCacheManager) -> int:
    """Return how many blocks are pinned; a pin that is under way counts with its worst case."""
    under_way = (len(request.prompt_token_ids) for request in requests if isinstance(request.task, PinTask))
    return cache.pins.num_blocks + sum(map(cache.blocks_for, under_way))


def check_pinned(requests: Collection[Request], cache: KVCacheManager, limits: AdmissionLimits) -> None:
    """Assert that the limits know what is pinned, and that each accepted request can still run."""
    num_pinned = num_pinned_blocks(requests, cache)
    assert limits.num_pinned_blocks == num_pinned, f"{num_pinned} blocks are pinned, but the limits are {limits}"
    most = _most_needed_blocks(requests, cache.block_size) if limits.num_blocks else 0
    assert most + num_pinned <= limits.num_blocks, f"{num_pinned} blocks are pinned, and a request may need {most}"


def _most_needed_blocks(requests: Collection[Request], block_size: int) -> int:
    """Return the worst case of the largest request."""
    sizes = ((len(request.prompt_token_ids), request.max_tokens, request.params.n) for request in requests)
    return max((worst_case_blocks(*size, block_size) for size in sizes), default=0)


DEADLINE = "deadline"   # the stop_reason of an answer that has ended by it
_SPARE = 64             # entries of ended requests that are never worth a sweep


class Deadlines:
    """A heap of the next deadline of each request that has one. `requests`: those that have not ended, by id."""

    def __init__(self, requests: Mapping[int, Request]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, int]] = []        # (time, request id); some requests have ended since
        self.next_s = math.inf                          # no deadline passes before

    def __len__(self) -> int:
        """Count the entries, of ended requests too: at most about twice as many as there are requests."""
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Add the next deadline of a request, if there is one."""
        due_s = request.due_s
        if due_s == math.inf:
            return
        if len(self._heap) >= 2 * len(self._requests) + _SPARE:
            self._heap = [entry for entry in self._heap if entry[1] in self._requests]
            heapify(self._heap)
        heappush(self._heap, (due_s, request.request_id))
        self.next_s = self._heap[0][0]

    def take_passed(self, now_s: float) -> Iterator[Request]:
        """Yield the requests past their deadlines, once each. The caller ends them."""
        while self._heap and self._heap[0][0] <= now_s:
            request = self._requests.get(heappop(self._heap)[1])
            if request is None:
                continue
            if request.due_s <= now_s:
                yield request
            else:
                self.add(request)                       # its first token was in time: the next one is for its end
        self.next_s = self._heap[0][0] if self._heap else math.inf

    def check(self) -> None:
        """Assert that each request with a deadline has an entry that is not too late."""
        due_s = {request_id: request.due_s for request_id, request in self._requests.items()}
        entered: dict[int, float] = {}
        for entry_s, request_id in self._heap:
            entered[request_id] = min(entry_s, entered.get(request_id, math.inf))
        assert self.next_s == min(self._heap, default=(math.inf, 0))[0], f"the next deadline is not at {self.next_s}"
        late = [id_ for id_, each in due_s.items() if each < entered.get(id_, math.inf)]
        assert not late, f"requests {late} have deadlines and no entries in time"


def late_failure(request: Request) -> SequenceDelta:
    """Return the end of a request that has no token when a deadline passes."""
    params = request.params
    asked = {"ttft_deadline_ms": params.ttft_deadline_ms, "deadline_ms": params.deadline_ms}
    field, most = min(((name, each) for name, each in asked.items() if each is not None), key=lambda each: each[1])
    error = f"the first token was not there within {most} ms ({field})"
    return SequenceDelta(request.request_id, 0, [], error=error, param=field, is_late=True)


def late_end(request: Request, sequence: Sequence) -> SequenceDelta:
    """Return the end of a branch that has a token, with no further ones."""
    delta = SequenceDelta(request.request_id, sequence.index, [], finish_reason="length")
    delta.stop_reason, delta.is_late = DEADLINE, True
    if request.params.logprobs is not None:
        delta.logprobs = []
    return delta


def late_ends(request: Request) -> list[SequenceDelta]:
    """Return the ends of the branches of a request that are still extended."""
    return [late_end(request, each) for each in request.live if each.status is not SequenceStatus.PADDING]
