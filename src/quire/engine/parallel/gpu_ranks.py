"""Ranks on GPUs: all launch the same collectives in one order, which rank 0 decides. None of it has run on a card yet.

Commands travel from host to host, ahead of what they are about; token ids and hidden states follow in the stream of the
device. So no host waits for a device, and steps overlap as on one GPU. What all ranks run at once cannot fail on one of
them alone, since a device waits for the others: such an error ends the run.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from quire.core.config import CacheConfig
from quire.core.errors import ConfigError, EngineError, RankLostError
from quire.core.host_limits import free_memory_bytes
from quire.core.plan import GraphCounts, StepPlan, StepResult, decode_plan
from quire.engine.devices import graph_sizes_of
from quire.engine.options import EngineOptions
from quire.engine.parallel import rank_messages
from quire.engine.parallel.channel import Channel
from quire.engine.parallel.link import FORWARD, LOGITS, Link, RankExchange
from quire.engine.parallel.nccl import InterruptedCollectiveError
from quire.engine.parallel.peer import Commands
from quire.engine.parallel.rank_set import RankSet
from quire.execution.cuda.cuda_graphs import CudaGraphRunner, GraphSize, GraphSizes, dummy_batch
from quire.execution.cuda.cuda_memory import pinned_bytes
from quire.execution.cuda.cuda_worker import AsyncCudaExecutor, CudaWorker, StepInFlight, graph_setup
from quire.execution.worker import StepCompute
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVGeometry
from quire.model.language_model import ForwardBatch

log = logging.getLogger(__name__)

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
REASON_TIMEOUT_S = 2.0  # for a rank that has failed to be noticed
POLL_S = 0.05


def check_gpu_ranks(options: EngineOptions, num_gpus: int) -> None:
    """Raise ConfigError for what ranks on GPUs do not serve."""
    num_ranks, mode, attention = options.tensor_parallel_size, options.tensor_parallel_mode, options.attention_backend
    num_local = num_ranks // options.nnodes
    if num_local > num_gpus:
        over = f" over {options.nnodes} nodes" if options.nnodes > 1 else ""
        raise ConfigError(
            f"tensor_parallel_size {num_ranks}{over} needs {num_local} GPUs of a machine, one for each rank, but torch "
            f"sees {num_gpus}; lower it, or use device cpu"
        )
    refused = {
        "distributed_executor_backend 'ray'": options.distributed_executor_backend == "ray",
        f"attention_backend {attention!r}": attention not in ("auto", "triton"),
        "exact True with tensor_parallel_mode 'reduce'": options.exact is True and mode == "reduce",
        f"{BLOCKING_WAIT} in the environment, which graphs cannot contain,": _is_set(BLOCKING_WAIT),
    }  # fmt: skip
    for name, is_asked in refused.items():
        if is_asked:
            raise ConfigError(f"{name} is not supported yet with tensor_parallel_size {num_ranks} on device cuda")


class HostLink(Link):
    """A `Link` with commands that travel from host to host, and rows that follow from device to device."""

    def __init__(self, ranks: RankSet) -> None:
        super().__init__(ranks.exchange)
        self.set = ranks

    def send(self, kind: int, rows: Tensor | None = None) -> None:
        """Send a command, with rows [num_rows, width] of any dtype."""
        assert rows is not None, f"command {kind} without rows"
        self.set.tell(rank_messages.Compute(kind, len(rows)))
        self._ranks.broadcast(rows, rows.shape, rows.dtype)

    @contextmanager
    def computing(self, kind: int, rows: Tensor) -> Iterator[None]:
        """Send a command, and compute here what the other ranks compute then. An error ends the run, as `together`."""
        with self.together():
            self.send(kind, rows)
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run what all ranks run at once: an error of it ends the run, since the others wait for this rank."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, EngineError):
                self.set.lose(self._reason_of(error))
            if isinstance(error, Exception) and self.set.lost is not None:
                raise self.set.lost from error
            raise

    def _reason_of(self, error: BaseException) -> EngineError:
        """Return the reason of a failure here; if another rank is its cause, as soon as that is known."""
        deadline_s = time.monotonic() + REASON_TIMEOUT_S
        while isinstance(error, InterruptedCollectiveError) and time.monotonic() < deadline_s:
            reason = next((peer.refusal for peer in self.set.peers if peer.refusal is not None), self.set.lost)
            if reason is not None:
                return reason
            time.sleep(POLL_S)
        return RankLostError(f"rank 0: a step has failed: {error!r}")


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
        """Run the steps of a size without a graph."""
        self._graphs[size] = None
        self._reasons.setdefault(size, "an error on another rank")

    def clear(self) -> None:
        """Free all graphs; steps run without one from now on."""
        self._graphs = dict.fromkeys(self._graphs)


class LeadingGraphs(RankGraphs):
    """Rank 0's graphs, and forward passes."""

    def __init__(self, link: HostLink, *parts: Any) -> None:  # noqa: ANN401 (as `CudaGraphRunner`)
        super().__init__(*parts)
        self._link = link

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """Return the hidden states of a batch that the other ranks compute, too."""
        with self._link.computing(FORWARD, batch.token_ids[:, None]):
            return super().hidden(batch)

    def _capture_size(self, size: GraphSize) -> None:
        ranks, place = self._link.set, (size.num_rows, size.num_tokens, size.has_adapters)
        with self._link.together():
            ranks.tell(rank_messages.Capture(*place))
            have_all = self.capture(size)
            for peer in ranks.peers:
                have_all &= ranks.receive(peer, rank_messages.Captured).is_captured
            if not have_all:
                ranks.tell(rank_messages.DropGraph(*place))
                self.drop(size)


