"""Swapper: block copies between the cache and the swap space, one call per direction and step, with measured rates."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from quire.core.plan import BlockCopy, StepPlan
from quire.execution.rates import Rate
from quire.model.kv_cache import KVCache

CopyBlocks = Callable[[list[Tensor], list[Tensor], Tensor, Tensor], None]


class Swapper:
    """The swap space's tensors, laid out as the cache's, and the rates of both directions in blocks per second."""

    def __init__(self, cache: KVCache, space: KVCache, copy_blocks: CopyBlocks) -> None:
        self._cache, self._space = cache.tensors, space.tensors
        self._copy_blocks = copy_blocks
        self.out_rate, self.in_rate = Rate(), Rate()

    def move(self, plan: StepPlan, slots: Tensor) -> float:
        """Swap out, then in; return the seconds. slots [T]: where the step's forward pass will write."""
        out_s = self._move(self._cache, self._space, plan.swap_outs, self.out_rate)
        return out_s + self._move(self._space, self._cache, plan.swap_ins, self.in_rate)

    def _move(self, sources: list[Tensor], destinations: list[Tensor], copies: list[BlockCopy], rate: Rate) -> float:
        if not copies:
            return 0.0
        started_s = time.perf_counter()
        src, dst = torch.tensor(copies).unbind(dim=1)
        self._copy_blocks(sources, destinations, src, dst)
        seconds = time.perf_counter() - started_s
        rate.add(len(copies), seconds)
        return seconds
