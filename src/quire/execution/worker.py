"""Worker: owner of one device with the model, the KV tensors and the persistent batch; runs plans.

The forward pass computes all rows at once, so its failure fails the step. Sampling and logprobs fail for the row
concerned alone.
"""

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from msgspec import structs
from torch import Tensor

from quire.core.outputs import TokenLogprobs
from quire.core.plan import MeasuredRates, PromptLogprobsChunk, RowResult, StepPlan, StepResult
from quire.decoding.pooling import pool
from quire.decoding.row_grammars import RowGrammars, RowProgress, StepGrammars
from quire.decoding.sampler import NOT_FINITE, NOTHING_ALLOWED, SampledTokens, is_finite, join, prompt_logprobs, sample
from quire.decoding.sampling_batch import SamplingBatch
from quire.decoding.verification import num_accepted
from quire.execution.batch import PersistentBatch, StepInputs
from quire.execution.drafter import Drafter, rows_to_draft
from quire.execution.rates import Rate
from quire.execution.swapper import Swapper
from quire.kernels.low_rank import RowAdapters
from quire.model.batch import ForwardBatch
from quire.model.kv_cache import KVCache
from quire.model.language_model import LanguageModel

log = logging.getLogger(__name__)

GRAMMAR_FIELD, ALLOWED_FIELD = "structured_outputs", "allowed_token_ids"  # at fault for a failure
PROMPT_LOGITS_ROWS = 256  # rows of logits held at once for prompt logprobs: 256 x 150,000 x 4 bytes is 154 MB


class StepAdapters(Protocol):
    """The adapters of rows."""

    def of_step(self, plan: StepPlan) -> RowAdapters | None:
        """Apply a plan's new rows; return the adapters of its tokens, None if none of them has one."""


