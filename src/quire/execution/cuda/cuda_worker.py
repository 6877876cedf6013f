"""CUDA worker: steps are launched and completed in two calls, and the host is free between them.

The token that a step samples stays on the device until the step is completed. A placeholder takes its position in the
batch's row: a negative number that names the row. A later step that computes the token reads it from `_last_tokens` on
the device.

Block tables of all rows are on the device, too: plans change entries of them, and a step gathers its own rows there.
Else each step would send the table of every row, as wide as the widest: 8 MB for 256 rows beside one of 131,072 tokens.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.plan import GraphCounts, StepPlan, StepResult
from quire.decoding.sampler import LOGPROBS, NOT_FINITE, SAMPLED, SCALED, SampledTokens, SamplingBatch, choose
from quire.execution.batch import StepInputs
from quire.execution.cuda.cuda_graphs import (
    NO_SIZES,
    USUAL_SIZES,
    Capture,
    CudaGraphCapture,
    CudaGraphRunner,
    Graph,
    GraphSize,
    GraphSizes,
)
from quire.execution.cuda.graph_inputs import Draws, InputLayout, upload
from quire.execution.worker import StepCompute
from quire.kernels.sampling import SamplingOps, Tokens
from quire.model.language_model import ForwardBatch

if TYPE_CHECKING:
    from quire.kernels.triton.triton_low_rank import TritonSlots


log = logging.getLogger(__name__)


def sample_async(samples: SamplingBatch, logits: Tensor, ops: SamplingOps) -> Tensor:
    """Do what `sample` does without waiting for the device; for samples without logprobs.

    Returns int64 [2, num_samples], where the logits are: the tokens, and whether each has a finite logit.
    """
    wanted = samples.wanted
    assert not wanted & (LOGPROBS | SCALED), "logprobs have to be waited for"
    return _with_soundness(choose(samples, logits, wanted, ops), logits)


def sample_on_device(settings: Tensor, logits: Tensor, ops: SamplingOps) -> Tensor:
    """Do what `sample_async` does, for samples of `device_settings` that are on the device: also in a CUDA graph."""
    return _with_soundness(ops.choose_tokens(logits, settings), logits)


def device_settings(samples: SamplingBatch, ops: SamplingOps) -> NDArray[np.void] | None:
    """Return the settings of samples, SETTINGS [num_samples]; None if one needs more than a draw or an argmax."""
    if samples.wanted & ~SAMPLED:
        return None
    return samples.draws(ops)


def _with_soundness(choice: Tokens, logits: Tensor) -> Tensor:
    tokens = choice if isinstance(choice, Tensor) else torch.from_numpy(choice)
    return torch.stack([tokens, logits.gather(1, tokens[:, None])[:, 0].isfinite()])


def to_sampled_tokens(drawn: Tensor) -> SampledTokens:
    """Return the result of `sample` from that of `sample_async`."""
    token_ids, is_sound = drawn.tolist()
    failures = {} if all(is_sound) else {i: NOT_FINITE for i, sound in enumerate(is_sound) if not sound}
    return SampledTokens(token_ids, None, failures)


class TableEdits(NamedTuple):
    """Entries of tables [num_rows, num_columns]; one that is named twice has the same block both times."""

    places: NDArray[np.int64]  # [num], row * num_columns + column
    blocks: NDArray[np.int32]  # [num]


def table_edits(plan: StepPlan, tables: NDArray[np.int32]) -> TableEdits:
    """Return the entries that a plan changes, with the blocks that the host's tables have after it."""
    whole = [(fork.row, len(fork.block_ids)) for fork in plan.row_forks if fork.row != fork.source]
    whole += [(new.row, len(new.block_ids)) for new in plan.new_rows]
    num_columns = tables.shape[1]
    parts = [np.arange(count, dtype=np.int64) + row * num_columns for row, count in whole]
    parts.append(np.array(plan.table_rows, np.int64) * num_columns + np.array(plan.table_columns, np.int64))
    places = np.concatenate(parts)
    return TableEdits(places, tables.reshape(-1)[places])


