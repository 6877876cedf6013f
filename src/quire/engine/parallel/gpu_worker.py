"""Workers of the ranks of GPUs. All launch the same collectives in one order, which rank 0 decides.

Commands travel from host to host, ahead of what they are about; token ids and hidden states follow in the stream of the
device. So no host waits for a device, and steps overlap as on one GPU.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.core.errors import EngineError
from quire.core.plan import StepPlan, StepResult
from quire.engine.parallel.link import FORWARD, LOGITS, Link, RankExchange
from quire.execution.cuda.cuda_graphs import CudaGraphRunner, GraphSize, GraphSizes, dummy_batch
from quire.execution.cuda.cuda_worker import CudaWorker, StepInFlight
from quire.execution.device import WorkerParts
from quire.model.decoder import Decoder
from quire.model.language_model import ForwardBatch


class Followers(Protocol):
    """The other ranks, as rank 0's worker knows them."""

    lost: EngineError | None

    def send_plan(self, plan: StepPlan) -> None:
        """Let the ranks prepare a step. RankLostError if one is lost."""

    def capture_graph(self, size: GraphSize) -> None:
        """Let the ranks capture the graph of a size."""

    def have_captured(self) -> bool:
        """Wait for all of them; return whether each has the graph."""

    def drop_graph(self, size: GraphSize) -> None:
        """Let the ranks drop the graph of a size."""

    def together(self) -> AbstractContextManager[None]:
        """Run what all ranks run at once: an error of it ends the run, since the others wait for this rank."""


class RankGraphs(CudaGraphRunner):
    """The graphs of a rank, each of which all ranks capture, or drop, at the same place of their streams."""

    def capture(self, size: GraphSize) -> bool:
        """Capture a size, with the other ranks; return whether this one has it.

        The pass before the capture contains exchanges: an error of it is raised, since the other ranks wait.
        """
        slots = self._slots if size.has_adapters else None
        self._forward(dummy_batch(size.num_rows, size.num_tokens, self._max_blocks, self._device, slots))
        CudaGraphRunner._capture_size(self, size)
        return self._graphs[size] is not None

    def drop(self, size: GraphSize) -> None:
        """Let the steps of a size run without a graph."""
        self._graphs[size] = None

    def clear(self) -> None:
        """Free all graphs; steps run without one from now on."""
        self._graphs = dict.fromkeys(self._graphs)


class LeadingGraphs(RankGraphs):
    """Rank 0's graphs."""

    def __init__(self, ranks: Followers, *parts: Any) -> None:  # noqa: ANN401 (of `CudaGraphRunner`)
        super().__init__(*parts)
        self._ranks = ranks

    def _capture_size(self, size: GraphSize) -> None:
        with self._ranks.together():
            self._ranks.capture_graph(size)
            has_own = self.capture(size)
            if not self._ranks.have_captured() or not has_own:
                self._ranks.drop_graph(size)
                self.drop(size)


class LeadingWorker(CudaWorker):
    """Rank 0's worker. `own_model`: its part of the model, while that of `parts` is of all ranks."""

    _graphs: LeadingGraphs | None

    def __init__(
        self, ranks: Followers, link: Link, own_model: Decoder, parts: WorkerParts, sizes: GraphSizes
    ) -> None:
        self._ranks, self._link, self._own_model = ranks, link, own_model
        super().__init__(*parts, sizes)

    def _make_graphs(self, *parts: Any) -> LeadingGraphs:  # noqa: ANN401 (of `CudaGraphRunner`)
        return LeadingGraphs(self._ranks, *parts)

    def launch(self, plan: StepPlan) -> StepInFlight:
        """Start a step on all ranks."""
        self._ranks.send_plan(plan)
        return super().launch(plan)

    def complete(self, step: StepInFlight) -> StepResult:
        """Wait for a step. Raises RankLostError if a rank was lost, after which results are not to be used."""
        try:
            result = super().complete(step)
        except Exception as error:
            raise self._ranks.lost or error from error
        if self._ranks.lost is not None:
            raise self._ranks.lost
        return result

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return the hidden states of a batch that the other ranks compute, too."""
        return self._own_model.forward(batch, self._own_cache)

    def drop_graphs(self) -> None:
        """Free the graphs, which NCCL waits for at its end."""
        if self._graphs is not None:
            self._graphs.clear()

    def _hidden(self, batch: ForwardBatch) -> Tensor:
        with self._ranks.together():
            self._link.send(FORWARD, batch.token_ids[:, None])
            return super()._hidden(batch)


class FollowingWorker(CudaWorker):
    """The worker of another rank: runs plans without a scheduler, a sampler and tokens of its own."""

    _graphs: RankGraphs | None

    def __init__(self, ranks: RankExchange, own_model: Decoder, parts: WorkerParts, sizes: GraphSizes) -> None:
        self._ranks, self._own_model = ranks, own_model
        super().__init__(*parts, sizes)
        self._batch_on_device: ForwardBatch | None = None

    def _make_graphs(self, *parts: Any) -> RankGraphs:  # noqa: ANN401 (of `CudaGraphRunner`)
        return RankGraphs(*parts)

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> None:
        """Apply a plan up to its forward pass: changes of rows, swaps, block copies, inputs."""
        inputs, _ = self._prepare(plan)
        self._batch_on_device = self._upload(plan, inputs)[0]

    @torch.inference_mode()
    def compute(self, kind: int, num_rows: int) -> None:
        """Launch what rank 0 launches: the forward pass of the step, or the logits of rows."""
        if kind == FORWARD:
            assert self._batch_on_device is not None, "a forward pass before a plan"
            tokens = self._ranks.broadcast(None, (num_rows, 1), torch.int64).flatten()
            self._hidden(replace(self._batch_on_device, token_ids=tokens))
            return
        assert kind == LOGITS, f"command {kind}"
        width, dtype = self._own_model.spec.hidden_size, self._own_model.dtype
        self._own_model.head_sums(self._ranks.broadcast(None, (num_rows, width), dtype))

    @torch.inference_mode()
    def capture(self, size: GraphSize) -> bool:
        """Capture the graph of a size, as all ranks do; return whether this one has it."""
        return self._graphs is not None and self._graphs.capture(size)

    def drop(self, size: GraphSize) -> None:
        """Drop the graph of a size."""
        if self._graphs is not None:
            self._graphs.drop(size)