class Worker:
    """Turns a plan into tensors, runs the forward pass, samples."""

    _sends_tables = True  # a step's inputs contain its block tables

    def __init__(
        self, model: LanguageModel, cache: KVCache, batch: PersistentBatch, swapper: Swapper | None = None,
        grammars: RowGrammars | None = None, drafter: Drafter | None = None, adapters: StepAdapters | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._cache = cache           # of every model that shares the block tables; the first layers are the model's
        num_layers = model.kv_geometry.num_layers
        self._own_cache, _ = cache.split([num_layers, len(cache.keys) - num_layers])
        self._batch = batch
        self._swapper = swapper
        self._grammars = grammars     # None: no request has a grammar
        self._drafter = drafter       # None: no row has drafts
        self._adapters = adapters     # None: no row has an adapter
        self._prefill_rate = Rate()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: changes of rows, swaps, block copies, forward pass, sampling."""
        started_s = time.perf_counter()
        inputs, swap_s = self._prepare(plan)
        hidden = self.forward(inputs.forward)                                      # [T, hidden]
        if inputs.grammars is not None:
            inputs.grammars.finish_masks()
        sampled = self._sample(inputs, hidden, torch.from_numpy(inputs.logit_rows))
        self._batch.record(inputs, sampled.token_ids)
        result = self._result(inputs, hidden, sampled, swap_s)
        if max(plan.counts) > 1:                                                   # else every row is a decode
            self._prefill_rate.add(sum(plan.counts), time.perf_counter() - started_s - swap_s)
        return result

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return the hidden states [T, hidden] of a batch; its keys and values are written to the cache."""
        return self._model.forward(batch, self._own_cache)

    def _prepare(self, plan: StepPlan) -> tuple[StepInputs, float]:
        """Apply a plan up to the forward pass; return its inputs, and the seconds spent on swapping.

        From here on masks are filled by other threads.
        """
        self._batch.apply(plan)
        if self._drafter is not None:
            self._drafter.apply(plan)
        inputs = self._batch.inputs(plan, has_tables=self._sends_tables)
        if self._adapters is not None and (adapters := self._adapters.of_step(plan)) is not None:
            inputs = inputs._replace(forward=replace(inputs.forward, adapters=adapters))
        if self._grammars is not None:
            self._grammars.apply(plan)
            step = self._grammars.start_step(
                inputs.sample_rows, inputs.sample_num_tokens, self._batch.token_ids, inputs.drafts, inputs.rows
            )
            inputs = inputs._replace(grammars=step)
        swap_s = 0.0 if self._swapper is None else self._swapper.move(plan, inputs.forward.slot_mapping)
        if plan.copies:
            src, dst = torch.tensor(plan.copies).unbind(dim=1)
            tensors = self._cache.tensors
            self._model.back_end.copy_blocks(tensors, tensors, src, dst)
        return inputs, swap_s

    def _result(self, inputs: StepInputs, hidden: Tensor, sampled: SampledTokens, swap_s: float) -> StepResult:
        results, rejected = _verified(inputs, sampled) if inputs.drafts else ({}, set())
        failed = dict(sampled.failures)
        if inputs.grammars is not None:
            failed |= inputs.grammars.masks().failures
        failures = {int(inputs.sample_rows[index]): why for index, why in failed.items() if index not in rejected}
        at_fault = dict[int, str]()
        if inputs.grammars is not None:
            at_fault = {int(inputs.sample_rows[index]): GRAMMAR_FIELD for index in inputs.grammars.masks().at_fault}
            at_fault |= {row: ALLOWED_FIELD for row, why in failures.items() if why == NOTHING_ALLOWED}
            results |= self._advance_grammars(inputs, inputs.grammars, sampled, results, failures, at_fault)
            results |= _late(inputs, inputs.grammars.masks().late, results)
        if inputs.pooled:
            vectors, unsound = pool(inputs.pooled, hidden, self._model.logits)
            results |= {row: RowResult(has_ended=True, pooled=vector.tobytes()) for row, vector in vectors.items()}
            failures |= unsound
        if self._drafter is not None:
            self._add_drafts(self._drafter, inputs, sampled, results, failures)
        return StepResult(
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=self._prompt_logprobs(inputs, hidden, failures),
            swap_s=swap_s,
            rates=self._rates(),
            failures=failures,
            rows=results,
            at_fault=at_fault,
        )

    def _advance_grammars(
        self, inputs: StepInputs, grammars: StepGrammars, sampled: SampledTokens, results: dict[int, RowResult],
        failures: dict[int, str], at_fault: dict[int, str],
    ) -> dict[int, RowResult]:  # fmt: skip
        """Return the results of rows with grammars that have ended, or force tokens, which are written into their rows.

        `results`: of rows with drafts. Adds the rows with grammars that cannot continue to `failures` and `at_fault`.
        """
        changed, max_len = dict[int, RowResult](), self._batch.token_ids.shape[1]
        for index in grammars.masks().samples.tolist():
            row = int(inputs.sample_rows[index])
            if row in changed or row in failures:
                continue
            result = results.get(row) or RowResult([sampled.token_ids[index]], _record_of(sampled, index))
            behind = int(inputs.sample_num_tokens[index]) + len(result.token_ids)
            progress = grammars.advance(row, result.token_ids, max_len - behind)
            assert progress is not None, f"row {row} has a mask and no grammar"
            if progress.failure is not None:
                failures[row] = progress.failure
                at_fault |= {row: GRAMMAR_FIELD} if progress.is_at_fault else {}
            elif progress.has_ended or progress.forced or row in results:
                changed[row] = _with_progress(result, progress)
                self._batch.append(row, behind, progress.forced)
        return changed

    def _add_drafts(
        self, drafter: Drafter, inputs: StepInputs, sampled: SampledTokens, results: dict[int, RowResult],
        failures: Mapping[int, str],
    ) -> None:  # fmt: skip
        """Add the drafts of rows that continue to their results. Rows without drafts need no result of their own."""
        for row, _, token_ids in inputs.drafts:
            if row not in failures and not results[row].is_late:
                drafter.record(row, len(token_ids), max(len(results[row].token_ids) - 1, 0))
        drafts = drafter.draft(rows_to_draft(inputs, results, failures), inputs)
        if not drafts:
            return
        samples = {row: index for index, row in enumerate(inputs.sample_rows.tolist())}
        for row, drafted in drafts.items():
            num_allowed = len(drafted) if inputs.grammars is None else inputs.grammars.num_allowed(row, drafted)
            if num_allowed > 0:
                index = samples[row]    # the only one of a row without a result
                own = results.get(row) or RowResult([sampled.token_ids[index]], _record_of(sampled, index))
                results[row] = structs.replace(own, drafts=list(drafted[:num_allowed]))

    def _sample(self, inputs: StepInputs, hidden: Tensor, logit_rows: Tensor) -> SampledTokens:
        """Draw all samples at once; if that fails, one by one. hidden [T, hidden], logit_rows [N]."""
        num_samples = len(inputs.sample_rows)
        if num_samples == 0:
            return SampledTokens([], None)
        hidden = hidden[logit_rows]
        try:
            return self._draw(inputs, self._model.logits(hidden), slice(num_samples))
        except Exception:
            log.exception("sampling of a step failed; its samples are drawn one by one")
        return join([self._draw_alone(inputs, hidden, slice(i, i + 1)) for i in range(num_samples)])

    def _draw_alone(self, inputs: StepInputs, hidden: Tensor, one: slice) -> SampledTokens:
        logits = self._model.logits(hidden[one])
        try:
            return self._draw(inputs, logits, one)
        except Exception as error:
            return SampledTokens([0], None, {0: f"its next token could not be drawn: {error!r}"})

    def _draw(self, inputs: StepInputs, logits: Tensor, which: slice) -> SampledTokens:
        return sample(self._samples(inputs, which), logits, self._model.back_end.sampling)

    def _samples(self, inputs: StepInputs, which: slice) -> SamplingBatch:
        batch, rows = self._batch, inputs.sample_rows[which]
        masks = None if inputs.grammars is None else inputs.grammars.masks()
        if masks is not None and len(rows) < len(inputs.sample_rows):
            masks = masks.part(which.start, which.stop)
        return SamplingBatch.of(batch.sampling, rows, batch.token_ids, inputs.sample_num_tokens[which], masks)

    def _rates(self) -> MeasuredRates:
        swapper = self._swapper
        if swapper is None:
            return MeasuredRates(self._prefill_rate.per_s)
        return MeasuredRates(self._prefill_rate.per_s, swapper.out_rate.per_s, swapper.in_rate.per_s)

    def _prompt_logprobs(
        self, inputs: StepInputs, hidden: Tensor, failures: dict[int, str]
    ) -> list[PromptLogprobsChunk]:
        """Score the prompt tokens that follow this step's tokens, for the rows that ask. hidden [T, hidden].

        Adds the rows that cannot be scored to `failures`.
        """
        chunks = []
        for entry in (self._batch.prompt_logprobs[inputs.rows] >= 0).nonzero()[0].tolist():
            row = int(inputs.rows[entry])
            try:
                own = self._prompt_logprobs_of(inputs, hidden, entry)
            except Exception as error:
                log.exception("prompt logprobs could not be computed")
                failures[row] = f"its prompt logprobs could not be computed: {error!r}"
                continue
            if not all(is_finite(record) for chunk in own for record in chunk.tokens):
                failures[row] = NOT_FINITE
            chunks += own
        return chunks

    def _prompt_logprobs_of(self, inputs: StepInputs, hidden: Tensor, entry: int) -> list[PromptLogprobsChunk]:
        row, start = int(inputs.rows[entry]), int(inputs.starts[entry])
        stop = min(int(inputs.stops[entry]), int(self._batch.num_prompt_tokens[row]) - 1)
        first = int(inputs.forward.query_starts[entry]) - start                    # position 0's place in the batch
        chunks = []
        for begin in range(start, stop, PROMPT_LOGITS_ROWS):
            end = min(begin + PROMPT_LOGITS_ROWS, stop)
            logits = self._model.logits(hidden[first + begin : first + end])
            following = torch.from_numpy(self._batch.token_ids[row, begin + 1 : end + 1])
            asked = int(self._batch.prompt_logprobs[row])
            records = prompt_logprobs(logits, following, asked, self._model.back_end.sampling)
            chunks.append(PromptLogprobsChunk(row, begin + 1, records))
        return chunks


def _verified(inputs: StepInputs, sampled: SampledTokens) -> tuple[dict[int, RowResult], set[int]]:
    """Return the results of rows with drafts, as of as many single steps, and the samples behind rejected drafts."""
    first_samples = {row: index for index, row in reversed(list(enumerate(inputs.sample_rows.tolist())))}
    starts = dict(zip(inputs.rows.tolist(), inputs.starts.tolist(), strict=True))
    results, rejected = dict[int, RowResult](), set[int]()
    for row, start, drafts in inputs.drafts:
        first = first_samples[row]
        end = first + len(drafts) + 1
        num_kept = 1 + num_accepted(drafts, sampled.token_ids[first:end])
        kept = slice(first, first + num_kept)
        logprobs = None if sampled.logprobs is None else [each for each in sampled.logprobs[kept] if each is not None]
        results[row] = RowResult(sampled.token_ids[kept], logprobs or None, start - starts[row] + num_kept - 1)
        rejected.update(range(first + num_kept, end))
    return results, rejected


def _late(inputs: StepInputs, late: Collection[int], results: Mapping[int, RowResult]) -> dict[int, RowResult]:
    """Return the results of rows with late masks. `results`: of rows with drafts, which are not kept."""
    num_kept = dict[int, int | None]()
    for index in late:
        row = int(inputs.sample_rows[index])
        own = results.get(row)
        assert own is None or own.num_computed is not None, f"row {row} has a result, and a mask that is late"
        num_kept[row] = None if own is None or own.num_computed is None else own.num_computed + 1 - len(own.token_ids)
    return {row: RowResult(num_computed=num_computed, is_late=True) for row, num_computed in num_kept.items()}


def _record_of(sampled: SampledTokens, index: int) -> list[TokenLogprobs] | None:
    """Return the logprobs of one sample as those of a row."""
    record = None if sampled.logprobs is None else sampled.logprobs[index]
    return None if record is None else [record]


def _with_progress(result: RowResult, progress: RowProgress) -> RowResult:
    """Return the result of a row up to the end of its grammar, with the tokens that are forced."""
    kept = progress.num_kept
    logprobs = None if result.logprobs is None else result.logprobs[:kept]
    forced = list(progress.forced)
    return structs.replace(
        result, token_ids=result.token_ids[:kept], logprobs=logprobs, has_ended=progress.has_ended, forced=forced
    )
