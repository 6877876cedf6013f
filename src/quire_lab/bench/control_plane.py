"""Time of a step without the model: scheduler, batch preparation and token handling, on the real classes.

The executor prepares every batch as a worker does and then makes tokens up. Sequences decode all the time, with prompt
lengths staggered over a block, so that in each step about one in `block_size` of them needs another block.
"""

import time

from quire.core.config import DEFAULT_MAX_NUM_BATCHED_TOKENS, CacheConfig, SchedulerConfig
from quire.core.plan import StepPlan, StepResult
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.core.token_ids import pack_tokens
from quire.engine.engine import Engine
from quire.engine.schedulers import make_scheduler
from quire.execution.batch import PersistentBatch
from quire.execution.executor import LocalExecutor

_VOCAB_SIZE = 32_000
_WARM_UP_STEPS = 32
_TOKEN = 7


class _NullWorker:
    """Prepares every batch as a worker does, computes nothing, and returns the same token for each sample."""

    def __init__(self, batch: PersistentBatch) -> None:
        self._batch = batch

    def execute(self, plan: StepPlan) -> StepResult:
        """Prepare the plan's batch and record the token for each of its samples."""
        self._batch.apply(plan)
        inputs = self._batch.inputs(plan)
        token_ids = [_TOKEN] * len(plan.sample_rows)
        self._batch.record(inputs, token_ids)
        return StepResult(token_ids)


def us_per_sequence_and_step(num_seqs: int, steps: int, prompt_len: int, block_size: int) -> float:
    """Return the mean microseconds per sequence of `steps` decode steps of `num_seqs` sequences."""
    engine = decoding_engine(num_seqs, steps, prompt_len, block_size)
    started_s = time.perf_counter()
    for _ in range(steps):
        engine.step()
    elapsed_s = time.perf_counter() - started_s
    assert engine.kv_stats().num_sequences == num_seqs, "a sequence ended while the steps were timed"
    return elapsed_s / steps / num_seqs * 1e6


def decoding_engine(
    num_seqs: int, steps: int, prompt_len: int, block_size: int, *, enable_prefix_caching: bool = True
) -> Engine:
    """Return a warmed-up engine without a model, with `num_seqs` sequences that decode for `steps` steps."""
    prefill_steps = prompt_len + block_size  # at most: half of the token budget is left for prompts
    max_tokens = prefill_steps + _WARM_UP_STEPS + steps + 1
    longest = prompt_len + block_size + max_tokens
    num_blocks = num_seqs * -(-longest // block_size)
    budget = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, 2 * num_seqs)
    scheduler_config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=budget, max_model_len=longest)
    cache_config = CacheConfig(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
    scheduler = make_scheduler(scheduler_config, cache_config)
    batch = PersistentBatch(num_seqs, longest, block_size, _VOCAB_SIZE)
    engine = Engine(scheduler, LocalExecutor(_NullWorker(batch)))
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    for request_id in range(num_seqs):
        prompt = [request_id % _VOCAB_SIZE] * (prompt_len + request_id % block_size)
        engine.add(Request(request_id, pack_tokens(prompt), params, seed=request_id, max_tokens=max_tokens))
    prefilled: set[int] = set()
    while len(prefilled) < num_seqs:
        prefilled.update(delta.request_id for delta in engine.step())
    for _ in range(_WARM_UP_STEPS):
        engine.step()
    return engine
