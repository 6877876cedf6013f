"""Time of a step without the model: scheduler, batch preparation and token handling, on the real classes.

The executor prepares every batch as a worker does and then makes tokens up. Sequences decode all the time, with prompt
lengths staggered over a block, so that in each step about one in `block_size` of them needs another block.
`longest_step_ms` times the longest step of bursts, forks and beam searches, by the length of prompts; made-up
tokens are outside of the timed part.
"""

import time
from collections.abc import Callable

from quire.core.config import DEFAULT_MAX_NUM_BATCHED_TOKENS, CacheConfig, SchedulerConfig
from quire.core.plan import StepPlan, StepResult
from quire.core.pooling import BeamTask
from quire.core.sampling_params import BeamSearchParams, SamplingParams, as_sampling_params
from quire.core.sequence import Request
from quire.core.token_ids import PackedTokens, pack_tokens
from quire.engine.engine import Engine
from quire.execution.batch import PersistentBatch
from quire.execution.executor import LocalExecutor
from quire.scheduling.scheduler import Scheduler, make_scheduler
from quire_lab.sim.simulation import SimulatedExecutor

MakeScheduler = Callable[[SchedulerConfig, CacheConfig], Scheduler]

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


def us_per_sequence_and_step(
    num_seqs: int, steps: int, prompt_len: int, block_size: int, make: MakeScheduler = make_scheduler
) -> float:
    """Return the mean microseconds per sequence of `steps` decode steps of `num_seqs` sequences.

    `make` returns the scheduler.
    """
    engine = decoding_engine(num_seqs, steps, prompt_len, block_size, make=make)
    started_s = time.perf_counter()
    for _ in range(steps):
        engine.step()
    elapsed_s = time.perf_counter() - started_s
    assert engine.kv_stats().num_sequences == num_seqs, "a sequence ended while the steps were timed"
    return elapsed_s / steps / num_seqs * 1e6


def decoding_engine(
    num_seqs: int, steps: int, prompt_len: int, block_size: int, *, enable_prefix_caching: bool = True,
    make: MakeScheduler = make_scheduler,
) -> Engine:
    """Return a warmed-up engine without a model, with `num_seqs` sequences that decode for `steps` steps."""
    prefill_steps = prompt_len + block_size  # at most: half of the token budget is left for prompts
    max_tokens = prefill_steps + _WARM_UP_STEPS + steps + 1
    longest = prompt_len + block_size + max_tokens
    num_blocks = num_seqs * -(-longest // block_size)
    budget = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, 2 * num_seqs)
    scheduler_config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=budget, max_model_len=longest)
    cache_config = CacheConfig(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
    scheduler = make(scheduler_config, cache_config)
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

_BLOCK_SIZE = 16
_BUDGET = 2048      # tokens of a step: the server's default
_NUM_SEQS = 256
_WIDTH = 64         # branches of a fork, beams of a search
_MAX_TOKENS = 16


def burst(num_tokens: int) -> list[Request]:
    """Return requests that begin with the same tokens, which none has computed yet."""
    common, params = _prompt(num_tokens), SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True)
    return [Request(i, common + pack_tokens([i]), params, i, _MAX_TOKENS) for i in range(_NUM_SEQS)]


def fork(num_tokens: int) -> list[Request]:
    """Return a request of many branches."""
    params = SamplingParams(n=_WIDTH, max_tokens=_MAX_TOKENS, ignore_eos=True)
    return [Request(0, _prompt(num_tokens), params, 0, _MAX_TOKENS)]


def beams(num_tokens: int) -> list[Request]:
    """Return a wide beam search."""
    beam = BeamSearchParams(_WIDTH, _MAX_TOKENS, ignore_eos=True)
    return [Request(0, _prompt(num_tokens), as_sampling_params(beam), 0, _MAX_TOKENS, task=BeamTask(beam))]


CASES: dict[str, Callable[[int], list[Request]]] = {
    f"burst of {_NUM_SEQS}": burst,
    f"fork of {_WIDTH}": fork,
    f"{_WIDTH} beams": beams,
}


def longest_step_ms(requests: list[Request]) -> float:
    """Run requests to their end; return the milliseconds of the longest step."""
    num_tokens = max(len(request.prompt_token_ids) for request in requests)
    longest, num_sequences = num_tokens + _MAX_TOKENS, sum(request.params.n for request in requests)
    own_blocks = num_sequences * (2 * _MAX_TOKENS // _BLOCK_SIZE + 2)
    cache = CacheConfig(-(-num_tokens // _BLOCK_SIZE) + own_blocks, _BLOCK_SIZE)
    scheduler = make_scheduler(SchedulerConfig(_NUM_SEQS, _BUDGET, longest), cache)
    executor = SimulatedExecutor(lambda plan: 0.0)
    batch = PersistentBatch(_NUM_SEQS, longest, _BLOCK_SIZE, _VOCAB_SIZE)
    for request in requests:
        scheduler.add(request)
    longest_s = 0.0
    while scheduler.has_requests:
        longest_s = max(longest_s, _step_s(scheduler, executor, batch))
    return longest_s * 1e3


def _step_s(scheduler: Scheduler, executor: SimulatedExecutor, batch: PersistentBatch) -> float:
    """Run a step; return its seconds without those of making tokens up."""
    started_s = time.perf_counter()
    plan = scheduler.schedule()
    batch.apply(plan)
    inputs = batch.inputs(plan)
    prepared_s = time.perf_counter()
    executor.submit(plan)
    result = executor.collect()
    answered_s = time.perf_counter()
    batch.record(inputs, result.token_ids)
    scheduler.update(plan, result)
    return prepared_s - started_s + time.perf_counter() - answered_s


def _prompt(num_tokens: int) -> PackedTokens:
    """Return a prompt as the engine gets it from the server."""
    return pack_tokens([position % _VOCAB_SIZE for position in range(num_tokens)])
