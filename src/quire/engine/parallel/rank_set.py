"""Rank 0 of tensor parallelism, in the engine's process: starts the other ranks, sends them plans, and watches them.

A set of ranks is composed of what starts their processes (`starters`, `ray_ranks`), of how they exchange activations
(`shared_memory`, `tcp`, `nccl`) and of the device on which they compute (`cpu_ranks`, `gpu_ranks`); `starters` has the
products that are served, too. A rank that has ended is noticed by its socket, one that is stopped by its heartbeats;
from then on every step raises RankLostError.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol, cast

from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.errors import ConfigError, EngineError, RankLostError
from quire.core.host_limits import num_threads
from quire.core.lora import Adapter
from quire.core.options import declared_options
from quire.core.plan import StepPlan, encode
from quire.core.version import __version__
from quire.engine.loading import LoadedModel
from quire.engine.options import EngineOptions
from quire.engine.options.device_options import CpuIsa
from quire.engine.parallel import rank_messages
from quire.engine.parallel.channel import BEAT_INTERVAL_S, OFFER_WAIT_S
from quire.engine.parallel.link import Link, RankedModel, RankExchange
from quire.engine.parallel.peer import Peer, ReportT
from quire.execution.device import Device, StepLimits
from quire.execution.executor import Executor
from quire.execution.worker import StepCompute
from quire.extension.isas import set_threads_of_kernels, usable_isas
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVGeometry
from quire.model.resolve import model_digest, resolve_model
from quire.model.sharding import Shard, check_shardable
from quire.model.spec import DecoderSpec

if TYPE_CHECKING:
    from quire.kernels.triton.triton_low_rank import TritonSlots

log = logging.getLogger(__name__)

SILENCE_SHARE = 0.8      # part of the stall limit after which a rank without heartbeats is lost
# Settings of a machine, which may differ; of the model the digest decides.
OWN_SETTINGS = {
    "model", "tokenizer", "node_rank", "swap_dir", "start_timeout", "node_secret_file", "chat_template",
    "generation_config",
}  # fmt: skip


class Starter(Protocol):
    """Starts the processes of all ranks but this one."""

    def start(
        self, inherited: Sequence[int], check: Callable[[], None], lose: Callable[[EngineError], None]
    ) -> Iterator[Peer]:
        """Yield each rank once there is a channel to it. EngineError if one cannot be started, or does not join.

        `inherited`: descriptors for processes of this machine. `check` raises if a rank was lost meanwhile; `lose` may
        be called later, by any thread.
        """

    def threads_of(self, rank: int) -> int:
        """Return the threads of a rank; 0: as many as it has by its environment."""

    def close(self) -> None:
        """Wait for the processes, and kill those that do not end. Idempotent."""


class Transport(Protocol):
    """Connects the ranks for exchanges of activations."""

    def inherited(self, layout: rank_messages.MemoryLayout) -> AbstractContextManager[Sequence[int]]:
        """Return descriptors for the processes of ranks, open until rank 0's exchange is."""

    def open(self, shard: Shard, peers: Sequence[Peer]) -> RankExchange:
        """Return rank 0's exchange with ranks that have been started; `reset` connects them."""

    def place_of(self, peer: Peer) -> str:
        """Return what a rank needs to find the exchange, as in `rank_messages.Load`."""

    def handles(self, peer: Peer, report: rank_messages.Report) -> bool:
        """Handle a report that comes unasked, in the thread that reads; return whether it was one."""


class RankDevice(Protocol):
    """Operations of rank 0 that differ by the kind of the ranks' devices."""

    kind: Literal["cpu", "cuda"]

    def link(self, ranks: "RankSet") -> Link:
        """Return the link to the other ranks within a step."""

    def check_swap_space(self, geometry: KVGeometry, cache: CacheConfig) -> None:
        """Raise ConfigError if the swap spaces of a machine's ranks are beyond its memory; `geometry`: of rank 0."""

    def executor(self, ranks: "RankSet", compute: StepCompute, max_num_batched_tokens: int) -> Executor:
        """Return the executor of all ranks; rank 0's worker is of this computation."""

    def close(self) -> None:
        """Free what must be freed before the exchange closes. Idempotent."""


