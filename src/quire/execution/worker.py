"""Computation of a step, from plan to result, and the worker that runs one step at a time.

A computation owns one device with the model, the KV tensors and the persistent batch. The forward pass computes all
rows at once, so its failure fails the step. Sampling and logprobs fail for the row concerned alone.
"""

import logging
import time
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from quire.core.plan import MeasuredRates, PromptLogprobsChunk, RowResult, StepPlan, StepResult
from quire.decoding.grammars.rows import GrammarRows
from quire.decoding.row_pooling import pool
from quire.decoding.sampler import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    SampledTokens,
    SamplingBatch,
    is_finite,
    join,
    prompt_logprobs,
    prompt_scores,
    sample,
)
from quire.execution.batch import AdapterRows, PersistentBatch, StepInputs
from quire.execution.drafter import Drafter
from quire.execution.image_rows import ImageRows
from quire.execution.row_results import GRAMMAR_FIELD, add_drafts, advance_grammars, late_rows, verified
from quire.execution.step_timer import Rate, StepTimer
from quire.execution.swapper import Swapper
from quire.kernels.tensors import NUMPY_LIBRARY, Tensor, take_rows
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch, LanguageModel

log = logging.getLogger(__name__)

PROMPT_LOGITS_ROWS = 256  # rows of logits held at once for prompt logprobs: 256 x 150,000 x 4 bytes is 154 MB