class LeadingWorker:
    """Rank 0's worker: a `LaunchingWorker` of all ranks."""

    def __init__(self, worker: CudaWorker, ranks: RankSet) -> None:
        self._worker, self._ranks = worker, ranks

    @property
    def graph_counts(self) -> GraphCounts:
        """CUDA graphs that all ranks have, and those that one lacks."""
        return self._worker.graph_counts

    def launch(self, plan: StepPlan) -> StepInFlight:
        """Start a step on all ranks."""
        self._ranks.send_plan(plan)
        return self._worker.launch(plan)

    def complete(self, step: StepInFlight) -> StepResult:
        """Wait for a step. Raises RankLostError if a rank was lost, after which results are not to be used."""
        try:
            result = self._worker.complete(step)
        except Exception as error:
            raise self._ranks.lost or error from error
        if self._ranks.lost is not None:
            raise self._ranks.lost
        return result


class GpuRanks:
    """A `RankDevice` of GPUs: each rank is on the GPU of its number, and this one on the first."""

    kind: Literal["cpu", "cuda"] = "cuda"

    def __init__(self, options: EngineOptions) -> None:
        check_gpu_ranks(options, torch.cuda.device_count())
        torch.cuda.set_device(0)
        self._options = options
        self._graphs: LeadingGraphs | None = None

    def link(self, ranks: RankSet) -> HostLink:
        """Return a link with commands that travel ahead of the rows."""
        return HostLink(ranks)

    def check_swap_space(self, geometry: KVGeometry, cache: CacheConfig) -> None:
        """Raise ConfigError if the swap spaces of a machine's ranks are beyond its memory; `geometry`: of rank 0."""
        num_ranks = self._options.tensor_parallel_size // self._options.nnodes
        swap_bytes = num_ranks * pinned_bytes(geometry.tensor_bytes(cache.num_swap_blocks, cache.block_size))
        if swap_bytes > (free_bytes := free_memory_bytes()):
            raise ConfigError(
                f"the swap spaces of {num_ranks} ranks take {swap_bytes} bytes, but only {free_bytes} are free in the "
                "host's memory; lower swap_space or num_swap_blocks"
            )

    def executor(self, ranks: RankSet, compute: StepCompute, max_num_batched_tokens: int) -> AsyncCudaExecutor:
        """Return the executor of all ranks, with steps in flight as on one GPU."""
        own_forward = partial(ranks.own_model.forward, cache=compute.own_cache)  # the computation's is of all ranks
        setup = graph_setup(compute, graph_sizes_of(self._options, max_num_batched_tokens), has_second_try=False)
        self._graphs = LeadingGraphs(self.link(ranks), own_forward, *setup)
        worker = CudaWorker(compute, graphs=self._graphs)
        if self._options.captures_at_start:
            worker.capture_graphs(max_num_batched_tokens)
        steps_in_flight = 2 if compute.drafter is None else 1
        return AsyncCudaExecutor(LeadingWorker(worker, ranks), max_steps_in_flight=steps_in_flight)

    def close(self) -> None:
        """Free the graphs, which NCCL waits for at its end. Idempotent."""
        if self._graphs is not None:
            self._graphs.clear()


