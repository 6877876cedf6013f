"""Row state: the matcher of one row's grammar, a function of the tokens of its output.

It is made, or caught up, where a mask is filled, from the known tokens of the row. So a row that resumes after a
preemption, or has lost its state, needs nothing but its tokens.

Masks are filled by jobs, in threads, while the forward pass runs. A row has one job at a time, and nothing else touches
its matcher meanwhile. A row with a mask that is not filled when the forward pass is done is late: it is not sampled in
this step, and the next step of the row finds the mask.
"""

import copy
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import NewRow
from quire.core.structured_outputs import NOTHING_FOLLOWS, StructuredOutputsParams
from quire.decoding.grammars.compiler import (
    CompiledGrammar,
    GrammarCache,
    GrammarError,
    InvalidGrammarError,
    fault_of,
    forces_tokens,
    reason_of,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_FORCED = 32          # tokens that one step forces: each takes some microseconds between two steps
MAX_FORCED_BYTES = 4096  # longer runs of forced bytes are sampled: tokenizing them again for each token takes long
MAX_TOKEN_BYTES = 64     # bytes of a forced text that are looked at for another first token
LEXER_IS_FULL = "too many states"  # text of the library's error
ALL_BITS = 0xFFFFFFFF
FAILED = "its grammar has failed"
FIELD = "structured_outputs"

_LIMIT = re.compile("max is|limit|fuel|too many", re.IGNORECASE)  # texts of the library's errors

Result = TypeVar("Result")


class TokenMasks(NamedTuple):
    """Masks of some samples of a step: samples int64 [num], ascending; bits uint32 [num, num_words], one per token.

    `failures`: samples without masks, which could not be computed, with the reason; theirs allow every token. `late`:
    samples of late rows, which are not among `samples`; what is drawn for them is dropped. `at_fault`: failures for
    which the request's grammar is at fault itself.
    """

    samples: NDArray[np.int64]
    bits: NDArray[np.uint32]
    failures: dict[int, str]
    late: frozenset[int] = frozenset()
    at_fault: frozenset[int] = frozenset()

    def part(self, start: int, stop: int) -> "TokenMasks":
        """Return the masks of samples [start, stop), counted from `start`."""
        within = slice(*np.searchsorted(self.samples, [start, stop]))
        failures = {sample - start: why for sample, why in self.failures.items() if start <= sample < stop}
        late = frozenset(sample - start for sample in self.late if start <= sample < stop)
        return TokenMasks(self.samples[within] - start, self.bits[within], failures, late)


class RowProgress(NamedTuple):
    """Progress of a grammar over the tokens that were sampled for its row."""

    num_kept: int                    # tokens kept; fewer than all only if the grammar has ended
    has_ended: bool = False          # the output is complete, and only an end of sequence could follow
    forced: tuple[int, ...] = ()     # the next tokens: each is the only one that its mask would allow
    failure: str | None = None       # why the row cannot continue
    is_at_fault: bool = False        # the grammar is


def failure_of(error: BaseException) -> str:
    """Return why a row cannot continue. Raises `error` if it is none of the library, such as KeyboardInterrupt."""
    reason = reason_of(error)
    return f"{FIELD} cannot be used: {reason}" if isinstance(error, InvalidGrammarError) else f"{FAILED}: {reason}"


class MaskJob:
    """The masks behind the known tokens of a row, and behind each draft: uint32 [1 + num_drafts, num_words].

    Behind a draft that is forbidden all tokens are allowed, for no sample there is kept. `failure`: why there are none.
    """

    __slots__ = ("_num_tokens", "_state", "bits", "drafts", "failure", "is_at_fault", "is_done", "started_s")

    def __init__(
        self, state: "RowState", num_tokens: int, drafts: Sequence[int], bits: NDArray[np.uint32]
    ) -> None:
        self._state, self._num_tokens, self.drafts, self.bits = state, num_tokens, drafts, bits
        self.started_s = time.monotonic()
        self.failure: str | None = None
        self.is_at_fault = False  # the grammar is
        self.is_done = False

    def run(self, cache: GrammarCache) -> None:
        try:
            self._state.fill(cache, self.drafts, self.bits)
        except BaseException as error:
            self.failure, self.is_at_fault = FAILED, isinstance(error, InvalidGrammarError)
            self.bits.fill(ALL_BITS)
            self.failure = failure_of(error)
        finally:
            self.is_done = True

    def serves(self, known: NDArray[np.int32], drafts: Sequence[int]) -> bool:
        """Return whether its masks are those behind the known tokens, and behind these drafts."""
        return len(known) == self._num_tokens and (not drafts or list(drafts) == list(self.drafts[: len(drafts)]))


class RowState:
    """The grammar of one row, from when it gets its owner. `job`: that was started and not used yet."""

    def __init__(self, new: NewRow, params: StructuredOutputsParams) -> None:
        self._params = params
        self._num_prompt_tokens = new.num_prompt_tokens
        self._forces = forces_tokens(new.params, new.bad_words_token_ids)
        self._may_force = self._forces and new.params.logprobs is None  # forced tokens have no logprobs
        self._is_beam = new.beam is not None           # the search chooses its next token, after the step
        self._output = list[int]()                     # known tokens at the last job
        self._grammar: CompiledGrammar | None = None
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0
        self.last_step = 0
        self.job: MaskJob | None = None

    def fork(self) -> "RowState":
        """Return the state of a row that has the same output, and may continue otherwise."""
        other = copy.copy(self)
        other._output, other.job = list(self._output), None
        if self.job is not None:  # it may be using the matcher
            other._grammar = other._matcher = None
        elif self._matcher is not None:
            other._matcher = self._matcher.deep_copy()
        return other

    def drop(self) -> None:
        """Free the matcher, unless a job needs it; it is made again for the next mask."""
        if self.job is None or self.job.is_done:
            self._grammar = self._matcher = self.job = None

    def start(self, known: NDArray[np.int32], drafts: Sequence[int], bits: NDArray[np.uint32]) -> MaskJob | None:
        """Return a new job for the masks behind the known tokens, int32 [num_tokens], and behind each draft.

        None if there is one that is not used yet: it has the masks, or is still filling others, which were late.
        """
        if self.job is not None and (not self.job.is_done or self.job.serves(known, drafts)):
            return None
        self._output += known[self._num_prompt_tokens + len(self._output) :].tolist()
        self.job = MaskJob(self, len(known), drafts, bits)
        return self.job

    def fill(self, cache: GrammarCache, drafts: Sequence[int], bits: NDArray[np.uint32]) -> None:
        """Fill the masks of a job. GrammarError if the grammar cannot be used."""

        def fill_all() -> None:
            matcher = self._caught_up(cache)
            assert self._grammar is not None, "a matcher without its grammar"
            _fill_mask(matcher, self._grammar, bits[0])
            _check(matcher)
            if drafts:
                _fill_behind(matcher.deep_copy(), self._grammar, drafts, bits[1:])

        self._with_own_lexer(cache, fill_all)

    def advance(
        self, cache: GrammarCache, token_ids: Sequence[int], max_forced: int, vocab_size: int
    ) -> RowProgress:
        """Take the tokens that were sampled behind the known ones, and those that then are forced.

        A token is forced if it is the only one that the next mask would have: the library forces the tokens of the
        bytes that must follow, tokenized as one text. GrammarError if a token is not allowed. A beam takes no token
        here: the search chooses it.
        """
        if self._is_beam:
            return RowProgress(len(token_ids))

        def advance_all() -> RowProgress:
            matcher = self._caught_up(cache)
            for index, token in enumerate(token_ids, start=1):
                if self._consume(matcher, token):
                    return RowProgress(index, has_ended=True)
            return self._force(matcher, len(token_ids), max_forced, vocab_size)

        return self._with_own_lexer(cache, advance_all)

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """Return the number of leading drafts that are allowed after the last tokens; 0 without a matcher."""
        return 0 if self._matcher is None else self._matcher.validate_tokens(list(drafts))

    def _force(self, matcher: "LLMatcher", num_kept: int, max_forced: int, vocab_size: int) -> RowProgress:
        """Take the tokens that are forced."""
        forced, most = list[int](), min(max_forced, MAX_FORCED) if self._may_force else 0
        while len(forced) < most and len(matcher.compute_ff_bytes()) <= MAX_FORCED_BYTES:
            following = matcher.compute_ff_tokens()
            if not following or following[0] >= vocab_size:
                break
            if not matcher.try_consume_tokens(following[:1]):
                break  # the unknown token, or a special one that the text spells; neither has bytes
            self._num_consumed += 1
            forced.append(following[0])
            if matcher.is_stopped():
                return RowProgress(num_kept, has_ended=True, forced=tuple(forced))
        return RowProgress(num_kept, forced=tuple(forced))

    def _with_own_lexer(self, cache: GrammarCache, act: Callable[[], Result]) -> Result:
        """Do something; if the lexer is full of the states of other rows, do it with a grammar that no row shares."""
        try:
            return act()
        except GrammarError as error:
            if LEXER_IS_FULL not in str(error) or self._grammar is None:
                raise
            cache.discard(self._params, self._grammar)
            self._grammar = self._matcher = None
        return act()

    def _caught_up(self, cache: GrammarCache) -> "LLMatcher":
        """Return the matcher behind the output."""
        if self._matcher is None:
            self._grammar, self._num_consumed = cache.get(self._params, forces=self._forces), 0
            self._matcher = self._grammar.start()
        new = self._output[self._num_consumed :]
        if new and not self._matcher.consume_tokens(new):
            raise refusal_of(self._matcher, new)
        self._num_consumed += len(new)
        return self._matcher

    def _consume(self, matcher: "LLMatcher", token: int) -> bool:
        """Take one token; return whether the output is complete with it."""
        if not matcher.consume_token(token):
            raise refusal_of(matcher, [token])
        self._num_consumed += 1
        return matcher.is_stopped()


def refusal_of(matcher: "LLMatcher", token_ids: Sequence[int]) -> GrammarError:
    """Return the error of a matcher that does not take tokens: its own limits, or tokens that no mask has allowed."""
    error = fault_of(matcher)
    if error is not None and _LIMIT.search(str(error)):
        return error
    return GrammarError(f"it does not allow the tokens {list(token_ids[:8])}" + (f": {error}" if error else ""))


def _fill_mask(matcher: "LLMatcher", grammar: CompiledGrammar, bits: NDArray[np.uint32]) -> None:
    """Fill one mask, uint32 [num_words]. InvalidGrammarError if only ends of an output that is not complete can follow.

    Where a text is forced, llguidance allows only its first token. If the text begins with the spelling of a special
    token, that is the special token, which no text matches: it is replaced by the first token of its characters.
    """
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    if grammar.text_ends and not matcher.is_accepting():
        _forbid_ends(matcher, grammar, bits)
    if np.count_nonzero(bits) != 1:
        return
    word = int(bits.argmax())
    token = 32 * word + int(bits[word]).bit_length() - 1
    tokenizer = grammar.tokenizer
    if bits[word].bit_count() > 1 or not tokenizer.is_special_token(token) or matcher.validate_tokens([token]):
        return
    pieces = tokenizer.greedy_tokenize(matcher.compute_ff_bytes().decode(errors="ignore"))
    if matcher.validate_tokens(pieces[:1]):
        bits[word] = 0
        bits[pieces[0] // 32] = 1 << pieces[0] % 32


def _forbid_ends(matcher: "LLMatcher", grammar: CompiledGrammar, bits: NDArray[np.uint32]) -> None:
    """Take tokens from a mask that fit by their texts, and would end the output before it is complete.

    Where a forced text begins with one, a token of fewer of its bytes stands in for it.
    """
    had_tokens = bits.any()
    for token in grammar.text_ends:
        bits[token // 32] &= ALL_BITS ^ (1 << token % 32)
    if bits.any() or not had_tokens:
        return
    text = matcher.compute_ff_bytes()[:MAX_TOKEN_BYTES]
    for length in range(len(text) - 1, 0, -1):
        token = grammar.tokenizer.tokenize_bytes(text[:length])[0]
        if token not in grammar.text_ends and matcher.validate_tokens([token]):
            bits[token // 32] = 1 << token % 32
            return
    raise InvalidGrammarError("each token of the vocabulary that can follow ends the output")


def _check(matcher: "LLMatcher") -> None:
    """Raise GrammarError if the mask that was filled last is none: an error, or no token that could follow."""
    if (error := fault_of(matcher)) is not None:
        raise error
    if matcher.stop_reason() == NOTHING_FOLLOWS:
        raise InvalidGrammarError("no token of the vocabulary can follow")


def _fill_behind(
    matcher: "LLMatcher", grammar: CompiledGrammar, drafts: Sequence[int], bits: NDArray[np.uint32]
) -> None:
    """Fill the masks behind drafts, uint32 [num_drafts, num_words], by a matcher in front of them."""
    bits.fill(ALL_BITS)
    for draft, own in zip(drafts, bits, strict=True):
        if not matcher.try_consume_tokens([draft]) or matcher.is_stopped():
            return
        _fill_mask(matcher, grammar, own)
        _check(matcher)
