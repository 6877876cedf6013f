"""Persistent batch: one row per running sequence, kept from step to step and changed by plans.

A row holds a sequence's tokens, its block table and its sampling parameters. A plan carries only changes; the worker
writes sampled tokens into the rows itself, so a decode step sends no token. Per-step inputs are gathered from the rows
with NumPy, without a Python loop over sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.logprob_table import padded
from quire.core.plan import MAX_SNAPSHOTS, EntryState, NewRow, RowDrafts, RowFork, StepPlan
from quire.decoding.grammars.rows import StepMasks
from quire.decoding.row_pooling import PooledEntry, RowPool
from quire.decoding.sampler import SamplingState
from quire.kernels.delta_net import StateRows
from quire.kernels.low_rank import AdapterWeights, RowAdapters
from quire.kernels.tensors import Tensor
from quire.model.language_model import ForwardBatch

if TYPE_CHECKING:
    from quire.kernels.triton.triton_low_rank import TritonSlots

IntArray = NDArray[np.int64]

_MAX_TOUCHED_BYTES = 1 << 28  # 512 rows of 131,072 tokens


class StepInputs(NamedTuple):
    """A plan as arrays. `S` entries, `T` tokens in all, `N` samples."""

    forward: ForwardBatch
    rows: IntArray              # [S] the row of each entry
    starts: IntArray            # [S] position of its first token
    stops: IntArray             # [S] one past its last
    sample_rows: IntArray       # [N] the row that each sample is for
    sample_num_tokens: IntArray  # [N] tokens of that row before the sample, so also the position of the sampled token
    logit_rows: IntArray        # [N] the token of the flat batch behind which it is drawn
    drafts: list[RowDrafts]     # rows with several samples each, in the order of positions
    pooled: list[PooledEntry]   # rows without samples
    grammars: StepMasks | None = None  # None: no sample is masked
    hidden: Tensor | None = None       # [T, any width] of the model, once it has run; None: before, or for no drafter


class PersistentBatch:
    """The state of rows, by the scheduler's row numbers."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.token_ids = _touched_zeros(max_num_seqs, max_model_len)
        max_blocks = -(-max_model_len // block_size)
        self.block_tables = _touched_zeros(max_num_seqs, max_blocks)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.prompt_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)  # number asked for; -1: none
        self.scores_prompt = np.zeros(max_num_seqs, dtype=bool)           # asks for these, or for those of named tokens
        self._named = dict[int, tuple[int, IntArray]]()                   # keyed by row: first position, ids
        self.sampling = SamplingState(max_num_seqs, vocab_size)
        self._pools = dict[int, RowPool]()                                # keyed by row
        self._owners = np.zeros(max_num_seqs, dtype=np.int64)             # number of sequences each row has had

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's changes: forked rows first, then new rows, block table entries and drafts."""
        for fork in plan.row_forks:
            self._fork(fork)
        for new in plan.new_rows:
            self._fill(new)
        if plan.table_rows:
            self.block_tables[plan.table_rows, plan.table_columns] = plan.table_blocks
        for row, start, token_ids in plan.drafts:
            self.token_ids[row, start : start + len(token_ids)] = token_ids

    def _fork(self, fork: RowFork) -> None:
        """Copy the output of another row of the same request: parameters and prompts are the same."""
        if fork.row != fork.source:
            output = slice(self.num_prompt_tokens[fork.row], fork.num_tokens)
            self.token_ids[fork.row, output] = self.token_ids[fork.source, output]
            self.block_tables[fork.row, : len(fork.block_ids)] = fork.block_ids
        self.token_ids[fork.row, fork.num_tokens] = fork.token_id

    def _fill(self, new: NewRow) -> None:
        row, asked, named = new.row, new.params.prompt_logprobs, new.params.prompt_logprob_token_ids
        self._owners[row] += 1
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.block_tables[row, : len(new.block_ids)] = new.block_ids
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.prompt_logprobs[row] = -1 if asked is None else asked
        self.scores_prompt[row] = asked is not None or named is not None
        self._named.pop(row, None)
        if named is not None:
            self._named[row] = new.params.prompt_logprob_start or 0, padded(named)
        self.sampling.set(new)
        self._pools.pop(row, None)
        if new.pool is not None:
            self._pools[row] = RowPool(new.pool, new.num_prompt_tokens)

    def named_ids(self, row: int, start: int, stop: int) -> tuple[int, IntArray] | None:
        """Return the first of the positions [start, stop) of a row that has ids to score behind it, and those ids.

        They are [num_rows, width], one row for each position from there on. None if there are none.
        """
        if row not in self._named:
            return None
        first, ids = self._named[row]
        begin = max(start, first)
        return (begin, ids[begin - first : stop - first]) if begin < stop else None

    def inputs(self, plan: StepPlan, *, has_tables: bool = True) -> StepInputs:
        """Gather the inputs of the forward pass and of the sampler; without block tables if the device has them."""
        rows, starts, counts = np.array(plan.rows), np.array(plan.starts), np.array(plan.counts)
        stops = starts + counts
        query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
        query_starts[1:] = counts.cumsum()
        entries = np.arange(len(rows)).repeat(counts)                                    # [T]
        token_rows = rows[entries]                                                       # [T]
        positions = np.arange(len(entries)) + (starts - query_starts[:-1])[entries]      # [T]
        blocks = self.block_tables[token_rows, positions // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + positions % self.block_size
        if plan.stored_entries:
            slots[query_starts[plan.stored_entries]] = -1
        state_rows = _state_rows(plan.states) if plan.states else None
        max_blocks = -(-int(stops.max()) // self.block_size) if has_tables else 0
        forward = ForwardBatch(
            token_ids=self.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            slot_mapping=slots,
            query_starts=query_starts,
            context_lens=stops.astype(np.int32),
            block_tables=self.block_tables[rows, :max_blocks],
            state_rows=state_rows,
        )
        pooled = list(self._pooled_entries(plan)) if self._pools else []
        if any(each.state.pool.second_text for each in pooled):
            forward = replace(forward, token_types=_token_types(pooled, len(positions)))
        logit_rows = np.array(plan.sample_tokens, dtype=np.int64)
        if len(logit_rows) < len(positions) and not pooled:
            forward = replace(forward, num_read=self._num_read(rows, query_starts, logit_rows))
        return StepInputs(
            forward=forward,
            rows=rows,
            starts=starts,
            stops=stops,
            sample_rows=np.array(plan.sample_rows, dtype=np.int64),
            sample_num_tokens=positions[logit_rows] + 1,
            logit_rows=logit_rows,
            drafts=plan.drafts,
            pooled=pooled,
        )

    def _num_read(self, rows: IntArray, query_starts: NDArray[np.int32], logit_rows: IntArray) -> IntArray:
        """Return the number of last tokens of each entry from the first one with logits on, [S]."""
        stops = query_starts[1:].astype(np.int64)
        counts: IntArray = np.where(self.scores_prompt[rows], stops - query_starts[:-1], 0)
        entries = stops.searchsorted(logit_rows, side="right")
        np.maximum.at(counts, entries, stops[entries] - logit_rows)
        return counts

    def _pooled_entries(self, plan: StepPlan) -> Iterator[PooledEntry]:
        """Yield the entries of rows that pool. They hold the rows' states: a row may have a new owner by the result."""
        begin = 0
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            state = self._pools.get(row)
            if state is not None:
                yield PooledEntry(row, begin, begin + count, start, state)
            begin += count

    def write_placeholders(self, inputs: StepInputs) -> IntArray:
        """Write -1 - row for each token that is being sampled; return the rows' owners, for `record`."""
        self.record(inputs, -1 - inputs.sample_rows)
        owners: IntArray = self._owners[inputs.sample_rows]
        return owners

    def record(self, inputs: StepInputs, sampled: list[int] | IntArray, owners: IntArray | None = None) -> None:
        """Write the sampled tokens at their positions. A sequence of the maximum length has no position for one more.

        With `owners`, rows that have another owner by now are skipped.
        """
        has_place = inputs.sample_num_tokens < self.token_ids.shape[1]
        if owners is not None:
            has_place &= owners == self._owners[inputs.sample_rows]
        rows, positions = inputs.sample_rows[has_place], inputs.sample_num_tokens[has_place]
        self.token_ids[rows, positions] = np.array(sampled, dtype=np.int32)[has_place]

    def append(self, row: int, position: int, token_ids: Sequence[int]) -> None:
        """Write the known tokens of a row from `position` on; there are positions for them."""
        self.token_ids[row, position : position + len(token_ids)] = token_ids


def _state_rows(states: Sequence[EntryState]) -> StateRows:
    """Return the states of a step's entries as arrays."""
    snapshots = np.full((len(states), MAX_SNAPSHOTS, 2), -1, dtype=np.int32)
    for entry, state in enumerate(states):
        if state.snapshots:
            snapshots[entry, : len(state.snapshots)] = state.snapshots
    read, committed, write, commit_to = np.array([state[:4] for state in states], dtype=np.int32).T.copy()
    return StateRows(read, committed, write, commit_to, snapshots)


def _token_types(pooled: Sequence[PooledEntry], num_tokens: int) -> IntArray:
    """Return 1 for the tokens of second texts of pairs, 0 for all others, [num_tokens]."""
    types = np.zeros(num_tokens, dtype=np.int64)
    for each in pooled:
        if each.state.pool.second_text:
            types[each.begin + max(0, each.state.pool.second_text - each.start) : each.end] = 1
    return types


def _touched_zeros(num_rows: int, num_columns: int) -> NDArray[np.int32]:
    """Return zeros with their memory mapped: else the first step that uses a row takes 2 ms for page faults."""
    rows = np.zeros((num_rows, num_columns), dtype=np.int32)
    if rows.nbytes <= _MAX_TOUCHED_BYTES:
        rows.fill(0)
    return rows


class AdapterRows:
    """The adapters of the worker's rows. `weights` returns an adapter by its digest; `slots`: of a device with some."""

    def __init__(self, weights: Callable[[str], AdapterWeights], slots: "TritonSlots | None" = None) -> None:
        self._weights, self.slots = weights, slots
        self._digests = dict[int, str]()  # digests of rows that have one, or had until their sequence ended

    def of_step(self, plan: StepPlan) -> RowAdapters | None:
        """Apply a plan's new rows; return the adapters of its tokens, None if none of them has one."""
        for new in plan.new_rows:
            if new.scope.adapter is None:
                self._digests.pop(new.row, None)
            else:
                self._digests[new.row] = new.scope.adapter
        if not self._digests:
            return None
        found: dict[str, int] = {}
        digests = [self._digests.get(row) for row in plan.rows]
        of_entry = [-1 if each is None else found.setdefault(each, len(found)) for each in digests]
        if not found:
            return None
        of_row = np.array(of_entry, np.int32).repeat(plan.counts)
        adapters = [self._weights(digest) for digest in found]
        if self.slots is None:
            return RowAdapters(adapters, of_row)
        by_index = np.array([*self.slots.place(adapters), -1], np.int32)
        return RowAdapters((), by_index[of_row], self.slots)