class StepCompute:
    """Turns a plan into tensors, runs the forward pass, samples. Workers call its parts, in the order of the file."""

    def __init__(
        self, model: LanguageModel, cache: KVCache, batch: PersistentBatch, swapper: Swapper | None = None,
        grammars: GrammarRows | None = None, drafter: Drafter | None = None, adapters: AdapterRows | None = None,
        images: ImageRows | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.cache = cache            # all models that share the block tables; the model's layers first
        num_layers = model.kv_geometry.num_layers
        self.own_cache, _ = cache.split([num_layers, len(cache.keys) - num_layers])
        self.batch = batch
        self.swapper = swapper
        self.grammars = grammars      # None: no request has a grammar
        self.drafter = drafter        # None: no row has drafts
        self.adapters = adapters      # None: no row has an adapter
        self.images = images          # None: no row has an image
        self._prefill_rate, self._timer = Rate(), StepTimer()

    def prepare(self, plan: StepPlan, *, has_tables: bool = True) -> tuple[StepInputs, float]:
        """Apply a plan up to the forward pass; return its inputs, and the seconds spent on swapping.

        `has_tables`: the inputs contain the block tables. From here on masks are filled by other threads.
        """
        self.batch.apply(plan)
        if self.drafter is not None:
            self.drafter.apply(plan)
        inputs = self.batch.inputs(plan, has_tables=has_tables)
        if self.adapters is not None and (adapters := self.adapters.of_step(plan)) is not None:
            inputs = inputs._replace(forward=replace(inputs.forward, adapters=adapters))
        if self.images is not None:
            inputs = inputs._replace(forward=self.images.apply(plan, inputs.forward))
        if self.grammars is not None and (self.grammars.states or plan.new_rows):   # else no row has a grammar
            self.grammars.apply(plan)
            step = self.grammars.start_step(
                inputs.sample_rows, inputs.sample_num_tokens, self.batch.token_ids, inputs.drafts, inputs.rows
            )
            inputs = inputs._replace(grammars=step)
        swap_s = 0.0 if self.swapper is None else self.swapper.move(plan, inputs.forward.slot_mapping)
        if plan.copies:
            src, dst = np.array(plan.copies).T
            tensors = self.cache.tensors
            self.model.back_end.copy_blocks(tensors, tensors, src, dst)
        return inputs, swap_s

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return the hidden states [T, hidden] of a batch; its keys and values are written to the cache."""
        if batch.num_read is not None and self.drafter is not None and self.drafter.reads_hidden:
            batch = replace(batch, num_read=None)
        return self.model.forward(batch, self.own_cache)

    def sample(self, inputs: StepInputs, hidden: Tensor, logit_rows: Any) -> SampledTokens:  # noqa: ANN401 (where the states are)
        """Draw all samples at once; if that fails, one by one. hidden [T, hidden], logit_rows [N]."""
        num_samples = len(inputs.sample_rows)
        if num_samples == 0:
            return SampledTokens([], None)
        hidden = take_rows(hidden, logit_rows)
        try:
            return self._draw(inputs, self.model.logits(hidden), slice(num_samples))
        except Exception:
            log.exception("sampling of a step failed; its samples are drawn one by one")
        return join([self._draw_alone(inputs, hidden, slice(i, i + 1)) for i in range(num_samples)])

    def samples(self, inputs: StepInputs, which: slice) -> SamplingBatch:
        """Return what the samples of a step are drawn by; grammars have filled their masks."""
        batch, rows = self.batch, inputs.sample_rows[which]
        masks = None if inputs.grammars is None else inputs.grammars.masks()
        if masks is not None and len(rows) < len(inputs.sample_rows):
            masks = masks.part(which.start, which.stop)
        return SamplingBatch.of(batch.sampling, rows, batch.token_ids, inputs.sample_num_tokens[which], masks)

    def result(self, inputs: StepInputs, hidden: Tensor, sampled: SampledTokens, swap_s: float) -> StepResult:
        """Return the result of a step; the batch has recorded its samples. hidden [T, hidden]."""
        results, rejected = verified(inputs, sampled) if inputs.drafts else ({}, set())
        failed = dict(sampled.failures)
        if inputs.grammars is not None:
            failed |= inputs.grammars.masks().failures
        failures = {int(inputs.sample_rows[index]): why for index, why in failed.items() if index not in rejected}
        at_fault = dict[int, str]()
        if inputs.grammars is not None:
            at_fault = {int(inputs.sample_rows[index]): GRAMMAR_FIELD for index in inputs.grammars.masks().at_fault}
            at_fault |= {row: NOTHING_ALLOWED[why] for row, why in failures.items() if why in NOTHING_ALLOWED}
            results |= advance_grammars(self.batch, inputs, inputs.grammars, sampled, results, failures, at_fault)
            results |= late_rows(inputs, inputs.grammars.masks().late, results)
        if inputs.pooled:
            vectors, unsound = pool(inputs.pooled, hidden, self.model.logits)
            results |= {row: RowResult(has_ended=True, pooled=vector.tobytes()) for row, vector in vectors.items()}
            failures |= unsound
        if self.drafter is not None:
            add_drafts(self.drafter, inputs._replace(hidden=hidden), sampled, results, failures)
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

    def timed(self, result: StepResult, inputs: StepInputs, seconds: float) -> StepResult:
        """Record how long a step took, for the results of later ones; return its result with that."""
        if self.images is not None and self.images.has_encoded:  # the time is not that of its tokens
            return structs.replace(result, step_s=seconds)
        num_tokens = len(inputs.forward.token_ids)
        if num_tokens > len(inputs.rows):                                          # else every row is a decode
            self._prefill_rate.add(num_tokens, seconds)
        ratio = self._timer.record(inputs.starts, inputs.stops, len(inputs.sample_rows), seconds)
        return structs.replace(result, step_s=seconds, step_ratio=ratio)

    def _draw_alone(self, inputs: StepInputs, hidden: Tensor, one: slice) -> SampledTokens:
        logits = self.model.logits(hidden[one])
        try:
            return self._draw(inputs, logits, one)
        except Exception as error:
            return SampledTokens([0], None, {0: f"its next token could not be drawn: {error!r}"})

    def _draw(self, inputs: StepInputs, logits: Tensor, which: slice) -> SampledTokens:
        return sample(self.samples(inputs, which), logits, self.model.back_end.sampling)

    def _rates(self) -> MeasuredRates:
        swapper = self.swapper
        if swapper is None:
            return MeasuredRates(self._prefill_rate.per_s, step_times=self._timer.times)
        out_per_s, in_per_s = swapper.out_rate.per_s, swapper.in_rate.per_s
        return MeasuredRates(self._prefill_rate.per_s, out_per_s, in_per_s, self._timer.times)

    def _prompt_logprobs(
        self, inputs: StepInputs, hidden: Tensor, failures: dict[int, str]
    ) -> list[PromptLogprobsChunk]:
        """Score the prompt tokens that follow this step's tokens, for the rows that ask. hidden [T, hidden].

        Adds the rows that cannot be scored to `failures`.
        """
        chunks = []
        for entry in self.batch.scores_prompt[inputs.rows].nonzero()[0].tolist():
            row = int(inputs.rows[entry])
            try:
                own = self._prompt_logprobs_of(inputs, hidden, entry)
            except Exception as error:
                log.exception("prompt logprobs could not be computed")
                failures[row] = f"its prompt logprobs could not be computed: {error!r}"
                continue
            if not all(map(_is_sound, own)):
                failures[row] = NOT_FINITE
            chunks += own
        return chunks

    def _prompt_logprobs_of(self, inputs: StepInputs, hidden: Tensor, entry: int) -> list[PromptLogprobsChunk]:
        row, start = int(inputs.rows[entry]), int(inputs.starts[entry])
        stop = min(int(inputs.stops[entry]), int(self.batch.num_prompt_tokens[row]) - 1)
        first = int(inputs.forward.query_starts[entry]) - start                    # position 0's place in the batch
        chunks = []
        for begin in range(start, stop, PROMPT_LOGITS_ROWS):
            end = min(begin + PROMPT_LOGITS_ROWS, stop)
            logits = self.model.logits(hidden[first + begin : first + end])
            following = self.batch.token_ids[row, begin + 1 : end + 1].astype(np.int64)
            asked, ops = int(self.batch.prompt_logprobs[row]), self.model.back_end.sampling
            records = [] if asked < 0 else prompt_logprobs(logits, following, asked, ops)
            named, scores = self.batch.named_ids(row, begin, end), b""
            if named is not None:
                scores = prompt_scores(logits[named[0] - begin :], named[1], ops).tobytes()
            chunks.append(PromptLogprobsChunk(row, begin + 1, records, scores))
        return chunks


class Worker:
    """A worker that runs one step at a time, on the host."""

    def __init__(self, compute: StepCompute) -> None:
        self.compute = compute

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: changes of rows, swaps, block copies, forward pass, sampling."""
        started_s, compute = time.perf_counter(), self.compute
        inputs, swap_s = compute.prepare(plan)
        library, batch = compute.model.back_end.library, inputs.forward
        hidden = compute.forward(batch if library is NUMPY_LIBRARY else batch.taken(library))  # [T, hidden]
        if inputs.grammars is not None:
            inputs.grammars.finish_masks()
        sampled = compute.sample(inputs, hidden, inputs.logit_rows)
        compute.batch.record(inputs, sampled.token_ids)
        result = compute.result(inputs, hidden, sampled, swap_s)
        return compute.timed(result, inputs, time.perf_counter() - started_s - swap_s)


def _is_sound(chunk: PromptLogprobsChunk) -> bool:
    """Return whether the logits behind a chunk were finite; the logprob of padding is -inf."""
    has_nan = bool(np.isnan(np.frombuffer(chunk.scores, dtype=np.float32)).any())
    return not has_nan and all(map(is_finite, chunk.tokens))
