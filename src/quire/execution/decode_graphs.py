"""CUDA graphs of decode steps: where everybody advances by one token, a step's launches are replayed as one.

A graph is of one size: so many rows, the tables as wide as a sequence can be. A smaller batch is padded with rows of no
sequence, whose context is 0 and whose slot is -1: they read nothing and write nothing. A size is captured when it has
been wanted a few times, between two steps, one at a time, so that starting up waits for none and none is made in vain.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from quire.model.batch import ForwardBatch

SIZES = (1, 2, 4, 8, *range(16, 257, 16))  # rows; above the last, steps run as they are
WANTED_BEFORE_CAPTURE = 4  # steps; a capture takes about as long as a few dozen of them

Replay = Callable[[], Tensor]                    # runs the graph, returns its hidden states [rows, hidden_size]
Capture = Callable[[Callable[[], Tensor]], Replay]


class DecodeGraphs:
    """The graphs of one model and cache. `forward` computes a batch; `capture` makes a graph of a call."""

    def __init__(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        max_blocks: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._forward, self._max_blocks, self._device, self._capture = forward, max_blocks, device, capture
        self._graphs: dict[int, tuple[ForwardBatch, Replay]] = {}
        self._wanted: Counter[int] = Counter()

    def run(self, batch: ForwardBatch) -> Tensor | None:
        """Return the hidden states [num_tokens, hidden_size] of a step, good until the next; None without a graph."""
        num_rows = len(batch.context_lens)
        size = next((size for size in SIZES if size >= num_rows), None)
        if size is None or len(batch.token_ids) > num_rows:
            return None
        if size not in self._graphs:
            self._wanted[size] += 1
            return None
        inputs, replay = self._graphs[size]
        _fill(inputs, batch, num_rows)
        return replay()[:num_rows]

    def capture_one(self) -> None:
        """Make the graph that has been wanted most, if one has been wanted often enough. For the time between steps."""
        size, count = next(iter(self._wanted.most_common(1)), (0, 0))
        if count >= WANTED_BEFORE_CAPTURE:
            del self._wanted[size]
            inputs = _empty(size, self._max_blocks, self._device)
            self._graphs[size] = inputs, self._capture(lambda: self._forward(inputs))


def _empty(size: int, max_blocks: int, device: torch.device) -> ForwardBatch:
    """Return a batch of `size` rows of no sequence."""
    return ForwardBatch(
        token_ids=torch.zeros(size, dtype=torch.int64, device=device),
        positions=torch.zeros(size, dtype=torch.int64, device=device),
        slot_mapping=torch.full((size,), -1, dtype=torch.int64, device=device),
        query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
        context_lens=torch.zeros(size, dtype=torch.int32, device=device),
        block_tables=torch.zeros(size, max_blocks, dtype=torch.int32, device=device),
    )


def _fill(inputs: ForwardBatch, batch: ForwardBatch, num_rows: int) -> None:
    """Put a step into the first rows of a graph's inputs, and nothing into the others."""
    inputs.slot_mapping[num_rows:].fill_(-1)
    inputs.context_lens[num_rows:].zero_()
    inputs.token_ids[:num_rows].copy_(batch.token_ids)
    inputs.positions[:num_rows].copy_(batch.positions)
    inputs.slot_mapping[:num_rows].copy_(batch.slot_mapping)
    inputs.context_lens[:num_rows].copy_(batch.context_lens)
    inputs.block_tables[:num_rows, : batch.block_tables.shape[1]].copy_(batch.block_tables)


class CudaGraphs:
    """A `Capture`. All graphs draw on one pool of memory, for they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], Tensor]) -> Replay:
        """Return the graph of a call, which runs once before: what it needs is compiled and chosen then."""
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = call()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
