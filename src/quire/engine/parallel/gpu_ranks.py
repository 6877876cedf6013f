"""Rank 0 of tensor parallelism on GPUs: the door of this room.

As on CPUs rank 0 is in the engine's process, and the others are processes that it watches. What all ranks run at once
cannot fail on one of them alone, since a device waits for the others: such an error ends the run.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.errors import ConfigError, EngineError, RankLostError
from quire.core.host_memory import free_memory_bytes
from quire.engine.devices import graph_sizes_of
from quire.engine.options import EngineOptions
from quire.engine.parallel import messages
from quire.engine.parallel.gpu_worker import LeadingWorker
from quire.engine.parallel.link import Link, RankExchange
from quire.engine.parallel.nccl import GpuRanks, file_store
from quire.engine.parallel.rank_set import RankedModel, RankSet
from quire.engine.parallel.shared_memory import MemoryLayout
from quire.execution.cuda.cuda_graphs import GraphSize
from quire.execution.cuda.cuda_memory import pinned_bytes
from quire.execution.cuda.cuda_worker import AsyncCudaExecutor
from quire.execution.device import Device, StepLimits, WorkerParts
from quire.kernels.cpp.gather import InterruptedExchangeError
from quire.kernels.low_rank import AdapterSlots
from quire.model.kv_geometry import KVGeometry
from quire.model.sharding import Shard

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


def check_swap_space(geometry: KVGeometry, cache: CacheConfig, num_ranks: int) -> None:
    """Raise ConfigError if the swap spaces of a machine's ranks are beyond its free memory; `geometry`: of rank 0."""
    swap_bytes = num_ranks * pinned_bytes(geometry.tensor_bytes(cache.num_swap_blocks * cache.block_size))
    if swap_bytes > (free_bytes := free_memory_bytes()):
        raise ConfigError(
            f"the swap spaces of {num_ranks} ranks take {swap_bytes} bytes, but only {free_bytes} are free in the "
            "host's memory; lower swap_space or num_swap_blocks"
        )


class HostLink(Link):
    """A `Link` whose commands travel from host to host, and whose rows follow from device to device."""

    def __init__(self, ranks: RankExchange, set_: "GpuRankSet") -> None:
        super().__init__(ranks)
        self._set = set_

    def send(self, kind: int, rows: Tensor | None = None) -> None:
        """Send a command, with rows [num_rows, width] of any dtype."""
        assert rows is not None, f"command {kind} without rows"
        self._set.tell(messages.Compute(kind, len(rows)))
        self._ranks.broadcast(rows, rows.shape, rows.dtype)


class GpuRankSet(RankSet):
    """All ranks but this one, each on the GPU of its number; this one is on the first."""

    device_type = "cuda"
    rank_module = "quire.engine.parallel.gpu_process"

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        torch.cuda.set_device(0)
        self._worker: LeadingWorker | None = None

    def kv_bytes(self, device: Device, limits: StepLimits, slots: AdapterSlots | None) -> int:
        """Return the bytes for the KV cache of the GPU that has the least; all of them run the largest step."""
        assert self.own_model is not None, "ranks that have not joined"
        self.tell(messages.Measure((*limits,)))
        own = device.kv_bytes(self.own_model, limits, slots)
        return min(own, *(self._receive(peer, messages.Measured).kv_bytes for peer in self.peers))

    def allocate(self, cache: CacheConfig, scheduling: SchedulerConfig) -> None:
        """Let all ranks allocate. ConfigError if the swap spaces of this machine are beyond its free memory."""
        assert self.own_model is not None, "ranks that have not joined"
        check_swap_space(self.own_model.kv_geometry, cache, self._num_ranks // self._options.nnodes)
        super().allocate(cache, scheduling)

    def executor(self, parts: WorkerParts, max_num_batched_tokens: int) -> AsyncCudaExecutor:
        """Return the executor of all ranks, with steps in flight as on one GPU."""
        assert self.own_model is not None, "ranks that have not joined"
        self._worker = LeadingWorker(self, self.link(), self.own_model, parts, graph_sizes_of(self._options))
        if self._options.capture_graphs:
            self._worker.capture_graphs(max_num_batched_tokens)
        return AsyncCudaExecutor(self._worker, max_steps_in_flight=2 if parts.drafter is None else 1)

    def link(self) -> Link:
        """Return the link to the other ranks."""
        return HostLink(self.exchange, self)

    def tell(self, command: messages.Command) -> None:
        """Send a command to all ranks. RankLostError if one is lost."""
        if self.lost is not None:
            raise self.lost
        for peer in self.peers:
            peer.send(command)

    def capture_graph(self, size: GraphSize) -> None:
        """Let the ranks capture the graph of a size."""
        self.tell(messages.Capture(size.num_rows, size.num_tokens, size.has_adapters))

    def have_captured(self) -> bool:
        """Wait for all of them; return whether each has the graph."""
        reports = [self._receive(peer, messages.Captured) for peer in self.peers]
        return all(report.is_captured for report in reports)

    def drop_graph(self, size: GraphSize) -> None:
        """Let the ranks drop the graph of a size."""
        self.tell(messages.DropGraph(size.num_rows, size.num_tokens, size.has_adapters))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run what all ranks run at once: an error of it ends the run, since the others wait for this rank."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, EngineError):
                self._lose(self._reason_of(error))
            if isinstance(error, Exception) and self.lost is not None:
                raise self.lost from error
            raise

    def _reason_of(self, error: BaseException) -> EngineError:
        """Return the reason of a failure here; if another rank is its cause, as soon as that is known."""
        deadline_s = time.monotonic() + REASON_TIMEOUT_S
        while isinstance(error, InterruptedExchangeError) and time.monotonic() < deadline_s:
            reason = next((peer.refusal for peer in self.peers if peer.refusal is not None), self.lost)
            if reason is not None:
                return reason
            time.sleep(POLL_S)
        return RankLostError(f"rank 0: a step has failed: {error!r}")

    def close(self, reason: str = "rank 0 was closed") -> None:
        """End the processes as on CPUs. Idempotent."""
        if self._worker is not None:
            self._worker.drop_graphs()
        super().close(reason)

    def _open_exchange(self, layout: MemoryLayout) -> RankExchange:
        """Start the processes of the ranks, and return rank 0's exchanges with them."""
        book = os.memfd_create("quire-address-book")
        try:
            self._exchange = self._ranks_by(file_store(book, self._num_ranks))
            self._start_processes(range(1, self._num_ranks), book)
        finally:
            os.close(book)
        return self._exchange

    def _ranks_by(self, open_store: Callable[[], Store]) -> GpuRanks:
        """Return rank 0's exchanges, by an address book."""
        return GpuRanks(Shard(0, self._num_ranks, self._mode), torch.device("cuda", 0), open_store)

    def _ranked_model(self, weight_bytes: int) -> RankedModel:
        return GpuRankedModel(self, weight_bytes)


class GpuRankedModel(RankedModel):
    """The `LanguageModel` of all ranks of GPUs. `LeadingWorker` runs its forward passes."""

    def __init__(self, ranks: GpuRankSet, weight_bytes: int) -> None:
        assert ranks.own_model is not None, "ranks that have not joined"
        super().__init__(ranks.own_model, ranks.link(), weight_bytes)
        self._ranks = ranks

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [num_rows, vocab_size]."""
        with self._ranks.together():
            return super().logits(hidden)


def _is_set(name: str) -> bool:
    """Return whether torch takes a switch of the environment as on."""
    return os.environ.get(name, "").lower() in ("1", "y", "yes", "t", "true")
