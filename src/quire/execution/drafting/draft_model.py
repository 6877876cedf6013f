"""Drafts of a draft model: a second, smaller decoder continues each row by some tokens (Leviathan et al. 2023).

Its keys and values are further layers of the target's cache. It computes the tokens of each step on the same slots, so
block tables, prefix hits, forks, copies and swaps are right for both. Draft tokens have no slots yet: their keys and
values are written to scratch blocks, which only the draft model's tensors have, behind the blocks of the pool. A row's
partly filled block is copied there first. Scratch blocks are invisible to the scheduler.

Verification compares drafts with what the target samples, so an error in them costs acceptance and changes no output.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.draft_scratch import MAX_PENDING, ScratchBlocks
from quire.decoding.sampling_batch import SamplingBatch
from quire.execution.batch import IntArray, PersistentBatch
from quire.execution.drafter import DraftRows
from quire.execution.drafting.draft_tokens import choose_drafts
from quire.kernels.kv_quantization import as_bytes
from quire.model.batch import ForwardBatch
from quire.model.kv_cache import KVCache
from quire.model.language_model import LanguageModel

log = logging.getLogger(__name__)


class DraftModel:
    """A `DraftMethod` over a model with `cache`, its part of a cache that has scratch blocks behind the pool's blocks.

    `max_positions`: positions that the model can compute. There are no drafts at later ones. If the model raises an
    error, it is logged, and no row has drafts from then on.
    """

    def __init__(
        self, model: LanguageModel, cache: KVCache, batch: PersistentBatch, scratch: ScratchBlocks, max_positions: int
    ) -> None:
        self._model, self._cache, self._batch, self._max_positions = model, cache, batch, max_positions
        first = len(cache.keys[0]) - scratch.num_blocks
        self._scratch = np.arange(first, first + scratch.num_blocks, dtype=np.int32).reshape(scratch.num_rows, -1)
        self._num_drafts = scratch.num_drafts
        self._has_failed = False

    def compute(self, batch: ForwardBatch) -> None:
        """Write the keys and values of a step's tokens."""
        if self._has_failed:
            return
        try:
            within = _up_to(replace(batch, adapters=None), self._max_positions)  # which are the target's
            if within is not None:
                self._forward(within)
        except Exception:
            self._stop()

    def draft(self, rows: DraftRows, limits: IntArray) -> Mapping[int, Sequence[int]]:
        """Return up to `limits` drafts of each row, for as many rows as there are scratch blocks for."""
        limits = np.minimum(limits, self._max_positions - rows.last).clip(max=self._num_drafts)
        serves = (limits > 0) & (rows.num_tokens - rows.num_computed <= MAX_PENDING)
        drafted = np.flatnonzero(serves)[: len(self._scratch)]
        if self._has_failed or not drafted.size:
            return {}
        try:
            return self._draft(DraftRows(*(each[drafted] for each in rows)), limits[drafted])
        except Exception:
            self._stop()
            return {}

    def _draft(self, rows: DraftRows, limits: IntArray) -> dict[int, list[int]]:
        """Compute the pending tokens of each row, then its drafts, one by one."""
        tables = self._tables(rows)
        num_drafts = np.zeros(len(rows.rows), dtype=np.int64)
        drafting = np.arange(len(rows.rows))                                  # places in `rows`
        starts, stops = rows.num_computed, rows.num_tokens
        while drafting.size:
            hidden = self._forward(self._step(rows.rows[drafting], tables[drafting], starts, stops))
            last = torch.from_numpy(np.cumsum(stops - starts) - 1)
            tokens, is_sound = self._choose(rows.rows[drafting], stops, self._model.logits(hidden[last]))
            self._clear_scratch(drafting[~is_sound])
            drafting, tokens, stops = drafting[is_sound], tokens[is_sound], stops[is_sound]
            self._batch.token_ids[rows.rows[drafting], stops] = tokens
            num_drafts[drafting] += 1
            continues = num_drafts[drafting] < limits[drafting]
            drafting, starts = drafting[continues], stops[continues]
            stops = starts + 1
        found = zip(rows.rows.tolist(), rows.num_tokens.tolist(), num_drafts.tolist(), strict=True)
        return {
            row: self._batch.token_ids[row, start : start + count].tolist() for row, start, count in found if count
        }

    def _tables(self, rows: DraftRows) -> NDArray[np.int32]:
        """Return block tables of the rows that go on in scratch blocks: int32 [num_rows, num_blocks].

        The block of the first token that is not computed is copied to scratch: it may be shared, and the row may not
        have it yet.
        """
        first, offsets = np.divmod(rows.num_computed, self._cache.block_size)
        scratch = self._scratch[: len(first)]
        tables = np.zeros((len(first), int(first.max()) + scratch.shape[1]), dtype=np.int32)
        width = min(tables.shape[1], self._batch.block_tables.shape[1])
        tables[:, :width] = self._batch.block_tables[rows.rows, :width]
        partly = np.flatnonzero(offsets)
        if partly.size:
            src = torch.from_numpy(tables[partly, first[partly]].astype(np.int64))
            dst = torch.from_numpy(scratch[partly, 0].astype(np.int64))
            self._model.back_end.copy_blocks(self._cache.tensors, self._cache.tensors, src, dst)
        np.put_along_axis(tables, first[:, None] + np.arange(scratch.shape[1]), scratch, axis=1)
        return tables

    def _step(self, rows: IntArray, tables: NDArray[np.int32], starts: IntArray, stops: IntArray) -> ForwardBatch:
        """Return the batch of the tokens at positions [starts[i], stops[i]) of each row, on the blocks of `tables`."""
        block_size, counts = self._cache.block_size, stops - starts
        query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_starts[1:])
        places = np.repeat(np.arange(len(rows)), counts)                      # [T]
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
        slots = tables[places, positions // block_size].astype(np.int64) * block_size + positions % block_size
        return ForwardBatch(
            token_ids=torch.from_numpy(self._batch.token_ids[rows[places], positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            query_starts=torch.from_numpy(query_starts),
            context_lens=torch.from_numpy(stops.astype(np.int32)),
            block_tables=torch.from_numpy(tables[:, : -(-int(stops.max()) // block_size)].copy()),
        )

    def _forward(self, batch: ForwardBatch) -> Tensor:
        """Run the model. Token ids that only the target has are replaced by the draft model's last one."""
        if self._model.vocab_size < self._batch.sampling.vocab_size:
            batch = replace(batch, token_ids=batch.token_ids.clamp(max=self._model.vocab_size - 1))
        return self._model.forward(batch, self._cache)

    def _choose(
        self, rows: IntArray, num_tokens: IntArray, logits: Tensor
    ) -> tuple[IntArray, NDArray[np.bool_]]:
        """Return a token for each row of logits [num_rows, vocab], and whether its logits were finite."""
        num_ids = self._batch.sampling.vocab_size
        if logits.shape[1] != num_ids:  # padded to another width; ids that one model lacks are no drafts
            fitted = logits.new_full((len(logits), num_ids), -torch.inf)
            width = min(num_ids, logits.shape[1])
            fitted[:, :width] = logits[:, :width]
            logits = fitted
        samples = SamplingBatch.of(self._batch.sampling, rows, self._batch.token_ids, num_tokens)
        return choose_drafts(samples, logits, self._model.back_end.sampling)

    def _clear_scratch(self, places: IntArray) -> None:
        """Write zeros to scratch blocks that may hold NaN."""
        if places.size:
            blocks = torch.from_numpy(self._scratch[places].reshape(-1).astype(np.int64))
            for tensor in self._cache.tensors:
                as_bytes(tensor).index_fill_(0, blocks, 0)

    def _stop(self) -> None:
        self._has_failed = True
        log.exception("the draft model failed; rows have no drafts from now on, and are decoded token by token")


def _up_to(batch: ForwardBatch, max_positions: int) -> ForwardBatch | None:
    """Return the tokens of a batch at positions below `max_positions`; None if there are none."""
    within = batch.positions < max_positions
    if within.all():
        return batch
    cumulated = torch.nn.functional.pad(within.cumsum(0), (1, 0))[batch.query_starts.long()]  # [S + 1]
    counts = cumulated.diff()
    kept = counts > 0
    if not kept.any():
        return None
    return ForwardBatch(
        token_ids=batch.token_ids[within],
        positions=batch.positions[within],
        slot_mapping=batch.slot_mapping[within],
        query_starts=torch.nn.functional.pad(counts[kept].cumsum(0), (1, 0)).int(),
        context_lens=batch.context_lens[kept].clamp(max=max_positions),
        block_tables=batch.block_tables[kept],
    )
