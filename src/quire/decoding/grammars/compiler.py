"""Compiler: grammars compiled in a thread, and a cache of them, bounded in entries and bytes.

llguidance releases the interpreter lock while it compiles, so steps go on meanwhile. What it does for one grammar is
bounded by GRAMMAR_LIMITS, in its own units of work: a grammar past them is an error, which fails its requests alone.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np

from quire.core.errors import EngineError, InvalidRequestError
from quire.core.sampling_params import SamplingParams
from quire.core.structured_outputs import GRAMMAR_LIMITS, NOTHING_FOLLOWS, StructuredOutputsParams
from quire.grammar_writing.texts import without_forcing
from quire.grammar_writing.writer import grammar_of
from quire.kernels.sampling import num_words

if TYPE_CHECKING:  # takes 0.04 s to import: with the first grammar
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_ENTRIES = 64            # cached grammars that no row uses
MAX_PENDING = 16            # grammars that wait to be compiled
MAX_BYTES = 512 * 2**20     # all grammars: pending, cached, and in use by rows
BYTES_PER_CHAR = 256        # measured: a schema of 3,000 properties, 75 kB of text, takes 19 MB
BASE_BYTES = 2 * 2**20      # lexer states that are added while masks are filled: nearly always none, at most 6 MB
_NICENESS = 10              # the compiling thread's: steps come first
_MAX_REASON_CHARS = 300
_PANIC = "PanicException"   # raised by the library's Rust side; its type cannot be imported


@cache
def _limits() -> "LLParserLimits":
    from llguidance import LLParserLimits  # noqa: PLC0415

    return LLParserLimits(**GRAMMAR_LIMITS)


def reason_of(error: BaseException | str) -> str:
    """Return the first line of an error of the library. Raises `error` if it is none, such as KeyboardInterrupt."""
    if isinstance(error, BaseException) and not isinstance(error, Exception) and type(error).__name__ != _PANIC:
        raise error
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else repr(error))[:_MAX_REASON_CHARS]


class GrammarError(EngineError):
    """A grammar that cannot be used, or does not allow what was sampled."""


class InvalidGrammarError(GrammarError):
    """A grammar that is itself at fault: it has no meaning, or needs more than GRAMMAR_LIMITS allow."""


def fault_of(matcher: "LLMatcher") -> GrammarError | None:
    """Return the error of a matcher that cannot continue by its grammar; None if it can, or if its grammar has ended.

    A panic of the library is not the grammar's fault.
    """
    if not matcher.is_error():
        return None
    reason = reason_of(matcher.get_error())
    return (GrammarError if "panic" in reason.lower() else InvalidGrammarError)(reason)


def check_grammar(params: StructuredOutputsParams) -> None:
    """Raise InvalidGrammarError for a grammar that has no meaning, or is past a limit before it has any output."""
    from llguidance import LLMatcher, LLTokenizer  # noqa: PLC0415

    grammar = grammar_of(params)
    is_error, notes = LLMatcher.validate_grammar_with_warnings(grammar, limits=_limits())
    if is_error:
        raise InvalidGrammarError(reason_of(notes[0]))
    if not any("special_token" in note for note in notes):  # (bytes have none)
        tokenizer = LLTokenizer("byte")
        _check_start(LLMatcher(tokenizer, grammar, log_level=0, limits=_limits()), tokenizer)


def _check_start(first: "LLMatcher", tokenizer: "LLTokenizer") -> None:
    """Raise GrammarError for a matcher that has no first mask, or an empty one: some limits show only there."""
    mask = np.empty(num_words(tokenizer.vocab_size), np.uint32)
    if not first.is_error():
        first.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    error = fault_of(first)
    if first.stop_reason() == NOTHING_FOLLOWS or str(error).startswith(NOTHING_FOLLOWS):
        raise InvalidGrammarError("it allows no text")
    if error is not None:
        raise error


def forces_tokens(params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> bool:
    """Return whether the grammar of a request may leave one token alone where a text must follow.

    Not where the request names tokens: those that it allows may spell the text otherwise.
    """
    return not (params.allowed_token_ids or bad_words or params.logit_bias or params.min_tokens)


class CompiledGrammar:
    """A grammar for one vocabulary. Matchers of it share its lexer: GRAMMAR_LIMITS bound its states in all.

    `text_ends`: tokens that end an output, and have a text, as ids that a model's files name may. Unless it `forces`,
    masks allow each spelling of a text that must follow.
    """

    def __init__(self, tokenizer: "LLTokenizer", text: str, *, forces: bool = True) -> None:
        from llguidance import LLMatcher  # noqa: PLC0415

        self.num_bytes, self.tokenizer, self.forces = num_bytes_of(text), tokenizer, forces
        self.text_ends = tuple(token for token in tokenizer.eos_tokens if not tokenizer.is_special_token(token))
        own = text if forces else without_forcing(text)
        self._matcher = LLMatcher(tokenizer, own, log_level=0, limits=_limits())
        _check_start(self.start(), tokenizer)

    def start(self) -> "LLMatcher":
        """Return a matcher at the beginning of an output."""
        return self._matcher.deep_copy()


def num_bytes_of(text: str) -> int:
    """Return the memory that is charged for the grammar of a text."""
    return BASE_BYTES + BYTES_PER_CHAR * len(text)


class GrammarCache:
    """Compiled grammars by their parameters and whether they force tokens, the least recently used first.

    Used by the step's and the mask's threads.
    `load_tokenizer` runs in a thread of its own, when the first grammar arrives or `load` is called.
    """

    def __init__(self, load_tokenizer: Callable[[], "LLTokenizer"]) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Future[LLTokenizer] | None = None
        self._pool = ThreadPoolExecutor(1, "grammars", initializer=_lower_priority)
        self._lock = threading.Lock()
        self._entries = OrderedDict[tuple[StructuredOutputsParams, bool], Future[CompiledGrammar]]()
        self._pending = dict[Future[CompiledGrammar], int]()  # with the bytes that they are charged
        self._alive = WeakSet[CompiledGrammar]()
        self.num_compiled = 0  # since start

    def load(self) -> Future["LLTokenizer"]:
        """Return the tokenizer of the vocabulary, which is loaded once."""
        with self._lock:
            if self._tokenizer is None:
                pool = ThreadPoolExecutor(1, "vocabulary")  # normal priority: it holds the interpreter lock
                self._tokenizer = pool.submit(self._load_tokenizer)
                pool.shutdown(wait=False)
            return self._tokenizer

    @property
    def is_loading(self) -> bool:
        """Return whether the tokenizer is being loaded, or has been."""
        return self._tokenizer is not None

    def is_compiled(self, params: StructuredOutputsParams, *, forces: bool = True) -> bool:
        """Return whether a grammar has been compiled, or has failed; else have it compiled as soon as there is room."""
        self.load()
        with self._lock:
            future = self._find(params, forces)
            if future is None and self._make_room(_num_bytes(params)):
                future = self._submit(params, forces)
            return future is not None and future.done()

    def get(self, params: StructuredOutputsParams, *, forces: bool = True) -> CompiledGrammar:
        """Return a grammar, once it is compiled; GrammarError if it cannot be."""
        self.load()
        with self._lock:
            future = self._find(params, forces) or self._submit(params, forces)
        return future.result()

    def discard(self, params: StructuredOutputsParams, grammar: CompiledGrammar) -> None:
        """Have a grammar compiled anew for the next request, if this one is still cached: its lexer is full."""
        with self._lock:
            future = self._entries.get((params, grammar.forces))
            if future is not None and future.done() and not future.exception() and future.result() is grammar:
                del self._entries[params, grammar.forces]

    def wait(self, timeout_s: float) -> None:
        """Wait until a pending grammar is compiled, at most this long."""
        with self._lock:
            pending = list(self._pending)
        wait(pending, timeout_s, FIRST_COMPLETED)

    @property
    def num_words(self) -> int:
        """Words of a mask; 0 if the tokenizer cannot be loaded. Waits until it is."""
        tokenizer = self.load()
        return 0 if tokenizer.exception() else num_words(tokenizer.result().vocab_size)

    @property
    def num_entries(self) -> int:
        """Grammars that are cached, or pending."""
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes charged for all grammars: pending, cached, and in use by rows."""
        return sum(self._pending.values()) + sum(grammar.num_bytes for grammar in self._alive)

    def _find(self, params: StructuredOutputsParams, forces: bool) -> Future[CompiledGrammar] | None:
        future = self._entries.get((params, forces))
        if future is not None:
            self._entries.move_to_end((params, forces))
        return future

    def _make_room(self, num_bytes: int) -> bool:
        """Evict what was not used for longest; return whether one more grammar may be compiled now.

        The first one always may, however large: there is no other to wait for.
        """
        if len(self._pending) >= MAX_PENDING:
            return False
        evictable = [key for key, future in self._entries.items() if future not in self._pending]
        for key in evictable:
            if len(self._entries) < MAX_ENTRIES and self.num_bytes + num_bytes <= MAX_BYTES:
                break
            del self._entries[key]
        return self.num_bytes + num_bytes <= MAX_BYTES or self.num_bytes == 0

    def _submit(self, params: StructuredOutputsParams, forces: bool) -> Future[CompiledGrammar]:
        future = self._pool.submit(self._compile, params, forces)
        self._entries[params, forces], self._pending[future] = future, _num_bytes(params)
        self.num_compiled += 1
        future.add_done_callback(self._record)
        return future

    def _compile(self, params: StructuredOutputsParams, forces: bool) -> CompiledGrammar:
        try:
            return CompiledGrammar(self.load().result(), grammar_of(params), forces=forces)
        except GrammarError:
            raise
        except InvalidRequestError as error:
            raise InvalidGrammarError(reason_of(error)) from error
        except BaseException as error:
            raise GrammarError(reason_of(error)) from error

    def _record(self, future: Future[CompiledGrammar]) -> None:
        with self._lock:
            if not future.exception():
                self._alive.add(future.result())
            del self._pending[future]


def _num_bytes(params: StructuredOutputsParams) -> int:
    """Return an estimate of what a grammar will be charged, from its parameters."""
    texts = (params.json, params.regex, params.grammar, params.structural_tag, *(params.choice or ()))
    return BASE_BYTES + BYTES_PER_CHAR * sum(len(text) for text in texts if isinstance(text, str))


def _lower_priority() -> None:
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
