"""Moves blocks between the cache and the swap space: one call for each direction of a step, and how long it took."""

import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from quire.core.plan import BlockCopy, StepPlan
from quire.execution.rates import Rate
from quire.model.kv_cache import KVCache

SwapBlocks = Callable[[list[Tensor], list[Tensor], Tensor, Tensor], None]


class Swapper:
    """The swap space's tensors, laid out as the cache's, and the rates of both directions in blocks per second."""

    def __init__(self, cache: KVCache, space: KVCache, swap_blocks: SwapBlocks) -> None:
        self._cache = [*cache.keys, *cache.values]
        self._space = [*space.keys, *space.values]
        self._swap_blocks = swap_blocks
        self.out_rate, self.in_rate = Rate(), Rate()

    def move(self, plan: StepPlan) -> float:
        """Swap out, then in; return the seconds."""
        out_s = self._move(self._cache, self._space, plan.swap_outs, self.out_rate)
        return out_s + self._move(self._space, self._cache, plan.swap_ins, self.in_rate)

    def _move(self, sources: list[Tensor], destinations: list[Tensor], copies: list[BlockCopy], rate: Rate) -> float:
        if not copies:
            return 0.0
        started_s = time.perf_counter()
        src, dst = torch.tensor(copies).unbind(dim=1)
        self._swap_blocks(sources, destinations, src, dst)
        seconds = time.perf_counter() - started_s
        rate.add(len(copies), seconds)
        return seconds


class CudaSwapper(Swapper):
    """The same on a stream of its own, so that the host goes on: a swap begins when what was computed before it is
    there, and what is computed next waits for it. How long it took is known at one of the next calls.
    """

    def __init__(self, cache: KVCache, space: KVCache, swap_blocks: SwapBlocks) -> None:
        super().__init__(cache, space, swap_blocks)
        self._stream = torch.cuda.Stream(cache.keys[0].device)  # type: ignore[no-untyped-call]
        self._timed: deque[tuple[int, Rate, torch.cuda.Event, torch.cuda.Event]] = deque()

    def move(self, plan: StepPlan) -> float:
        """Swap out, then in; return the seconds of those swaps that have ended since the last call."""
        if plan.swap_outs or plan.swap_ins:
            computing = torch.cuda.current_stream(self._stream.device)
            self._stream.wait_stream(computing)
            with torch.cuda.stream(self._stream):
                super().move(plan)
            computing.wait_stream(self._stream)
        seconds = 0.0
        while self._timed and self._timed[0][3].query():  # type: ignore[no-untyped-call]
            count, rate, begin, end = self._timed.popleft()
            rate.add(count, begin.elapsed_time(end) / 1000)
            seconds += begin.elapsed_time(end) / 1000
        return seconds

    def _move(self, sources: list[Tensor], destinations: list[Tensor], copies: list[BlockCopy], rate: Rate) -> float:
        if not copies:
            return 0.0
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        src, dst = torch.tensor(copies).unbind(dim=1)
        begin.record()
        self._swap_blocks(sources, destinations, src, dst)
        end.record()
        self._timed.append((len(copies), rate, begin, end))
        return 0.0