class GpuRank:
    """The rank of another GPU, which launches what rank 0 commands, in its order.

    It has no scheduler, no sampler and no tokens of its own.
    """

    def __init__(
        self, channel: Channel, commands: Commands, exchange: RankExchange, compute: StepCompute, sizes: GraphSizes
    ) -> None:
        assert isinstance(compute.model, Decoder)
        self._channel, self._commands, self._exchange, self._model = channel, commands, exchange, compute.model
        self._graphs = RankGraphs(compute.forward, *graph_setup(compute, sizes, has_second_try=False))
        self._worker = CudaWorker(compute, graphs=self._graphs)
        self._batch: ForwardBatch | None = None  # the step's inputs, on the device

    def run(self) -> NoReturn:
        """Follow commands. A step that fails ends the process, since the other ranks wait for it on their devices."""
        try:
            while True:
                self._follow(self._commands.next())
        except EOFError:
            raise
        except Exception as error:
            log.exception("a step has failed")
            reason = f"a step has failed: {error!r}"[: rank_messages.MAX_REASON_CHARS]
            self._channel.send(rank_messages.Refused(EngineError.__name__, reason))
            os._exit(1)  # what is left on the device may never end

    @torch.inference_mode()
    def _follow(self, command: rank_messages.Command) -> None:
        match command:
            case rank_messages.Step(plan):
                self._batch = self._worker.prepare(decode_plan(plan))
            case rank_messages.Compute(kind, num_rows):
                self._compute(kind, num_rows)
            case rank_messages.Capture(num_rows, num_tokens, has_adapters):
                is_captured = self._graphs.capture(GraphSize(num_rows, num_tokens, has_adapters))
                self._channel.send(rank_messages.Captured(is_captured))
            case rank_messages.DropGraph(num_rows, num_tokens, has_adapters):
                self._graphs.drop(GraphSize(num_rows, num_tokens, has_adapters))
            case _:
                raise AssertionError(f"command {command}")

    def _compute(self, kind: int, num_rows: int) -> None:
        """Launch what rank 0 launches: the forward pass of the step, or the logits of rows."""
        if kind == FORWARD:
            assert self._batch is not None, "a forward pass before a plan"
            tokens = self._exchange.broadcast(None, (num_rows, 1), torch.int64).flatten()
            self._graphs.hidden(replace(self._batch, token_ids=tokens))
            return
        assert kind == LOGITS, f"command {kind}"
        width, dtype = self._model.spec.hidden_size, self._model.dtype
        self._model.head_sums(self._exchange.broadcast(None, (num_rows, width), dtype))


def _is_set(name: str) -> bool:
    """Return whether torch takes a switch of the environment as on."""
    return os.environ.get(name, "").lower() in ("1", "y", "yes", "t", "true")