class RankSet:
    """All ranks but this one. `open` starts them, `join` and `allocate` bring them up, `close` ends them."""

    def __init__(self, options: EngineOptions, starter: Starter, transport: Transport, device: RankDevice) -> None:
        self.lost: EngineError | None = None
        self.on_lost: Callable[[EngineError], None] = lambda error: None  # called by another thread
        self.on_beat: Callable[[], None] = lambda: None  # likewise, while this process runs
        self.peers: list[Peer] = []
        self._options, self._starter, self._transport, self._device = options, starter, transport, device
        self._num_threads = num_threads()
        self._is_closing, self._losing = threading.Event(), threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._exchange: RankExchange | None = None
        self._own_model: Decoder | None = None

    @property
    def exchange(self) -> RankExchange:
        """The exchanges of this rank, 0."""
        assert self._exchange is not None, "the ranks have not been opened"
        return self._exchange

    @property
    def own_model(self) -> Decoder:
        """Rank 0's part of the model."""
        assert self._own_model is not None, "ranks that have not joined"
        return self._own_model

    def open(self, spec: DecoderSpec, num_positions: int) -> tuple[RankExchange, int]:
        """Start the other ranks, which begin to load; return rank 0 and the number of positions of all."""
        options, num_ranks = self._options, self._options.tensor_parallel_size
        mode = options.tensor_parallel_mode_on(self._device.kind)
        check_shardable(spec, num_ranks, mode)
        self._watcher.start()
        path = resolve_model(options.model, options.model_files, options.revision)
        layout = rank_messages.MemoryLayout.of(spec, options.resolved_max_num_seqs, num_ranks)
        digest = model_digest(path)
        with self._transport.inherited(layout) as inherited:
            for peer in self._starter.start(inherited, self._check, self.lose):
                self._add(peer)
            exchange = self._exchange = self._transport.open(Shard(0, num_ranks, mode), self.peers)
        hellos = [self.receive(peer, rank_messages.Hello) for peer in self.peers]
        for peer, hello in zip(self.peers, hellos, strict=True):
            self._check_hello(peer, hello)
        sent = replace(options, model=str(path), cpu_isa=self._common_isa(hellos), device=self._device.kind)
        for peer in self.peers:
            threads, place = self._starter.threads_of(peer.rank), self._transport.place_of(peer)
            peer.send(rank_messages.Load(sent, peer.rank, num_ranks, threads, num_positions, layout, digest, place))
        set_threads_of_kernels(self._starter.threads_of(0))
        try:
            exchange.reset()
        except RuntimeError as error:
            raise self.lost or error from error
        return exchange, num_positions

    def join(self, loaded: LoadedModel) -> LoadedModel:
        """Wait until all ranks have loaded; return the model of all of them. RankLostError if one has ended."""
        others = [self.receive(peer, rank_messages.Loaded) for peer in self.peers]
        model = loaded.model
        assert isinstance(model, Decoder)
        self._own_model = model
        weight_bytes = model.weight_bytes + sum(other.weight_bytes for other in others)
        return replace(loaded, model=RankedModel(model, self.link(), weight_bytes))

    def kv_bytes(self, device: Device, limits: StepLimits, slots: "TritonSlots | None") -> int:
        """Return the bytes for the KV cache of the rank that has the least. GPUs run the largest step all at once."""
        self.tell(rank_messages.Measure((*limits,)))
        own = device.kv_bytes(self.own_model, limits, slots)
        return min(own, *(self.receive(peer, rank_messages.Measured).kv_bytes for peer in self.peers))

    def allocate(self, cache: CacheConfig, scheduling: SchedulerConfig) -> None:
        """Allocate what rank 0 has on all ranks: their parts of as many blocks. ConfigError if memory is short."""
        self._device.check_swap_space(self.own_model.kv_geometry, cache)
        pools = cache.num_blocks, cache.num_state_slots, cache.num_swap_blocks, cache.num_swap_slots
        self.tell(rank_messages.Allocate(*pools, scheduling.max_num_seqs, scheduling.max_model_len))
        for peer in self.peers:
            self.receive(peer, rank_messages.Allocated)

    def executor(self, compute: StepCompute, max_num_batched_tokens: int) -> Executor:
        """Return the executor of all ranks; rank 0's worker is of this computation."""
        return self._device.executor(self, compute, max_num_batched_tokens)

    def link(self) -> Link:
        """Return the link to the other ranks within a step."""
        return self._device.link(self)

    def load(self, adapter: Adapter) -> Sequence[Future[None]]:
        """Read an adapter on all other ranks, before a step uses it; any thread may. Errors as in `Peer.load`."""
        return [peer.load(adapter) for peer in self.peers]

    def drop(self, digest: str) -> None:
        """Drop an adapter on all other ranks."""
        for peer in self.peers:
            with suppress(RankLostError):  # the next step raises it
                peer.send(rank_messages.DropAdapter(digest))

    def send_plan(self, plan: StepPlan) -> None:
        """Send a plan to all ranks. RankLostError if one is lost."""
        self.tell(rank_messages.Step(encode(plan)))

    def tell(self, command: rank_messages.Command) -> None:
        """Send a command to all ranks. RankLostError if one is lost."""
        self._check()
        for peer in self.peers:
            peer.send(command)

    def receive(self, peer: Peer, kind: type[ReportT]) -> ReportT:
        """Wait for a report. Raises the reason of the rank that was lost first."""
        try:
            return peer.receive(kind)
        except RankLostError as error:
            raise self.lost or error from error

    def lose(self, error: EngineError) -> None:
        """End all ranks, and the step that waits for them. Only the first reason counts."""
        with self._losing:
            if self.lost is not None or self._is_closing.is_set():
                return
            self.lost = error
        log.error("%s; the engine ends", error)
        for peer in self.peers:
            if peer.process is not None:
                peer.process.kill()
        self._end_peers(str(error))
        if self._exchange is not None:
            self._exchange.interrupt()
        self.on_lost(error)

    def close(self, reason: str = "rank 0 was closed") -> None:
        """End the processes and wait for them; kill those that do not end. Idempotent.

        Ranks of other machines get the reason.
        """
        self._device.close()
        self.dismiss(reason)
        self._starter.close()
        if self._watcher.is_alive() and threading.current_thread() is not self._watcher:
            self._watcher.join()
        if self._exchange is not None:
            self._exchange.close()
        set_threads_of_kernels(self._num_threads)

    def dismiss(self, reason: str = "rank 0 was closed") -> None:
        """End the processes without waiting for them."""
        self._is_closing.set()
        self._end_peers(reason)

    def _end_peers(self, reason: str) -> None:
        """End all peers. Those that are being sent something have one time together to let the reason through."""
        until_s = time.monotonic() + OFFER_WAIT_S
        for peer in self.peers:
            peer.end(reason, max(0.0, until_s - time.monotonic()))

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost

    def _add(self, peer: Peer) -> None:
        """Begin to watch a rank."""
        peer.channel.silence_limit_s = SILENCE_SHARE * self._options.stall_limit
        self.peers.append(peer)
        peer.start(lambda peer: self.lose(peer.refusal or peer.lost()), self._transport.handles)

    def _check_hello(self, peer: Peer, hello: rank_messages.Hello) -> None:
        """Raise ConfigError for a rank that cannot be one of this run."""
        if hello.version != __version__:
            raise ConfigError(f"rank {peer.rank} runs Quire {hello.version}, rank 0 runs {__version__}")
        if hello.options is None:  # a process that this one has started
            return
        for each in declared_options(EngineOptions):
            default = each.option.flag_default  # what None means
            theirs, ours = (
                default if (value := getattr(options, each.name)) is None else value
                for options in (hello.options, self._options)
            )
            if each.name not in OWN_SETTINGS and theirs != ours:
                raise ConfigError(f"rank {peer.rank} ({peer.place}) has {each.name} {theirs!r}, rank 0 has {ours!r}")

    def _common_isa(self, hellos: list[rank_messages.Hello]) -> CpuIsa:
        """Return the best instruction set that all ranks have, on CPUs. ConfigError if there is none."""
        asked = self._options.cpu_isa
        if self._device.kind == "cuda":
            return asked
        usable = usable_isas() if asked == "auto" else (asked,)
        common = [isa for isa in usable if all(isa in hello.isas for hello in hellos)]
        if not common:
            raise ConfigError(f"cpu_isa {asked}: not all ranks have it; they have {[each.isas for each in hellos]}")
        return cast(CpuIsa, common[0])

    def _watch(self) -> None:
        """Send heartbeats, and notice ranks that send none, until closed."""
        limit_s = SILENCE_SHARE * self._options.stall_limit
        while not self._is_closing.wait(BEAT_INTERVAL_S):
            self.on_beat()
            for peer in list(self.peers):
                peer.channel.beat()
                if peer.channel.is_silent():
                    self.lose(peer.lost(f"gave no sign for {limit_s:g} s"))
