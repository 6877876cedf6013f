"""Rows: the grammar states of a worker's rows, and the masks of a step, filled in threads beside the forward pass."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.host_limits import find_cpus
from quire.core.plan import RowDrafts, StepPlan
from quire.decoding.grammars.compiler import GrammarCache, InvalidGrammarError
from quire.decoding.grammars.row_state import FAILED, MaskJob, RowProgress, RowState, TokenMasks, failure_of
from quire.kernels.sampling import num_words

IDLE_STEPS = 16  # without a sample, after which a row's matcher is dropped: its sequence may have ended
MAX_THREADS = 8
MASKS_WAIT_S = 0.004  # a step of rows with grammars alone waits for more if another mask is filled within
MASK_WAIT_S = 0.01    # the same, if not one is filled: the step would give nothing
MAX_MASK_S = 30.0     # after which a row without its mask fails; LIMITS allow some 8 ms, compiling again some seconds
_POLL_S = 0.0002


class Entry(NamedTuple):
    """A row with a grammar among the samples of a step, and its place among the masks."""

    row: int
    state: RowState
    known: NDArray[np.int32]
    drafts: Sequence[int]
    place: slice


class GrammarRows:
    """The states of all rows. `vocab_size` is the model's; without `jumps_forward` no token is forced."""

    def __init__(self, cache: GrammarCache, vocab_size: int, *, jumps_forward: bool) -> None:
        self._cache, self._vocab_size, self._jumps_forward = cache, vocab_size, jumps_forward
        self.states = dict[int, RowState]()  # rows with grammars alone
        self._num_steps = 0
        self._num_threads = min(max(find_cpus().num_usable, 2), MAX_THREADS)  # one slow mask delays no other
        self._threads = ThreadPoolExecutor(self._num_threads, "masks")
        self.num_late = 0  # rows that were not sampled in a step for want of their mask, since start

    def apply(self, plan: StepPlan) -> None:
        """Give each forked row of a plan the state of its source, and each new row its grammar, or none."""
        for fork in plan.row_forks:
            source = self.states.get(fork.source)
            if source is not None and fork.row != fork.source:
                self.states[fork.row] = source.fork()
        for new in plan.new_rows:
            params = new.params.structured_outputs
            if params is not None:
                self.states[new.row] = RowState(new, params)
            elif self.states:
                self.states.pop(new.row, None)

    def start_step(
        self,
        rows: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        drafts: Sequence[RowDrafts],
        computed_rows: NDArray[np.int64],
    ) -> "StepMasks | None":
        """Start to fill the masks of a step's samples; None if no sample has a grammar.

        rows and num_tokens int64 [num_samples]: the row of each sample and the tokens before it; token_ids
        [max_rows, max_len]: the tokens of every row, drafts included; computed_rows int64 [num_entries]: those that the
        step computes, sampled or not.
        """
        if not self.states:
            return None
        self._num_steps += 1
        if self._num_steps % IDLE_STEPS == 0:
            self.drop_idle()
        drafted = {each.row: each.token_ids for each in drafts}
        entries, samples = dict[int, Entry](), list[int]()
        for sample, row in enumerate(rows.tolist()):
            state = self.states.get(row)
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
        has_others = len(samples) < len(rows) or not set(computed_rows.tolist()) <= entries.keys()
        return StepMasks(self, entries, np.array(samples, dtype=np.int64), has_others=has_others)

    def drop_idle(self, num_steps: int = IDLE_STEPS) -> None:
        """Drop the matchers of rows that were not sampled in the last `num_steps` steps."""
        for state in self.states.values():
            if state.last_step <= self._num_steps - num_steps:
                state.drop()

    def advance(self, entry: Entry, token_ids: Sequence[int], max_forced: int) -> RowProgress:
        """Take the tokens that were sampled for a row."""
        max_forced = max_forced if self._jumps_forward else 0
        try:
            return entry.state.advance(self._cache, token_ids, max_forced, self._vocab_size)
        except BaseException as error:
            return RowProgress(0, failure=failure_of(error), is_at_fault=isinstance(error, InvalidGrammarError))

    def submit(self, jobs: Sequence[MaskJob]) -> list["Future[None]"]:
        """Have jobs run by as many threads as are of use."""
        shared, num_threads = iter(jobs), min(self._num_threads, len(jobs))
        return [self._threads.submit(self._run, shared) for _ in range(num_threads)]

    def _run(self, jobs: Iterator[MaskJob]) -> None:
        """Run jobs until none is left; several threads share them."""
        for job in jobs:
            job.run(self._cache)

    @property
    def num_words(self) -> int:
        """Words of a mask. It has a bit for each token of the tokenizer and of the model."""
        return self._cache.num_words or num_words(self._vocab_size)


