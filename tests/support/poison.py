"""Poison: before each step, everything without an owner is filled with values that show wherever they are read.

NaN in blocks that are free, in the cache and in the swap space; in rows without an owner, parameters that ask for the
impossible, tokens that are in no prompt, and block tables full of a block that is free.
"""

from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from quire import LLM
from quire.cache.block_pool import BlockPool
from quire.core.arrays import Array
from quire.core.plan import StepPlan, StepResult
from quire.execution.executor import LocalExecutor
from quire.execution.worker import Worker
from quire.kernels.reference.kv_cache import as_bytes
from quire.kernels.torch_arrays import to_tensor
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.scheduler import Scheduler

POISON_TOKEN = 3


def poison_blocks(tensor: Array | Tensor, blocks: Sequence[int]) -> None:
    """Fill blocks of a cache with NaN; in 8 bits with bytes that are NaN as scales and in e4m3."""
    tensor = tensor if isinstance(tensor, Tensor) else to_tensor(tensor)
    as_bytes(tensor)[torch.tensor(blocks, dtype=torch.int64)] = -1 if tensor.itemsize == 1 else torch.nan


class Poison:
    """A step worker that poisons the engine of an LLM behind each step; it takes the place of the engine's worker."""

    def __init__(self, llm: LLM) -> None:
        engine = llm._engine.engine
        executor = engine.executor
        assert isinstance(executor, LocalExecutor)
        worker = getattr(executor.worker, "_worker", executor.worker)   # rank 0's own
        assert isinstance(worker, Worker)
        self._scheduler, self._worker = engine.scheduler, worker
        if worker is executor.worker:
            executor.worker = self
        else:
            executor.worker._worker = self  # type: ignore[attr-defined]
        self.num_poisoned_blocks = self.num_poisoned_rows = self.num_poisoned_slots = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step. The blocks and rows that it allocates were poisoned behind the steps before."""
        result = self._worker.execute(plan)
        self.spread()
        return result

    def spread(self) -> None:
        """Poison all that is free now."""
        cache, compute = self._scheduler.cache, self._worker.compute
        self._fill(cache._pool, compute.cache.tensors)
        if compute.swapper is not None:
            self._fill(cache.swap_space._pool, compute.swapper._space)
        if cache.states is not None:
            self._fill_slots(cache.states.slots, compute.cache.states)
            if compute.swapper is not None:
                self._fill_slots(cache.states._swap_slots, compute.swapper._swapped_states)
        self._fill_rows()

    def _fill_slots(self, pool: BlockPool, states: Sequence[Tensor]) -> None:
        """Fill free slots with bytes that are NaN in float32 and in 16 bits."""
        free = [slot for slot in range(pool.num_blocks) if not pool.ref_count(slot)]
        self.num_poisoned_slots += len(free)
        for each in states:
            each[free] = 0xFF

    def _fill(self, pool: BlockPool, tensors: Sequence[Tensor]) -> None:
        free = [block for block in range(pool.num_blocks) if pool.state(block) == "free"]
        self.num_poisoned_blocks += len(free)
        for tensor in tensors:
            poison_blocks(tensor, free)

    def _fill_rows(self) -> None:
        batch, rows = self._worker.compute.batch, self._scheduler.queues.free_rows
        self.num_poisoned_rows += len(rows)
        batch.token_ids[rows] = POISON_TOKEN
        batch.block_tables[rows] = 0
        batch.num_prompt_tokens[rows] = 1
        batch.prompt_logprobs[rows] = 5
        batch.sampling.features[rows] = 0xFFFF
        batch.sampling.settings["temperature"][rows] = torch.nan
        batch.sampling.settings["repetition_penalty"][rows] = torch.nan
        for row in rows:
            batch.sampling.lists[row] = None


def preempt_now_and_then(scheduler: Scheduler, *, stays_away: bool = False) -> None:
    """Take the blocks of the latest arrival at the beginning of every fourth step, whether they are needed or not.

    `stays_away`: it does not return in the same step.
    """
    planner, steps = scheduler.planner, count(1)
    start_step, admit = planner.start_step, planner.admit

    def preempt_latest(step: PlanBuilder) -> None:
        start_step(step)
        planner.admit = admit  # type: ignore[method-assign]
        if next(steps) % 4 == 0 and len(scheduler.queues.running) > 1:
            planner.preempt(step, scheduler.queues.running[-1])
            if stays_away:
                planner.admit = lambda step, budget: None  # type: ignore[method-assign]

    planner.start_step = preempt_latest  # type: ignore[method-assign]
