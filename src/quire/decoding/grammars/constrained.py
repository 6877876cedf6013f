"""Constrained decoding of one engine."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import SamplingParams
from quire.core.structured_outputs import StructuredOutputsParams
from quire.decoding.grammars.compiler import GrammarCache, GrammarError, check_grammar, forces_tokens
from quire.decoding.grammars.row_state import FIELD, failure_of
from quire.decoding.grammars.rows import GrammarRows

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class TokenizerText(NamedTuple):
    """A tokenizer that spells every text exactly: its tokenizer.json, the number of its tokens, its end of sequence."""

    json: str
    vocab_size: int
    eos_token_id: int | None = None


def read_vocabulary(text: TokenizerText, vocab_size: int, eos_token_ids: frozenset[int]) -> "LLTokenizer":
    """Return the tokenizer for a model with `vocab_size` tokens; those that the tokenizer has not are never allowed.

    `eos_token_ids`, the model's, may end an output that is complete, as may the tokenizer's own. ValueError for a
    tokenizer that llguidance cannot use. Holds the interpreter lock: 1.2 s for 151,646 tokens.
    """
    from llguidance import LLTokenizer  # noqa: PLC0415

    ends = eos_token_ids if text.eos_token_id is None else eos_token_ids | {text.eos_token_id}
    known = sorted(token for token in ends if token < text.vocab_size)
    return LLTokenizer(text.json, n_vocab=max(vocab_size, text.vocab_size), eos_token=known or None)


MAX_CHECKED = 16

__all__ = ["ConstrainedDecoding", "GrammarChecks", "TokenizerText"]


class GrammarChecks:
    """Checks of grammars before their requests are queued."""

    def __init__(self) -> None:
        self._check = lru_cache(MAX_CHECKED)(check_grammar)

    def check(self, params: StructuredOutputsParams) -> None:
        """Raise InvalidRequestError for a grammar that cannot be compiled. Takes as long as to compile it."""
        try:
            self._check(params)
        except GrammarError as error:
            raise InvalidRequestError(failure_of(error), param=FIELD) from error


class ConstrainedDecoding(GrammarChecks):
    """The grammars of an engine: `rows` for its worker, the rest for its scheduler.

    `load_tokenizer` is called once, in a thread, when the first grammar arrives, or by `load`.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], TokenizerText],
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        jumps_forward: bool,
    ) -> None:
        super().__init__()
        self._cache = GrammarCache(lambda: read_vocabulary(load_tokenizer(), vocab_size, eos_token_ids))
        self.rows = GrammarRows(self._cache, vocab_size, jumps_forward=jumps_forward)

    def load(self) -> None:
        """Start to load the tokenizer."""
        self._cache.load()

    @property
    def is_loading(self) -> bool:
        """Return whether the tokenizer is being loaded, or has been."""
        return self._cache.is_loading

    def is_compiled(self, params: SamplingParams, bad_words: Sequence[Sequence[int]] = ()) -> bool:
        """Return whether a request can be admitted; else its grammar, if it has one, is being compiled, or waits."""
        grammar = params.structured_outputs
        return grammar is None or self._cache.is_compiled(grammar, forces=forces_tokens(params, bad_words))

    def wait(self, timeout_s: float) -> None:
        """Wait for a grammar while no request runs, at most this long. Rows keep no state meanwhile."""
        self.rows.drop_idle(num_steps=0)
        self._cache.wait(timeout_s)
