"""Constrained decoding of one engine."""

from collections.abc import Callable
from functools import lru_cache

from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import SamplingParams
from quire.core.structured_outputs import StructuredOutputsParams
from quire.decoding.grammars.compiler import GrammarCache, GrammarError, check_grammar, forces_tokens
from quire.decoding.grammars.row_state import FIELD, failure_of
from quire.decoding.grammars.rows import GrammarRows
from quire.decoding.grammars.vocabulary import TokenizerText, read_vocabulary

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

    def is_compiled(self, params: SamplingParams) -> bool:
        """Return whether a request can be admitted; else its grammar, if it has one, is being compiled, or waits."""
        grammar = params.structured_outputs
        return grammar is None or self._cache.is_compiled(grammar, forces=forces_tokens(params))

    def wait(self, timeout_s: float) -> None:
        """Wait for a grammar while no request runs, at most this long. Rows keep no state meanwhile."""
        self.rows.drop_idle(num_steps=0)
        self._cache.wait(timeout_s)
