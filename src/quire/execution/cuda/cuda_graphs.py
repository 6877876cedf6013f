"""CUDA graphs of steps: the launches of a forward pass are replayed as one, without Python per layer.

A graph has a fixed number of rows and of tokens, and block tables of the maximum width: all launches of a step follow
from these sizes. One kind has a token for each row, for decodes; the other has more tokens than rows, for steps with
chunks of prompts or drafts. A smaller step is padded: rows without a sequence, of context length 0, and tokens of slot
-1, which read and write nothing. A size is captured after it was requested a few times, between two steps, one at a
time, so that start-up does not wait, or, with `capture_all`, at start. Steps with adapters have graphs of their own,
and so have steps with plain sampling parameters: theirs draw, too. Of each kind the largest size comes first: its
memory in the graphs' pool serves the smaller ones, too. The sizes can be chosen: `graph_sizes`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.plan import GraphCounts
from quire.execution.batch import StepInputs
from quire.execution.cuda.graph_inputs import IDLE, Draws, InputLayout
from quire.kernels.low_rank import RowAdapters
from quire.kernels.triton.card import launches_early, use_early_launch, without_early_launch
from quire.model.language_model import ForwardBatch

if TYPE_CHECKING:
    from quire.kernels.triton.triton_low_rank import TritonSlots

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, *range(16, 257, 16))  # rows of decodes; larger steps run without a graph
MIXED_ROWS = (8, 32, 256)
MIXED_TOKENS = (16, 32, *range(64, 513, 64))  # beyond, a step computes for longer than its launches take
WANTED_BEFORE_CAPTURE = 4  # steps; a capture takes as long as a few dozen of them

Replay = Callable[[], Tensor]                    # runs the graph, returns its hidden states [tokens, hidden_size]
Capture = Callable[[Callable[[], Tensor]], Replay]


class GraphSize(NamedTuple):
    """Rows and tokens of a graph, and what it computes: with `draws`, the next token of each row, too."""

    num_rows: int
    num_tokens: int
    has_adapters: bool = False
    draws: bool = False

    @property
    def is_mixed(self) -> bool:
        """Return whether rows may have several tokens."""
        return self.num_tokens > self.num_rows

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        """Return what graphs of other sizes have in common with this one."""
        return self.is_mixed, self.has_adapters, self.draws


class Graph(NamedTuple):
    """A captured step, and the memory that it reads its inputs from."""

    layout: InputLayout
    memory: Tensor       # uint8 [layout.num_bytes]
    inputs: ForwardBatch  # lie in `memory`, but for the block tables
    rows: Tensor         # rows of the block tables
    draws: Draws | None
    replay: Replay       # returns the hidden states [num_tokens, hidden_size], or the draws int64 [2, num_rows]

    def fill(self, inputs: StepInputs, settings: NDArray[np.void] | None, idle_row: int) -> None:
        """Replace the inputs, but for the block tables, by those of a step, behind what was launched so far."""
        self.memory.copy_(self.layout.pack(inputs, settings, idle_row, self.memory.device), non_blocking=True)


class GraphSizes(NamedTuple):
    """Sizes that graphs are captured at, ascending; without any, all steps run without a graph."""

    decodes: tuple[int, ...] = SIZES
    mixed: tuple[int, ...] = MIXED_TOKENS  # tokens; of these the ones above `MIXED_ROWS` have graphs

    def size_of(self, num_rows: int, num_tokens: int) -> GraphSize | None:
        """Return the size of the graph for a step; None for a step that runs without one."""
        if num_tokens == num_rows:
            size = next((size for size in self.decodes if size >= num_rows), None)
            return None if size is None else GraphSize(size, size)
        rows = next((rows for rows in MIXED_ROWS if rows >= num_rows), None)
        # more tokens than rows, or the graph would be one of decodes
        tokens = next((size for size in self.mixed if size >= num_tokens and rows is not None and size > rows), None)
        return None if rows is None or tokens is None else GraphSize(rows, tokens)

    def descending(self, max_rows: int, max_tokens: int) -> Iterator[GraphSize]:
        """Yield all that steps of so many rows and tokens can need: decodes, then the others, the largest first."""
        yield from (GraphSize(size, size) for size in reversed(_up_to(self.decodes, max_rows)))
        for num_tokens in reversed(_up_to(self.mixed, max_tokens)):
            for num_rows in reversed(_up_to(MIXED_ROWS, max_rows)):
                if num_rows < num_tokens:
                    yield GraphSize(num_rows, num_tokens)

    def largest(self, max_rows: int) -> list[GraphSize]:
        """Return the largest size of decodes, and that of other steps, as far as there are any."""
        sizes = [*self.descending(max_rows, max(self.mixed, default=0))]
        firsts = (next((size for size in sizes if size.is_mixed == is_mixed), None) for is_mixed in (False, True))
        return [size for size in firsts if size is not None]


USUAL_SIZES, NO_SIZES = GraphSizes(), GraphSizes((), ())


def _up_to(sizes: tuple[int, ...], limit: int) -> list[int]:
    """Return the sizes up to the first one of at least `limit`, ascending."""
    return [size for i, size in enumerate(sizes) if not i or sizes[i - 1] < limit]


def graph_sizes(given: Sequence[int], largest: int | None, max_tokens: int) -> GraphSizes:
    """Return the sizes of graphs: of those given the ones that a step of `max_tokens` can have, or all up to a largest.

    Without either the usual ones.
    """
    if given:
        sizes = tuple(sorted({size for size in given if size <= max_tokens}))
        if max(given) > max_tokens:
            log.warning("graphs are captured at %s tokens: no step has more than %d", [*sizes], max_tokens)
        return GraphSizes(sizes, sizes)
    if largest is None:
        return USUAL_SIZES
    decodes, mixed = (*SIZES[:4], *range(16, largest + 1, 16)), (*MIXED_TOKENS[:2], *range(64, largest + 1, 64))
    return GraphSizes(*(tuple(size for size in sizes if size <= largest) for sizes in (decodes, mixed)))


class CudaGraphRunner:
    """The graphs of one model and cache. `forward` computes a batch; `capture` captures a call as a graph.

    `draw` computes a batch and draws from its logits, int64 [2, num_rows]; None: no graph draws. `idle_row` is the row
    of `Draws` for tokens of no sequence.
    """

    def __init__(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        max_blocks: int,
        device: torch.device,
        capture: Capture,
        max_rows: int = SIZES[-1],
        slots: "TritonSlots | None" = None,
        sizes: GraphSizes = USUAL_SIZES,
        draw: Callable[[ForwardBatch, Draws], Tensor] | None = None,
        idle_row: int = 0,
    ) -> None:
        self._sizes, self._max_rows = sizes, max_rows
        self._largest = {size.is_mixed: size for size in sizes.largest(max_rows)}
        self._forward, self._max_blocks, self._device, self._capture = forward, max_blocks, device, capture
        self._slots, self._draw, self._idle_row = slots, draw, idle_row
        self._graphs: dict[GraphSize, Graph | None] = {}  # None: the capture failed
        self._reasons = dict[GraphSize, str]()  # why captures failed
        self._wanted: Counter[GraphSize] = Counter()
        self._tables: Tensor | None = None  # shared by all graphs: for 131,072 tokens each would take 32 KiB a row

    @property
    def counts(self) -> GraphCounts:
        """Return how many sizes have a graph, and for how many the capture failed."""
        return GraphCounts(len(self._graphs) - len(self._reasons), len(self._reasons))

    def may_draw(self, num_rows: int, num_tokens: int, *, has_adapters: bool) -> bool:
        """Return whether a step of this size has a graph that draws, or gets one once it is requested."""
        size = None if self._draw is None else self._sizes.size_of(num_rows, num_tokens)
        if size is None:
            return False
        size = size._replace(has_adapters=has_adapters, draws=True)
        return size not in self._graphs or self._graphs[size] is not None

    def find(self, step: GraphSize) -> Graph | None:
        """Return the graph for a step of this size, to be filled with its inputs; None without one."""
        size = self._sizes.size_of(step.num_rows, step.num_tokens)
        if size is None:
            return None
        size = size._replace(has_adapters=step.has_adapters, draws=step.draws)
        if size not in self._graphs:
            self._wanted[size] += 1
        return self._graphs.get(size)

    def run(self, batch: ForwardBatch) -> Tensor | None:
        """Return the hidden states [num_tokens, hidden_size] of a batch, valid until the next; None without a graph.

        The batch has the inputs of a graph of `find`, or others in the place of some of them.
        """
        graph = self._graphs.get(GraphSize(len(batch.context_lens), len(batch.token_ids), batch.adapters is not None))
        if graph is None:
            return None
        for own, given in zip(graph.inputs.tensors, batch.tensors, strict=True):
            if own is not given:
                own.copy_(given)
        return graph.replay()

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] of a batch: of a graph, until the next, or computed."""
        hidden = self.run(batch)
        return self._forward(batch) if hidden is None else hidden

    def capture_one(self) -> None:
        """Capture the size that was requested most, if often enough. To be called between steps."""
        wanted = self._wanted.most_common(1)
        if not wanted or wanted[0][1] < WANTED_BEFORE_CAPTURE:
            return
        size = wanted[0][0]
        if not any(size.kind == each.kind for each in self._graphs):
            size = self._largest[size.is_mixed]._replace(has_adapters=size.has_adapters, draws=size.draws)
        self._capture_size(size)

    def capture_all(self, max_tokens: int) -> None:
        """Capture every size that a step of up to `max_tokens` tokens can need, the largest first.

        One line of the log has the number of captures that failed, and the reason of the first.
        """
        for has_adapters in (False,) if self._slots is None else (False, True):
            for size in self._sizes.descending(self._max_rows, max_tokens):
                for draws in (False,) if self._draw is None else (False, True):
                    if (own := size._replace(has_adapters=has_adapters, draws=draws)) not in self._graphs:
                        self._capture_size(own)
        if self._reasons:
            log.warning(
                "%d of %d CUDA graphs could not be captured: their steps run without one, slower; the first failed "
                "with %s", len(self._reasons), len(self._graphs), next(iter(self._reasons.values())),
            )  # fmt: skip

    def _capture_size(self, size: GraphSize) -> None:
        """Capture a size. If that fails, mostly for lack of memory, its steps run without a graph."""
        self._wanted.pop(size, None)
        self._graphs[size] = None
        if self._tables is None:
            max_rows = max(each.num_rows for each in self._largest.values())
            self._tables = torch.zeros(max_rows, self._max_blocks, dtype=torch.int32, device=self._device)
        layout = InputLayout(*size)
        memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self._device)
        slots = self._slots if size.has_adapters else None
        idle = dummy_batch(size.num_rows, size.num_tokens, 0, self._device, slots)
        forward, rows, draws = layout.inputs(memory, idle.adapters)
        inputs = replace(forward, block_tables=self._tables[: size.num_rows])
        for own, values in zip(forward.tensors, idle.tensors, strict=True):
            own.copy_(values)
        if forward.adapters is not None:
            forward.adapters.of_row.fill_(-1)
        if draws is not None:
            draws.settings.copy_(dummy_settings(size.num_rows, self._device))
            draws.rows.fill_(self._idle_row)
        try:
            replay = self._capture(lambda: self._compute(inputs, draws))
            self._graphs[size] = Graph(layout, memory, inputs, rows, draws, replay)
        except RuntimeError as error:
            is_first, self._reasons[size] = not self._reasons, repr(error)
            log.log(  # a fault of the machine fails every capture: its traceback is logged once
                logging.WARNING if is_first else logging.DEBUG, "steps of %d rows and %d tokens run without a graph",
                size.num_rows, size.num_tokens, exc_info=is_first,
            )  # fmt: skip

    def _compute(self, inputs: ForwardBatch, draws: Draws | None) -> Tensor:
        if draws is None:
            return self._forward(inputs)
        assert self._draw is not None
        return self._draw(inputs, draws)


