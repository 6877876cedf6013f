"""Growth of the longest step with the length of prompts, without the model: bursts, forks and beam searches.

Times the scheduler and the preparation of batches on the real classes. Tokens are made up, outside of the timed part.
"""

import time
from collections.abc import Callable

from quire.core.beam_search_params import BeamSearchParams, as_sampling_params
from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.core.task import BeamTask
from quire.core.token_ids import PackedTokens, pack_tokens
from quire.engine.schedulers import make_scheduler
from quire.execution.batch import PersistentBatch
from quire.scheduling.scheduler import Scheduler
from quire_lab.sim.executor import SimulatedExecutor

_BLOCK_SIZE = 16
_BUDGET = 2048      # tokens of a step: the server's default
_NUM_SEQS = 256
_WIDTH = 64         # branches of a fork, beams of a search
_MAX_TOKENS = 16
_VOCAB_SIZE = 32_000


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
