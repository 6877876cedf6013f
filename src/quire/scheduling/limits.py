"""What can ever run: the limits that a request is held against before it is queued, as plain data.

The scheduler refuses by them, and whoever makes requests, in this process or in another, asks them first.
"""

from dataclasses import dataclass

from quire.cache.block_table import worst_case_blocks
from quire.core.errors import ContextLengthError, InvalidRequestError


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The longest sequence, the rows of a step, and the whole pool of KV blocks."""

    num_blocks: int
    block_size: int           # tokens
    max_num_seqs: int
    max_model_len: int        # prompt and output together, tokens

    def most_tokens(self, num_prompt_tokens: int, n: int) -> int:
        """Return the most output tokens that a request could be given: by the model's length and by the pool."""
        full = num_prompt_tokens // self.block_size
        blocks_per_branch = full + (self.num_blocks - full) // n
        longest = min(self.max_model_len, blocks_per_branch * self.block_size)
        return longest - num_prompt_tokens

    def check_admissible(self, num_prompt_tokens: int, max_tokens: int, n: int) -> None:
        """Raise InvalidRequestError if such a request could never run, even alone."""
        if n > self.max_num_seqs:
            raise InvalidRequestError(
                f"n is {n}, but at most {self.max_num_seqs} sequences run at once (max_num_seqs)", param="n"
            )
        self._check_length(num_prompt_tokens, max_tokens)
        need = worst_case_blocks(num_prompt_tokens, max_tokens, n, self.block_size)
        if need > self.num_blocks:
            raise ContextLengthError(
                f"a prompt of {num_prompt_tokens} tokens with max_tokens {max_tokens} and n {n} may need {need} KV "
                f"blocks of {self.block_size} tokens, but there are {self.num_blocks} (num_kv_blocks)"
            )

    def _check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Refuse in OpenAI's words: by them litellm and langchain tell that a context is too long."""
        length = num_prompt_tokens + max_tokens
        if length <= self.max_model_len:
            return
        given = f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}: together {length}"
        if num_prompt_tokens >= self.max_model_len:
            given = f"the prompt is too long: it has {num_prompt_tokens} tokens"
        limit = f"this model's maximum context length is {self.max_model_len} tokens (max_model_len)"
        raise ContextLengthError(f"{given}, but {limit}")