def dummy_batch(
    num_rows: int, num_tokens: int, max_blocks: int, device: torch.device, slots: "TritonSlots | None" = None
) -> ForwardBatch:
    """Return a batch of rows without a sequence: their tokens attend to nothing and write nothing.

    slots: of adapters; None: a batch without adapters.
    """
    adapters = None
    if slots is not None:
        adapters = RowAdapters((), torch.full((num_tokens,), -1, dtype=torch.int32, device=device), slots)
    return ForwardBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        query_starts=torch.linspace(0, num_tokens, num_rows + 1).int().to(device),
        context_lens=torch.zeros(num_rows, dtype=torch.int32, device=device),
        block_tables=torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device),
        adapters=adapters,
    )


def dummy_settings(num_rows: int, device: torch.device) -> Tensor:
    """Return the settings of `Draws` of rows without a sequence."""
    return torch.from_numpy(np.full(num_rows, IDLE).view(np.float64).reshape(-1, 4)).to(device)


class CudaGraphCapture:
    """A `Capture`. All graphs share one memory pool, since they never run at the same time.

    A model's layers contain no random numbers and no synchronization, so they can be captured. A call that fails costs
    its own graph alone. `has_second_try`: where kernels are launched early, a call that cannot be captured is captured
    without that, if it can be, and so are all later ones; not for ranks: their calls have exchanges.
    """

    def __init__(self, *, has_second_try: bool = True) -> None:
        self._pool: Any = None
        self._has_second_try = has_second_try

    def __call__(self, call: Callable[[], Tensor]) -> Replay:
        """Return the graph of a call. The call runs once before, so that its kernels are compiled and tuned.

        Raises RuntimeError if it cannot be captured.
        """
        try:
            return self._captured(call)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not self._has_second_try or not launches_early(torch.device("cuda", torch.cuda.current_device())):
                raise
            reason = error
        with without_early_launch():
            replay = self._captured(call)
        use_early_launch(is_on=False)
        log.warning("kernels are launched early no more: graphs can only be captured without that: %r", reason)
        return replay

    def _captured(self, call: Callable[[], Tensor]) -> Replay:
        call()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream()),  # restored also after a capture that fails
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),  # others may allocate
            ):
                result = call()
        except torch.OutOfMemoryError:
            raise  # it ends a capture as a result does
        except RuntimeError:
            # Where CUDA has invalidated a capture, torch does not end its use of the pool (CUDAGraph.cpp, capture_end),
            # and refuses all later captures with that pool.
            self._pool = None
            raise

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
