"""CUDA graphs of decode steps: if every row advances by one token, the launches of a step are replayed as one.

A graph has a fixed number of rows and block tables of the maximum width. A smaller batch is padded with rows without a
sequence, of context length 0 and slot -1, which read and write nothing. A size is captured after it was requested a few
times, between two steps, one at a time, so that start-up does not wait. The largest size of the engine comes first: its
memory in the graphs' pool serves the smaller ones, too.
"""

import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from quire.model.batch import ForwardBatch

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, *range(16, 257, 16))  # rows; larger steps run without a graph
WANTED_BEFORE_CAPTURE = 4  # steps; a capture takes as long as a few dozen of them

Replay = Callable[[], Tensor]                    # runs the graph, returns its hidden states [rows, hidden_size]
Capture = Callable[[Callable[[], Tensor]], Replay]


class CudaGraphRunner:
    """The graphs of one model and cache. `forward` computes a batch; `capture` captures a call as a graph."""

    def __init__(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        max_blocks: int,
        device: torch.device,
        capture: Capture,
        max_rows: int = SIZES[-1],
    ) -> None:
        self._largest = next((size for size in SIZES if size >= max_rows), SIZES[-1])
        self._forward, self._max_blocks, self._device, self._capture = forward, max_blocks, device, capture
        self._graphs: dict[int, tuple[ForwardBatch, Replay] | None] = {}  # None: the capture failed
        self._wanted: Counter[int] = Counter()

    def run(self, batch: ForwardBatch) -> Tensor | None:
        """Return the hidden states [num_tokens, hidden_size] of a step, valid until the next; None without a graph."""
        num_rows = len(batch.context_lens)
        size = next((size for size in SIZES if size >= num_rows), None)
        if size is None or len(batch.token_ids) > num_rows:
            return None
        if size not in self._graphs:
            self._wanted[size] += 1
        graph = self._graphs.get(size)
        if graph is None:
            return None
        inputs, replay = graph
        _fill(inputs, batch, num_rows)
        return replay()[:num_rows]

    def capture_one(self) -> None:
        """Capture the size that was requested most, if often enough. To be called between steps.

        If that fails, mostly for lack of memory, steps of this size run without a graph.
        """
        size, count = next(iter(self._wanted.most_common(1)), (0, 0))
        if count < WANTED_BEFORE_CAPTURE:
            return
        if not self._graphs:
            size = self._largest
        self._wanted.pop(size, None)
        self._graphs[size] = None
        inputs = dummy_batch(size, size, self._max_blocks, self._device)
        try:
            self._graphs[size] = inputs, self._capture(lambda: self._forward(inputs))
        except RuntimeError:
            log.exception("decodes of %d rows run without a graph", size)


def dummy_batch(num_rows: int, num_tokens: int, max_blocks: int, device: torch.device) -> ForwardBatch:
    """Return a batch of rows without a sequence: their tokens attend to nothing and write nothing."""
    return ForwardBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        query_starts=torch.linspace(0, num_tokens, num_rows + 1).int().to(device),
        context_lens=torch.zeros(num_rows, dtype=torch.int32, device=device),
        block_tables=torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device),
    )


def _fill(inputs: ForwardBatch, batch: ForwardBatch, num_rows: int) -> None:
    """Copy a step into the first rows of a graph's inputs; pad the rest with rows without a sequence."""
    inputs.slot_mapping[num_rows:].fill_(-1)
    inputs.context_lens[num_rows:].zero_()
    for name in ("token_ids", "positions", "slot_mapping", "context_lens"):
        getattr(inputs, name)[:num_rows].copy_(getattr(batch, name))
    inputs.block_tables[:num_rows, : batch.block_tables.shape[1]].copy_(batch.block_tables)


class CudaGraphCapture:
    """A `Capture`. All graphs share one memory pool, since they never run at the same time.

    A model's layers contain no random numbers and no synchronization, so they can be captured.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], Tensor]) -> Replay:
        """Return the graph of a call. The call runs once before, so that its kernels are compiled and tuned."""
        call()
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.stream(torch.cuda.current_stream()),  # restored also after a capture that fails
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),  # other threads may allocate
        ):
            result = call()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