class StepMasks:
    """The masks of one step: filled in threads; then the rows take the tokens that were sampled by them.

    `has_others`: the step computes rows without grammars, too.
    """

    def __init__(
        self, rows: GrammarRows, entries: dict[int, Entry], samples: NDArray[np.int64], *, has_others: bool
    ) -> None:
        self._rows, self._entries, self._samples, self._has_others = rows, entries, samples, has_others
        self._bits = np.empty((len(samples), rows.num_words), np.uint32)
        started = [each.state.start(each.known, each.drafts, self._bits[each.place]) for each in entries.values()]
        self._filling = rows.submit([job for job in started if job is not None])
        self._masks: TokenMasks | None = None

    def finish_masks(self, is_computed: Callable[[], bool] = lambda: True) -> None:
        """Decide which rows are late. Call it once, when the forward pass is under way: waits until it `is_computed`.

        A step that computes other rows, without grammars, waits no longer; one of such rows alone as long as masks
        keep coming.
        """
        while not is_computed():
            time.sleep(_POLL_S)
        if not self._has_others:
            num_before, num_filled = -1, 0
            while num_before < num_filled < len(self._entries):  # a late row is computed again: waiting costs less
                wait(self._filling, MASKS_WAIT_S)
                num_before, num_filled = num_filled, sum(map(_is_ready, self._entries.values()))
            deadline_s = time.monotonic() + MASK_WAIT_S
            while not any(map(_is_ready, self._entries.values())) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        late, failures, at_fault = set[int](), dict[int, str](), set[int]()
        for row, entry in list(self._entries.items()):
            job, samples = entry.state.job, self._samples[entry.place].tolist()
            assert job is not None, f"row {row} has no job"
            if not _is_ready(entry):
                late.update(samples)
                del self._entries[row]
                if time.monotonic() > job.started_s + MAX_MASK_S:
                    failures |= dict.fromkeys(samples, f"{FAILED}: no mask was filled in {MAX_MASK_S:g} s")
                continue
            entry.state.job = None
            if job.bits.base is not self._bits:                             # a step did not wait for it
                self._bits[entry.place] = job.bits[: 1 + len(entry.drafts)]
            if job.failure is not None:
                failures |= dict.fromkeys(samples, job.failure)
                at_fault.update(samples if job.is_at_fault else ())
                del self._entries[row]
        self._rows.num_late += len(late)
        taken: slice | NDArray[np.bool_] = slice(None)
        if late:
            taken = np.isin(self._samples, list(late), invert=True)
        found, bits = self._samples[taken], self._bits[taken]
        self._masks = TokenMasks(found, bits, failures, frozenset(late), frozenset(at_fault))

    def masks(self) -> TokenMasks:
        """Return the masks of the samples of rows with grammars, after `finish_masks`."""
        assert self._masks is not None, "masks of a step that is not computed"
        return self._masks

    def advance(self, row: int, token_ids: Sequence[int], max_forced: int) -> RowProgress | None:
        """Take the tokens that were sampled for a row, in order. None: the row has no mask in this step."""
        entry = self._entries.get(row)
        return None if entry is None else self._rows.advance(entry, token_ids, max_forced)

    def num_allowed(self, row: int, drafts: Sequence[int]) -> int:
        """Return the number of leading drafts that are allowed after the tokens of a row's last `advance`.

        All of them if the row has no grammar.
        """
        entry = self._entries.get(row)
        return len(drafts) if entry is None else entry.state.num_allowed(drafts)


def _is_ready(entry: Entry) -> bool:
    """Return whether the masks of an entry are filled."""
    job = entry.state.job
    return job is not None and job.is_done and job.serves(entry.known, entry.drafts)
