"""Admission limits: what can ever run, checked before a request is queued. Plain data.

A request must fit into the pool without the pinned blocks, and no pin is accepted that would break a promise. The
scheduler refuses by these limits; the server and `LLM` check them before they queue a request.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NoReturn

from quire.cache.block_table import blocks_for, worst_case_blocks
from quire.cache.manager import KVCacheManager
from quire.core.errors import ContextLengthError, InvalidRequestError
from quire.core.sequence import Request
from quire.core.task import MAX_PINNED_PREFIXES, PinTask


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The longest sequence, the rows of a step, and the whole pool of KV blocks, of which some are pinned."""

    num_blocks: int           # 0: the model keeps no keys and values
    block_size: int           # tokens
    max_num_seqs: int
    max_model_len: int        # prompt and output together, tokens
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