class DeviceTables:
    """The tables, int32 [num_rows, num_columns]."""

    @torch.inference_mode()  # as the steps that view them
    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._entries = torch.zeros(shape[0] * shape[1], dtype=torch.int32, device=device)
        self._tables = self._entries.view(shape)

    def edit(self, places: Tensor, blocks: Tensor) -> None:
        """Write `TableEdits` that are on the device, behind all steps launched so far."""
        if len(places):
            self._entries.index_copy_(0, places, blocks)

    def gather(self, rows: Tensor, num_columns: int, whole: Tensor | None = None) -> Tensor:
        """Return the first columns of some rows, [len(rows), num_columns]; they become those of `whole`, if given."""
        out = None if whole is None else whole[:, :num_columns]
        return torch.index_select(self._tables[:, :num_columns], 0, rows, out=out)


class StepInFlight(NamedTuple):
    """A step that was launched; the device may still be running it."""

    inputs: StepInputs
    owners: NDArray[np.int64]         # one per sampled row
    hidden: Tensor                    # [T, hidden]; of a graph that draws, nothing: no row needs them
    sampled: SampledTokens | Tensor   # from `sample_async`, being copied to the host; complete with logprobs
    event: torch.cuda.Event | None    # the copy is complete
    swap_s: float
    started_s: float


