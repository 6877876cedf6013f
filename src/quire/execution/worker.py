"""The worker owns one device: the model, the KV tensors and the persistent batch."""

import time

import torch
from torch import Tensor

from quire.core.plan import MeasuredRates, PromptLogprobsChunk, StepPlan, StepResult
from quire.decoding.sampler import prompt_logprobs, sample
from quire.execution.batch import PersistentBatch, StepInputs
from quire.execution.rates import Rate
from quire.execution.swapper import Swapper
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache

PROMPT_LOGITS_ROWS = 256  # rows of logits held at once for prompt logprobs: 256 x 150,000 x 4 bytes is 154 MB


class Worker:
    """Turns a plan into tensors, runs the forward pass, samples."""

    def __init__(self, model: Decoder, cache: KVCache, batch: PersistentBatch, swapper: Swapper | None = None) -> None:
        self._model = model
        self._cache = cache
        self._batch = batch
        self._swapper = swapper
        self._prefill_rate = Rate()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: changes of rows, swaps, block copies, forward pass, sampling."""
        self._batch.apply(plan)
        swap_s = 0.0 if self._swapper is None else self._swapper.move(plan)
        started_s = time.perf_counter()
        if plan.copies:
            src, dst = torch.tensor(plan.copies).unbind(dim=1)
            self._model.back_end.copy_blocks([*self._cache.keys, *self._cache.values], src, dst)
        inputs = self._batch.inputs(plan)
        hidden = self._model.forward(inputs.forward, self._cache)                  # [T, hidden]
        logits = self._model.logits(hidden[torch.from_numpy(inputs.logit_rows)])   # [N, vocab]
        sampled = sample(
            self._batch.sampling,
            logits,
            inputs.sample_rows,
            self._batch.token_ids,
            inputs.sample_num_tokens,
            self._model.back_end.sampling,
        )
        self._batch.record(inputs, sampled.token_ids)
        if max(plan.counts) > 1:                                                   # else nothing but decodes
            self._prefill_rate.add(sum(plan.counts), time.perf_counter() - started_s)
        return StepResult(
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=self._prompt_logprobs(inputs, hidden),
            swap_s=swap_s,
            rates=self._rates(),
        )

    def _rates(self) -> MeasuredRates:
        swapper = self._swapper
        if swapper is None:
            return MeasuredRates(self._prefill_rate.per_s)
        return MeasuredRates(self._prefill_rate.per_s, swapper.out_rate.per_s, swapper.in_rate.per_s)

    def _prompt_logprobs(self, inputs: StepInputs, hidden: Tensor) -> list[PromptLogprobsChunk]:
        """Score the prompt tokens that follow this step's tokens, for the rows that asked. hidden [T, hidden]."""
        asked = self._batch.prompt_logprobs[inputs.rows]
        chunks = []
        for entry in (asked >= 0).nonzero()[0].tolist():
            row, start = int(inputs.rows[entry]), int(inputs.starts[entry])
            stop = min(int(inputs.stops[entry]), int(self._batch.num_prompt_tokens[row]) - 1)
            first = int(inputs.forward.query_starts[entry]) - start                # position 0's place in the batch
            for begin in range(start, stop, PROMPT_LOGITS_ROWS):
                end = min(begin + PROMPT_LOGITS_ROWS, stop)
                logits = self._model.logits(hidden[first + begin : first + end])
                following = torch.from_numpy(self._batch.token_ids[row, begin + 1 : end + 1])
                records = prompt_logprobs(logits, following, int(asked[entry]), self._model.back_end.sampling)
                chunks.append(PromptLogprobsChunk(row, begin + 1, records))
        return chunks
