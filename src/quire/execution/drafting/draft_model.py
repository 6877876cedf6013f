"""Drafts of a model that runs beside the target: a smaller decoder (Leviathan et al. 2023), or an MTP or EAGLE-3 head.

Its keys and values are further layers of the target's cache. It computes the tokens of each step on the same slots, so
block tables, prefix hits, forks, copies and swaps are right for both. Sampled and draft tokens have no slots yet: their
keys and values are written to scratch blocks, which only the draft model's tensors have, behind the blocks of the pool.
Scratch blocks are invisible to the scheduler.

One pass computes the tokens of a step and those that it has sampled, which gives the first drafts; so k drafts take k
passes. In the table of a row that drafts, a scratch block stands in the place of the row's last block, with a copy of
it. What the pass has written there is copied back.

A head reads the target's hidden state of the token before each token as well. A block's tail has that of the last
token in it, so the state before a step's first token is there after prefix hits, forks, copies and swaps, too.

Verification compares drafts with what the target samples, so an error in them costs acceptance and changes no output.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.speculation import MAX_PENDING, ScratchBlocks
from quire.decoding.sampler import (
    GRAMMAR,
    LOGITS_PROCESSED,
    LOGPROBS,
    NAMED_LOGPROBS,
    SAMPLED,
    SCALED,
    SamplingBatch,
    process_logits,
)
from quire.execution.batch import IntArray, PersistentBatch, StepInputs
from quire.execution.drafter import DraftRows
from quire.kernels.sampling import SamplingOps
from quire.kernels.tensors import Tensor, clear_rows, floats, full, like, take_rows
from quire.model.draft_head import DraftHead
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch, LanguageModel

log = logging.getLogger(__name__)


class Spans(NamedTuple):
    """Tokens of a pass: those of row `rows[i]` at positions [starts[i], stops[i]). All are int64 [num]."""

    rows: IntArray
    starts: IntArray
    stops: IntArray

    def at(self, places: IntArray) -> "Spans":
        return Spans(*(each[places] for each in self))


class DraftModel:
    """Drafts of a model with `cache`, its part of a cache that has scratch blocks behind the pool's blocks.

    `max_positions`: positions that the model can compute. There are no drafts at later ones. If the model raises an
    error, it is logged, and no row has drafts from then on; a head with ranks fails the step.
    """

    reads_hidden = False
    max_pending = MAX_PENDING  # known tokens that the target has not computed, of a row that drafts

    def __init__(
        self, model: LanguageModel | DraftHead, cache: KVCache, batch: PersistentBatch, scratch: ScratchBlocks,
        max_positions: int,
    ) -> None:  # fmt: skip
        self._model, self._cache, self._batch, self._max_positions = model, cache, batch, max_positions
        first = len(cache.keys[0]) - scratch.num_blocks
        self._scratch = np.arange(first, first + scratch.num_blocks, dtype=np.int32).reshape(scratch.num_rows, -1)
        self._num_drafts = scratch.num_drafts
        self._has_failed = False

    def draft(self, rows: DraftRows, limits: IntArray, step: StepInputs) -> Mapping[int, Sequence[int]]:
        """Compute a step's tokens; return up to `limits` drafts of each row, of as many as there is scratch for.

        rows: all that continue; limits may be 0. A row without a token in the step has none: another row of its request
        computes the block that they share.
        """
        if self._has_failed:
            return {}
        try:
            return self._draft(rows, limits, step)
        except Exception:
            if isinstance(self._model, DraftHead) and self._model.has_ranks:
                raise    # the other ranks may be within an exchange
            self._has_failed = True
            log.exception("the draft model failed; rows have no drafts from now on, and are decoded token by token")
            return {}

    def _computed(self, rows: DraftRows, step: StepInputs) -> tuple[Spans, IntArray]:
        """Return the tokens of a step that have slots and are kept, at positions that the model can compute.

        The second is the place of each span's first token in the step.
        """
        first_places = step.forward.query_starts[:-1].astype(np.int64)
        num_kept = np.full(len(self._batch.token_ids), self._max_positions)
        num_kept[rows.rows] = np.minimum(rows.num_computed, self._max_positions)    # without rejected drafts
        spans = Spans(step.rows, step.starts, np.minimum(step.stops, num_kept[step.rows]))
        has_slots = step.forward.slot_mapping[first_places] >= 0
        found = np.flatnonzero(has_slots & (spans.starts < spans.stops))
        return spans.at(found), first_places[found]

    def _draft(self, rows: DraftRows, limits: IntArray, inputs: StepInputs) -> dict[int, list[int]]:
        """Compute the tokens of a step and, in the same pass, the pending ones of each row; then drafts one by one."""
        step, first_places = self._computed(rows, inputs)
        if not len(step.rows):
            return {}
        rows, limits, places = self._served(rows, limits, step)
        tables, own = self._tables(step, rows, places)
        partly = np.flatnonzero(rows.num_computed % self._cache.block_size)   # rows with a last block computed in part
        stops = step.stops.copy()
        stops[places] = rows.num_tokens
        spans = Spans(step.rows, step.starts, stops)
        batch = self._batch_of(spans, tables)
        before = self._hidden_before(step, first_places, inputs, batch)
        self._copy_blocks(own[partly], self._scratch[partly, 0])
        hidden = self._forward(batch, before, places)
        self._copy_blocks(self._scratch[partly, 0], own[partly])
        return self._continue(rows, limits, spans.at(places), tables[places], hidden)

    def _continue(
        self, rows: DraftRows, limits: IntArray, spans: Spans, tables: NDArray[np.int32], hidden: Tensor
    ) -> dict[int, list[int]]:
        """Return drafts: the first of each row behind `hidden` [num_rows, hidden], at the ends of `spans`."""
        num_drafts = np.zeros(len(rows.rows), dtype=np.int64)
        drafting = np.arange(len(rows.rows))                                  # places in `rows`
        while drafting.size:
            tokens, is_sound = self._choose(spans.rows, spans.stops, self._model.logits(hidden))
            self._clear_scratch(drafting[~is_sound])
            self._batch.token_ids[spans.rows[is_sound], spans.stops[is_sound]] = tokens[is_sound]
            num_drafts[drafting[is_sound]] += 1
            continues = np.flatnonzero(is_sound & (num_drafts[drafting] < limits[drafting]))
            drafting, spans = drafting[continues], spans.at(continues)
            spans = Spans(spans.rows, spans.stops, spans.stops + 1)
            if drafting.size:
                batch = self._batch_of(spans, tables[drafting])
                hidden = self._forward(batch, take_rows(hidden, continues), np.arange(drafting.size))
        found = zip(rows.rows.tolist(), rows.num_tokens.tolist(), num_drafts.tolist(), strict=True)
        return {
            row: self._batch.token_ids[row, start : start + count].tolist() for row, start, count in found if count
        }

    def _served(self, rows: DraftRows, limits: IntArray, step: Spans) -> tuple[DraftRows, IntArray, IntArray]:
        """Return the rows that can have drafts, with their limits, and their places in `step`."""
        place_of = np.full(len(self._batch.token_ids), -1)
        place_of[step.rows] = np.arange(len(step.rows))
        places = place_of[rows.rows]
        limits = np.minimum(limits, self._max_positions - rows.last).clip(max=self._num_drafts)
        serves = (limits > 0) & (rows.num_tokens - rows.num_computed <= self.max_pending) & (places >= 0)
        served = np.flatnonzero(serves)[: len(self._scratch)]
        return DraftRows(*(each[served] for each in rows)), limits[served], places[served]

    def _tables(self, step: Spans, rows: DraftRows, places: IntArray) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the block tables of a step, int32 [num_entries, num_blocks], and an own block of each row.

        In the tables at `places`, of `rows`, scratch blocks begin at the first token without a slot. The own block,
        int32 [num_rows], is the one in the place of the first of them, if the row has tokens in it.
        """
        first = rows.num_computed // self._cache.block_size
        scratch, num_blocks = self._scratch[: len(first)], -(-int(step.stops.max()) // self._cache.block_size)
        width = max(num_blocks, int(first.max(initial=0)) + scratch.shape[1])
        tables = np.zeros((len(step.rows), width), dtype=np.int32)
        tables[:, :num_blocks] = self._batch.block_tables[step.rows, :num_blocks]
        own = tables[places, first]
        tables[places[:, None], first[:, None] + np.arange(scratch.shape[1])] = scratch
        return tables, own

    def _copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        if sources.size:
            src, dst = (blocks.astype(np.int64) for blocks in (sources, targets))
            self._model.back_end.copy_blocks(self._cache.tensors, self._cache.tensors, src, dst)

    def _batch_of(self, spans: Spans, tables: NDArray[np.int32]) -> ForwardBatch:
        """Return the batch of some tokens, on the blocks of `tables`."""
        block_size, counts = self._cache.block_size, spans.stops - spans.starts
        query_starts = np.zeros(len(spans.rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_starts[1:])
        places = np.repeat(np.arange(len(spans.rows)), counts)                # [T]
        positions = np.arange(query_starts[-1]) + np.repeat(spans.starts - query_starts[:-1], counts)
        slots = tables[places, positions // block_size].astype(np.int64) * block_size + positions % block_size
        return ForwardBatch(
            token_ids=self._batch.token_ids[spans.rows[places], positions].astype(np.int64),
            positions=positions,
            slot_mapping=slots,
            query_starts=query_starts,
            context_lens=spans.stops.astype(np.int32),
            block_tables=tables[:, : -(-int(spans.stops.max()) // block_size)].copy(),
        )

    def _hidden_before(
        self, step: Spans, first_places: IntArray, inputs: StepInputs, batch: ForwardBatch
    ) -> Tensor | None:
        """Return what `_forward` reads beside the first batch: nothing."""

    def _forward(self, batch: ForwardBatch, before: Tensor | None, sequences: IntArray) -> Tensor:
        """Run the model; return the hidden states [num, hidden] of the last tokens of some of a batch's sequences.

        Token ids that only the target has are replaced by the draft model's last one.
        """
        assert not isinstance(self._model, DraftHead)
        ends = batch.query_starts[sequences + 1].astype(np.int64) - 1
        if self._model.vocab_size < self._batch.sampling.vocab_size:
            batch = replace(batch, token_ids=batch.token_ids.clip(max=self._model.vocab_size - 1))
        return take_rows(self._model.forward(batch.taken(self._model.back_end.library), self._cache), ends)

    def _choose(
        self, rows: IntArray, num_tokens: IntArray, logits: Tensor
    ) -> tuple[IntArray, NDArray[np.bool_]]:
        """Return a token for each row of logits [num_rows, vocab], and whether its logits were finite."""
        num_ids = self._batch.sampling.vocab_size
        if logits.shape[1] != num_ids:  # padded to another width; ids that one model lacks are no drafts
            fitted = full((len(logits), num_ids), -np.inf, logits)
            width = min(num_ids, logits.shape[1])
            fitted[:, :width] = logits[:, :width]
            logits = fitted
        samples = SamplingBatch.of(self._batch.sampling, rows, self._batch.token_ids, num_tokens)
        return choose_drafts(samples, logits, self._model.back_end.sampling)

    def _clear_scratch(self, places: IntArray) -> None:
        """Write zeros to scratch blocks that may hold NaN."""
        if places.size:
            blocks = self._scratch[places].reshape(-1).astype(np.int64)
            for tensor in self._cache.tensors:
                clear_rows(tensor, blocks)


class HeadDrafter(DraftModel):
    """Drafts of a head. Rows with several pending tokens have none: their hidden states are not there.

    What a head reads of the target is called hidden state here: of EAGLE-3 it is a projection of several of these. A
    tail is the hidden state of the last token in its block, and behind it the number of that token in the block.
    Where it is of another token, the state counts as zeros: at position 0, and after a prefix hit inside of a block.
    """

    reads_hidden = True
    max_pending = 1

    def __init__(
        self, head: DraftHead, cache: KVCache, batch: PersistentBatch, scratch: ScratchBlocks, max_positions: int
    ) -> None:
        super().__init__(head, cache, batch, scratch, max_positions)
        self._head = head

    def _hidden_before(self, step: Spans, first_places: IntArray, inputs: StepInputs, batch: ForwardBatch) -> Tensor:
        """Return the target's hidden states of the tokens before those of the first batch; write a step's tails."""
        assert inputs.hidden is not None, "a step without hidden states"
        hidden, size, tables = self._head.states(inputs.hidden), self._cache.block_size, self._batch.block_tables
        tails, last = self._cache.keys[-1], np.maximum(step.starts - 1, 0)
        known = floats(take_rows(tails, tables[step.rows, last // size].astype(np.int64))).reshape(len(last), -1)
        is_known = (step.starts > 0) & (known[:, -1] == _number(last, size))
        firsts = np.asarray(batch.query_starts)[:-1]
        counts = np.diff(np.asarray(batch.query_starts))
        within = np.arange(len(batch.token_ids)) - np.repeat(firsts, counts)
        before = take_rows(hidden, np.repeat(first_places, counts) + np.maximum(within - 1, 0))
        before[firsts] = like(np.where(is_known[:, None], known[:, :-1], 0.0).astype(np.float32), before)
        self._write_tails(step, first_places, hidden)
        return before

    def _write_tails(self, step: Spans, first_places: IntArray, hidden: Tensor) -> None:
        """Write the tails of the blocks in which a step has computed tokens that are kept."""
        size, tails = self._cache.block_size, self._cache.keys[-1]
        counts = (step.stops - 1) // size - step.starts // size + 1       # blocks of each span
        spans = np.repeat(np.arange(len(counts)), counts)
        blocks = np.arange(len(spans)) - np.repeat(np.cumsum(counts) - counts, counts) + (step.starts // size)[spans]
        last = np.minimum((blocks + 1) * size, step.stops[spans]) - 1     # position of a block's last token
        rows = floats(take_rows(hidden, first_places[spans] + last - step.starts[spans]))
        written = np.concatenate([rows, _number(last, size)[:, None]], axis=1, dtype=np.float32)
        places = self._batch.block_tables[step.rows[spans], blocks].astype(np.int64)
        tails[places] = like(written[:, None], tails)

    def _forward(self, batch: ForwardBatch, before: Tensor | None, sequences: IntArray) -> Tensor:
        """Run the head; all tokens have their keys and values written."""
        batch = replace(batch, hidden=before).taken(self._head.back_end.library)
        return self._head.forward(batch, self._cache, sequences)


def _number(positions: IntArray, block_size: int) -> IntArray:
    """Return what a tail has behind the hidden state of a position: a number that every dtype holds, never 0."""
    found: IntArray = positions % block_size % MAX_NUMBER + 1
    return found


MAX_NUMBER = 128   # a token's, within its block; in larger blocks tokens so far apart have the same
HALF_WINDOW = 0.1  # from the table above
_TARGETS_ALONE = np.uint32(GRAMMAR | LOGPROBS | NAMED_LOGPROBS | SCALED)  # features of samples that drafts lack


def choose_drafts(
    samples: SamplingBatch, logits: Tensor, ops: SamplingOps
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return a token for each sample, from logits float32 [num_samples, vocab], and whether its logits were finite.

    Edits `logits`. min_p, top_k and top_p are left out: the tokens that they remove are unlikely drafts.
    """
    samples = samples._replace(features=samples.features & ~_TARGETS_ALONE)
    if samples.wanted & LOGITS_PROCESSED:
        process_logits(samples, logits, ops)
    values = floats(logits)
    tokens = values.argmax(axis=1)
    highest = values[np.arange(len(values)), tokens]
    sampled = samples.using(SAMPLED)
    if sampled.size:
        with np.errstate(over="ignore", invalid="ignore"):  # rows with infinite logits have no draft
            tokens[sampled] = _in_window(samples.take(sampled), values[sampled] - highest[sampled, None], ops)
    return tokens, np.isfinite(highest)


def _in_window(samples: SamplingBatch, logits: NDArray[np.float32], ops: SamplingOps) -> NDArray[np.int64]:
    """Return the token of each sample with the largest share of the window; logits [num_samples, vocab], at most 0."""
    temperatures = samples.settings()["temperature"][:, None]
    centres = samples.uniforms(ops).astype(np.float32)[:, None]
    weights = np.exp(logits / temperatures)
    probabilities = weights / weights.sum(axis=1, keepdims=True)
    uppers = probabilities.cumsum(axis=1)
    lowers = uppers - probabilities
    shares = np.minimum(uppers, centres + HALF_WINDOW) - np.maximum(lowers, centres - HALF_WINDOW)
    found: NDArray[np.int64] = shares.argmax(axis=1)
    return found
