"""CUDA graphs without a GPU, by torch's rules for captures that fail (CUDAGraph.cpp and CUDACachingAllocator.cpp).

An illegal call invalidates a capture. Its end then raises before the allocator is told of it, so that the pool stays
in use, and a later capture with that pool is refused.
"""

from collections.abc import Callable
from itertools import count
from types import TracebackType
from typing import Any

import torch


class FakeGraphs:
    """What torch knows of all graphs. `turn_on` puts it in torch's place."""

    def __init__(self) -> None:
        self.num_captures = 0                # begun so far
        self.current: FakeGraph | None = None  # the one being captured
        self.pools_in_use = list[object]()
        self._ids = count(1)

    def turn_on(self, replace_by: Callable[[object, str, object], None]) -> None:
        """Let captures of torch be these."""
        replace_by(torch.cuda, "CUDAGraph", lambda: FakeGraph(self))
        replace_by(torch.cuda, "graph", FakeCapture)
        replace_by(torch.cuda, "graph_pool_handle", lambda: (0, next(self._ids)))
        replace_by(torch.cuda, "is_current_stream_capturing", lambda: self.current is not None)
        replace_by(torch.cuda, "synchronize", self.synchronize)

    def synchronize(self, *_: Any) -> None:  # noqa: ANN401
        """Invalidate the capture, if one is under way: RuntimeError."""
        if self.current is not None:
            self.current.is_valid = False
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


class FakeGraph:
    """Stands in for `torch.cuda.CUDAGraph`; a replay computes nothing."""

    def __init__(self, graphs: FakeGraphs) -> None:
        self.graphs, self.is_valid, self.pool = graphs, True, None

    def capture_begin(self, pool: object) -> None:
        """Begin, unless a capture with this pool has not ended."""
        if pool in self.graphs.pools_in_use:
            raise RuntimeError(f"beginAllocateToPool: already recording to mempool_id {pool}")
        self.graphs.pools_in_use.append(pool)
        self.graphs.num_captures += 1
        self.graphs.current, self.pool = self, pool

    def capture_end(self) -> None:
        """End; of an invalid capture the pool stays in use."""
        self.graphs.current = None
        if not self.is_valid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.graphs.pools_in_use.remove(self.pool)

    def replay(self) -> None:
        """Do nothing."""


class FakeCapture:
    """Stands in for `torch.cuda.graph`."""

    def __init__(self, graph: FakeGraph, pool: object, **_: object) -> None:
        self._graph, self._pool = graph, pool

    def __enter__(self) -> None:
        self._graph.capture_begin(self._pool)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._graph.capture_end()