class CudaWorker:
    """A worker that launches its steps in order, and completes them in the same order.

    `graphs`: of the forward passes; by default those of `sizes`, of which some draw, too.
    """

    def __init__(
        self, compute: StepCompute, sizes: GraphSizes = USUAL_SIZES, graphs: CudaGraphRunner | None = None
    ) -> None:
        self.compute, batch, device = compute, compute.batch, compute.model.device
        self._idle_row = len(batch.block_tables)
        self._last_tokens = torch.zeros(self._idle_row + 1, dtype=torch.int64, device=device)  # the last: no row
        self._no_hidden = torch.empty(0, device=device)
        self._tables = DeviceTables(batch.block_tables.shape, device)
        self._completed_s = 0.0
        self._graphs = graphs or CudaGraphRunner(
            compute.forward, *graph_setup(compute, sizes), draw=self.draw, idle_row=self._idle_row
        )

    @torch.inference_mode()
    def capture_graphs(self, max_num_batched_tokens: int) -> None:
        """Capture the graphs of all steps now, on a GPU, instead of after some steps that need them."""
        started_s = time.perf_counter()
        self._graphs.capture_all(max_num_batched_tokens)
        if num_captured := self.graph_counts.num_captured:
            log.info("%d CUDA graphs captured in %.1f s", num_captured, time.perf_counter() - started_s)

    @property
    def graph_counts(self) -> GraphCounts:
        """CUDA graphs of steps, so far."""
        return self._graphs.counts

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepInFlight:
        """Start a step without waiting for the device, unless logprobs are asked for."""
        started_s = time.perf_counter()
        compute = self.compute
        inputs, swap_s = compute.prepare(plan, has_tables=False)
        settings = self._settings_of_graph(inputs)
        forward, samples, graph = self._upload(plan, inputs, settings)
        hidden = self._no_hidden
        sampled: SampledTokens | Tensor
        if graph is not None and graph.draws is not None:
            sampled = graph.replay()
        else:
            logit_rows, sample_rows = samples
            forward = self._resolved(forward)
            hidden = self._graphs.hidden(forward) if settings is None else compute.forward(forward)
            if inputs.pooled or self._has_prompt_logprobs(inputs):
                hidden = hidden.clone()  # read when the step is completed, which may be after the next replay
            if inputs.grammars is not None:
                inputs.grammars.finish_masks(self._is_computed())
            sampled = self._start_sampling(inputs, hidden, logit_rows)
            if len(sample_rows):
                ids = sampled[0] if isinstance(sampled, Tensor) else torch.tensor(sampled.token_ids)
                self._last_tokens.index_copy_(0, sample_rows, ids.to(hidden.device))
        event = None
        if isinstance(sampled, Tensor):
            sampled, event = _to_host(sampled)
        owners = self.compute.batch.write_placeholders(inputs)
        self._graphs.capture_one()
        return StepInFlight(inputs, owners, hidden, sampled, event, swap_s, started_s)

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> ForwardBatch:
        """Apply a plan up to its forward pass; return the inputs on the device, for a caller that runs it."""
        inputs, _ = self.compute.prepare(plan, has_tables=False)
        return self._upload(plan, inputs)[0]

    def _resolved(self, batch: ForwardBatch) -> ForwardBatch:
        """Return a batch with its placeholders replaced by what their rows have sampled last."""
        known = batch.token_ids
        references = (-1 - known).clamp_(min=0)
        return replace(batch, token_ids=torch.where(known < 0, self._last_tokens[references], known))

    def draw(self, batch: ForwardBatch, draws: Draws) -> Tensor:
        """Compute a batch and draw the next token of its rows, as `sample_async` does; all on the device."""
        hidden = self.compute.forward(self._resolved(batch))
        if len(hidden) > len(draws.rows):
            hidden = hidden.index_select(0, draws.logit_rows)
        model = self.compute.model
        sampled = sample_on_device(draws.settings, model.logits(hidden), model.back_end.sampling)
        self._last_tokens.index_copy_(0, draws.rows, sampled[0])
        return sampled

    def _settings_of_graph(self, inputs: StepInputs) -> NDArray[np.void] | None:
        """Return the settings of draws that can be part of the step's graph: plain ones, at most one for each row."""
        num_rows, num_tokens, num_samples = len(inputs.rows), len(inputs.forward.token_ids), len(inputs.logit_rows)
        if not 0 < num_samples <= num_rows:
            return None
        if not self._graphs.may_draw(num_rows, num_tokens, has_adapters=inputs.forward.adapters is not None):
            return None
        is_plain = inputs.grammars is None and not inputs.pooled and not self._has_prompt_logprobs(inputs)
        is_of_rows = num_tokens > num_rows or np.array_equal(inputs.logit_rows, np.arange(num_rows))
        if not is_plain or not is_of_rows:
            return None
        return device_settings(self.compute.samples(inputs, slice(None)), self.compute.model.back_end.sampling)

    def _upload(
        self, plan: StepPlan, inputs: StepInputs, settings: NDArray[np.void] | None = None
    ) -> tuple[ForwardBatch, list[Tensor], Graph | None]:
        """Return a step's inputs on the device, padded to its graph if there is one, with the plan's block tables.

        Then `logit_rows` and `sample_rows`, unless the graph draws by `settings`, and the graph.
        """
        batch, device = inputs.forward, self.compute.model.device
        size = GraphSize(len(inputs.rows), len(batch.token_ids), batch.adapters is not None, settings is not None)
        graph = self._graphs.find(size)
        draws = graph is not None and graph.draws is not None
        edits, samples = table_edits(plan, self.compute.batch.block_tables), list[Tensor]()
        if not draws or len(edits.places):
            arrays: tuple[NDArray[Any], ...] = () if draws else (inputs.logit_rows, inputs.sample_rows)
            places, blocks, *samples = upload([*edits, *arrays], device)
            self._tables.edit(places, blocks)
        max_blocks = -(-int(inputs.stops.max()) // self.compute.batch.block_size)
        if graph is not None:
            graph.fill(inputs, settings, self._idle_row)
            self._tables.gather(graph.rows, max_blocks, graph.inputs.block_tables)
            return graph.inputs, samples, graph
        layout = InputLayout(*size[:2], size.has_adapters)
        packed = layout.pack(inputs, None, self._idle_row, device)
        forward, rows, _ = layout.inputs(packed.to(device, non_blocking=True), batch.adapters)
        return replace(forward, block_tables=self._tables.gather(rows, max_blocks)), samples, None

    @torch.inference_mode()
    def complete(self, step: StepInFlight) -> StepResult:
        """Wait for a step, replace its placeholders by its tokens, and return the result."""
        if step.event is not None:
            step.event.synchronize()
        sampled = step.sampled
        if isinstance(sampled, Tensor):  # a graph draws for rows of no sequence, too
            sampled = to_sampled_tokens(sampled[:, : len(step.inputs.sample_rows)])
        self.compute.batch.record(step.inputs, sampled.token_ids, step.owners)
        before_s, self._completed_s = self._completed_s, time.perf_counter()
        result = self.compute.result(step.inputs, step.hidden, sampled, step.swap_s)
        return self.compute.timed(result, step.inputs, self._completed_s - max(before_s, step.started_s))

    def _is_computed(self) -> Callable[[], bool]:
        """Return whether the device has done what was launched so far, as a function."""
        if self.compute.model.device.type != "cuda":
            return lambda: True
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.query

    def _has_prompt_logprobs(self, inputs: StepInputs) -> bool:
        asks = self.compute.batch.scores_prompt[inputs.rows]
        if not asks.any():
            return False
        return bool((asks & (inputs.starts < self.compute.batch.num_prompt_tokens[inputs.rows] - 1)).any())

    def _start_sampling(self, inputs: StepInputs, hidden: Tensor, logit_rows: Tensor) -> SampledTokens | Tensor:
        """Sample without waiting, unless a row asks for logprobs or the samples have to be drawn one by one."""
        if not len(inputs.sample_rows):
            return SampledTokens([], None)
        if (self.compute.batch.sampling.features[inputs.sample_rows] & LOGPROBS).any():
            return self.compute.sample(inputs, hidden, logit_rows)
        try:
            samples, model = self.compute.samples(inputs, slice(None)), self.compute.model
            return sample_async(samples, model.logits(hidden[logit_rows]), model.back_end.sampling)
        except Exception:
            log.exception("sampling of a step failed; its samples are drawn again")
        return self.compute.sample(inputs, hidden, logit_rows)


def graph_setup(
    compute: StepCompute, sizes: GraphSizes, *, has_second_try: bool = True
) -> tuple[int, torch.device, Capture, int, "TritonSlots | None", GraphSizes]:
    """Return the arguments of a `CudaGraphRunner` behind the first, for what a computation's device can capture."""
    capture = CudaGraphCapture(has_second_try=has_second_try)
    model, (num_rows, max_blocks) = compute.model, compute.batch.block_tables.shape
    slots = None if compute.adapters is None else compute.adapters.slots
    is_captured = model.device.type == "cuda" and model.back_end.is_capturable
    return max_blocks, model.device, capture, num_rows, slots, sizes if is_captured else NO_SIZES


def _to_host(sampled: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Begin to copy results, which the next step may overwrite, to the host; the event: the copy is complete."""
    if not sampled.is_cuda:
        return sampled.clone(), None
    copy = torch.empty_like(sampled, device="cpu", pin_memory=True).copy_(sampled, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return copy, event


class LaunchingWorker(Protocol):
    """A worker that launches its steps in order, and completes them in the same order."""

    @property
    def graph_counts(self) -> GraphCounts:
        """CUDA graphs of steps, so far."""

    def launch(self, plan: StepPlan) -> StepInFlight:
        """Start a step."""

    def complete(self, step: StepInFlight) -> StepResult:
        """Wait for a step, and return its result."""


class AsyncCudaExecutor:
    """One worker in this process. A step is launched when it is submitted.

    `max_steps_in_flight` 1: for a worker with a drafter, because the next plan contains its drafts.
    """

    def __init__(self, worker: LaunchingWorker, max_steps_in_flight: int = 2) -> None:
        self.worker, self.max_steps_in_flight = worker, max_steps_in_flight
        self._steps = deque[StepInFlight]()

    @property
    def graphs(self) -> GraphCounts:
        """CUDA graphs of steps, so far."""
        return self.worker.graph_counts

    def submit(self, plan: StepPlan) -> None:
        assert len(self._steps) < self.max_steps_in_flight, "too many steps in flight"
        self._steps.append(self.worker.launch(plan))

    def collect(self) -> StepResult:
        """Wait for the oldest step, and return its result."""
        return self.worker.complete(self._steps.popleft())
