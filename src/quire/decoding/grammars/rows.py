"""Rows: the grammar states of a worker's rows, and the masks of a step, filled in threads beside the forward pass."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.plan import RowDrafts, StepPlan
from quire.decoding.grammars.compiler import GrammarCache, reason_of
from quire.decoding.grammars.row_state import ALL_BITS, RowState
from quire.decoding.row_grammars import RowProgress, TokenMasks
from quire.kernels.token_masks import num_words

IDLE_STEPS = 16  # without a sample, after which a row's matcher is dropped: its sequence may have ended
MAX_THREADS = 8
FAILED = "its grammar has failed"


class Entry(NamedTuple):
    """A row with a grammar among the samples of a step: its known tokens, its drafts, its place among the masks."""

    row: int
    state: RowState
    known: NDArray[np.int32]
    drafts: Sequence[int]
    place: slice


class GrammarRows:
    """The states of all rows. `vocab_size` is the model's; without `jumps_forward` no token is forced."""

    def __init__(self, cache: GrammarCache, vocab_size: int, *, jumps_forward: bool) -> None:
        self._cache, self._vocab_size, self._jumps_forward = cache, vocab_size, jumps_forward
        self._states = dict[int, RowState]()
        self._num_steps = 0
        self._num_threads = min(os.cpu_count() or 1, MAX_THREADS)
        self._threads = ThreadPoolExecutor(self._num_threads, "masks")

    def apply(self, plan: StepPlan) -> None:
        """Give each new row of a plan its grammar, or none."""
        for new in plan.new_rows:
            params = new.params.structured_outputs
            if params is not None:
                self._states[new.row] = RowState(new, params)
            elif self._states:
                self._states.pop(new.row, None)

    def start_step(
        self,
        rows: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        drafts: Sequence[RowDrafts],
    ) -> "StepMasks | None":
        """Start to fill the masks of a step's samples; None if no sample has a grammar. As `RowGrammars`."""
        if not self._states:
            return None
        self._num_steps += 1
        if self._num_steps % IDLE_STEPS == 0:
            self.drop_idle()
        drafted = {each.row: each.token_ids for each in drafts}
        entries, samples = dict[int, Entry](), list[int]()
        for sample, row in enumerate(rows.tolist()):
            state = self._states.get(row)
            if state is None:
                continue
            if row not in entries:  # else a sample behind a draft
                own, first = drafted.get(row, ()), len(samples)
                place = slice(first, first + 1 + len(own))
                entries[row] = Entry(row, state, token_ids[row, : num_tokens[sample]], own, place)
                state.last_step = self._num_steps
            samples.append(sample)
        if not samples:
            return None
        return StepMasks(self, entries, np.array(samples, dtype=np.int64))

    def drop_idle(self, num_steps: int = IDLE_STEPS) -> None:
        """Drop the matchers of rows that were not sampled in the last `num_steps` steps."""
        for state in self._states.values():
            if state.last_step <= self._num_steps - num_steps:
                state.drop()

    def fill(self, entries: Iterator[Entry], bits: NDArray[np.uint32]) -> None:
        """Fill the masks of entries until none is left; several threads share them."""
        for entry in entries:
            try:
                entry.state.fill(self._cache, entry.known, entry.drafts, bits[entry.place])
            except BaseException as error:
                entry.state.failure = f"{FAILED}: {reason_of(error)}"
                bits[entry.place] = ALL_BITS

    def advance(self, entry: Entry, token_ids: Sequence[int], max_forced: int) -> RowProgress:
        """Take the tokens that were sampled for a row."""
        max_forced = max_forced if self._jumps_forward else 0
        try:
            return entry.state.advance(self._cache, entry.known, token_ids, max_forced, self._vocab_size)
        except BaseException as error:
            return RowProgress(0, failure=f"{FAILED}: {reason_of(error)}")

    def submit(self, entries: Sequence[Entry], bits: NDArray[np.uint32]) -> list["Future[None]"]:
        """Have entries filled by as many threads as are of use."""
        shared, num_threads = iter(entries), min(self._num_threads, len(entries))
        return [self._threads.submit(self.fill, shared, bits) for _ in range(num_threads)]

    @property
    def num_words(self) -> int:
        """Words of a mask. It has a bit for each token of the tokenizer and of the model."""
        return self._cache.num_words or num_words(self._vocab_size)


class StepMasks:
    """The masks of one step: filled in threads; then the rows take the tokens that were sampled by them."""

    def __init__(self, rows: GrammarRows, entries: dict[int, Entry], samples: NDArray[np.int64]) -> None:
        self._rows, self._entries, self._samples = rows, entries, samples
        self._bits = np.empty((len(samples), rows.num_words), np.uint32)
        self._filling = rows.submit(list(entries.values()), self._bits)

    @cached_property
    def _masks(self) -> TokenMasks:
        for part in self._filling:
            part.result()
        failures = dict[int, str]()
        for entry in self._entries.values():
            if entry.state.failure is not None:
                failures |= dict.fromkeys(self._samples[entry.place].tolist(), entry.state.failure)
        return TokenMasks(self._samples, self._bits, failures)

    def masks(self) -> TokenMasks:
        """Return the masks of the samples of rows with grammars; waits until they are filled."""
        return self._masks

    def advance(self, row: int, token_ids: Sequence[int], max_forced: int) -> RowProgress | None:
        """Take the tokens that were sampled for a row, in order. None: the row has no grammar, or has failed."""
        entry = self._entries.get(row)
        if entry is None or entry.state.failure is not None:
            return None
        return self._rows.advance(entry, token_ids, max_forced)
