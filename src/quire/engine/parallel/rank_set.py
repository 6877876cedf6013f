"""Rank 0 of tensor parallelism, in the engine's process: starts the other ranks, sends them plans, and watches them.

A rank that has ended is noticed by its socket, one that is stopped by its heartbeats; from then on every step raises
RankLostError. A step that fails on any rank fails on all, and the next one begins with all of them: the engine isolates
the request that is the cause, as with one rank.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor

from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.errors import ConfigError, EngineError, ModelError, RankLostError
from quire.core.lora import Adapter
from quire.core.plan import StepPlan, StepResult, encode
from quire.core.version import __version__
from quire.engine.launcher import SPINS, start_module
from quire.engine.loading import LoadedModel
from quire.engine.options import CpuIsa, EngineOptions
from quire.engine.parallel import messages
from quire.engine.parallel.channel import BEAT_INTERVAL_S, Channel
from quire.engine.parallel.digest import model_digest
from quire.engine.parallel.link import END, FORWARD, LOGITS, Link, RankExchange
from quire.engine.parallel.shared_memory import MemoryLayout, SharedRanks, create_memory
from quire.execution.device import Device, StepLimits, WorkerParts
from quire.execution.executor import Executor, LocalExecutor, StepWorker
from quire.execution.worker import Worker
from quire.kernels.cpp.back_end import usable_isas
from quire.kernels.cpp.gather import InterruptedExchangeError
from quire.kernels.low_rank import AdapterSlots
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.model.resolve import resolve_model
from quire.model.sharding import Shard, check_shardable
from quire.model.spec import DecoderSpec
from quire.model.weight_counts import num_parameters

log = logging.getLogger(__name__)

SILENCE_SHARE = 0.8      # of the stall limit, after which a rank without heartbeats is lost
CLOSE_TIMEOUT_S = 3.0

ReportT = TypeVar(
    "ReportT", messages.Hello, messages.Loaded, messages.Measured, messages.Allocated, messages.Captured,
    messages.Stopped,
)  # fmt: skip


class Process(Protocol):
    """A rank's process, as of `subprocess.Popen`."""

    pid: int

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end."""

    def kill(self) -> None:
        """End it."""


class Peer:
    """Another rank: the channel to it, and its process if that is a child of this one. `place`: of the process."""

    def __init__(self, rank: int, channel: Channel, process: Process | None, place: str) -> None:
        self.rank, self.channel, self.process, self.place = rank, channel, process, place
        self.refusal: EngineError | None = None  # the rank's reason to end
        self._reads = dict[str, Future[None]]()  # of adapters, by digests
        self._has_ended = False

    def start(
        self, on_end: Callable[["Peer"], None], handles: Callable[[messages.Report], bool] = lambda report: False
    ) -> None:
        """Start to read its reports; `on_end` is called when it has ended. `handles` as of `Channel.start`."""

        def end() -> None:
            self._has_ended = True
            self._give_up_reads()
            on_end(self)

        self.channel.start(end, lambda report: self._notes(report) or handles(report))

    def send(self, command: messages.Command) -> None:
        """Send a command. RankLostError if the rank has ended."""
        try:
            self.channel.send(command)
        except OSError as error:
            raise self.lost() from error

    def load(self, adapter: Adapter) -> Future[None]:
        """Let the rank read an adapter, unless it has it. The future's error is a ModelError, or that it has ended."""
        read = self._reads[adapter.digest] = Future()
        with suppress(RankLostError):  # the next step raises it
            self.send(messages.LoadAdapter(adapter.digest, str(Path(adapter.folder).absolute())))
        if self._has_ended:
            self._give_up_reads()
        return read

    def receive(self, kind: type[ReportT]) -> ReportT:
        """Wait for a report of this kind. RankLostError if the rank has ended."""
        try:
            report = self.channel.receive()
        except EOFError as error:
            raise self.lost() from error
        assert isinstance(report, kind), f"expected {kind.__name__} of rank {self.rank}, got {report}"
        return report

    def lost(self, reason: str = "has ended") -> RankLostError:
        """Return the error of a rank that has ended."""
        return RankLostError(f"rank {self.rank} ({self.place}) {reason}")

    def end(self, reason: str) -> None:
        """Close the channel, which ends the process."""
        if self.process is None:
            self.channel.offer(messages.End(reason))
        self.channel.close()

    def _give_up_reads(self) -> None:
        with suppress(KeyError):  # there is none left
            while True:
                self._reads.popitem()[1].set_exception(self.lost())

    def _notes(self, report: messages.Report) -> bool:
        if isinstance(report, messages.AdapterRead):
            read = self._reads.pop(report.digest)
            if report.reason is None:
                read.set_result(None)
            else:
                read.set_exception(ModelError(f"rank {self.rank} ({self.place}): {report.reason}"))
            return True
        if not isinstance(report, messages.Refused):
            return False
        refusal = {"ConfigError": ConfigError, "ModelError": ModelError}.get(report.kind, EngineError)
        self.refusal = refusal(f"rank {self.rank}: {report.message}")
        return True


class RankSet:
    """All ranks but this one. `open` starts them, `join` and `allocate` bring them up, `close` ends them."""

    device_type: Literal["cpu", "cuda"] = "cpu"
    rank_module = "quire.engine.parallel.process"

    def __init__(self, options: EngineOptions) -> None:
        self.lost: EngineError | None = None
        self.on_lost: Callable[[EngineError], None] = lambda error: None  # called by another thread
        self.on_beat: Callable[[], None] = lambda: None  # likewise, while this process runs
        self.peers: list[Peer] = []
        self.free_bytes = sys.maxsize  # of memory on the machine of another rank that has the least
        self._options, self._silence_limit_s = options, SILENCE_SHARE * options.stall_limit
        self._num_ranks, self._mode = options.tensor_parallel_size, options.tensor_parallel_mode_on(self.device_type)
        self._num_threads = torch.get_num_threads()
        self._is_closing, self._losing = threading.Event(), threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._exchange: RankExchange | None = None
        self.own_model: Decoder | None = None  # rank 0's part, once it is joined

    @property
    def exchange(self) -> RankExchange:
        """The exchanges of this rank, 0."""
        assert self._exchange is not None, "the ranks have not been opened"
        return self._exchange

    def open(self, spec: DecoderSpec, num_positions: int) -> tuple[RankExchange, int]:
        """Start the other ranks, which begin to load; return rank 0 and the number of positions of all."""
        check_shardable(spec, self._num_ranks, self._mode)
        self._watcher.start()
        path = resolve_model(self._options.model, self._options.model_files, self._options.revision)
        layout = MemoryLayout.of(spec, self._options.resolved_max_num_seqs, self._num_ranks)
        digest = model_digest(path)
        exchange = self._open_exchange(layout)
        hellos = [self._receive(peer, messages.Hello) for peer in self.peers]
        for peer, hello in zip(self.peers, hellos, strict=True):
            self._check_hello(peer, hello)
        isa = self._common_isa(hellos)
        options = replace(self._options, model=str(path), cpu_isa=isa, device=self.device_type)
        for peer in self.peers:
            threads = self._threads_of(peer.rank)
            load = messages.Load(
                options, peer.rank, self._num_ranks, threads, num_positions, layout, digest, self._host_of(peer)
            )
            peer.send(load)
        torch.set_num_threads(self._threads_of(0))
        try:
            exchange.reset()
        except RuntimeError as error:
            raise self.lost or error from error
        return exchange, num_positions

    def join(self, loaded: LoadedModel) -> LoadedModel:
        """Wait until all ranks have loaded; return the model of all of them. RankLostError if one has ended."""
        others = [self._receive(peer, messages.Loaded) for peer in self.peers]
        self.free_bytes = min((other.free_bytes for other in others), default=self.free_bytes)
        model = loaded.model
        assert isinstance(model, Decoder)
        self.own_model = model
        weight_bytes = model.weight_bytes + sum(other.weight_bytes for other in others)
        return replace(loaded, model=self._ranked_model(weight_bytes))

    def allocate(self, cache: CacheConfig, scheduling: SchedulerConfig) -> None:
        """Let all ranks allocate what rank 0 has: their parts of as many blocks."""
        sizes = messages.Allocate(
            cache.num_blocks, cache.num_swap_blocks, scheduling.max_num_seqs, scheduling.max_model_len
        )
        for peer in self.peers:
            peer.send(sizes)
        for peer in self.peers:
            self._receive(peer, messages.Allocated)

    def kv_bytes(self, device: Device, limits: StepLimits, slots: AdapterSlots | None) -> int:
        """Return the bytes for the KV cache, by the machine of a rank with the least free memory."""
        assert self.own_model is not None, "ranks that have not joined"
        return min(device.kv_bytes(self.own_model, limits, slots), self.free_bytes)

    def executor(self, parts: WorkerParts, max_num_batched_tokens: int) -> Executor:
        """Return the executor of all ranks; rank 0's worker is of these parts."""
        return LocalExecutor(RankedWorker(Worker(*parts), self, self.link()))

    def link(self) -> Link:
        """Return the link to the other ranks within a step."""
        return Link(self.exchange)

    def load(self, adapter: Adapter) -> Sequence[Future[None]]:
        """Let all other ranks read an adapter, before a step uses it. Errors as of `Peer.load`."""
        return [peer.load(adapter) for peer in self.peers]

    def drop(self, digest: str) -> None:
        """Let all other ranks forget an adapter."""
        for peer in self.peers:
            with suppress(RankLostError):  # the next step raises it
                peer.send(messages.DropAdapter(digest))

    def send_plan(self, plan: StepPlan) -> None:
        """Send a plan to all ranks. RankLostError if one is lost."""
        if self.lost is not None:
            raise self.lost
        step = messages.Step(encode(plan))
        for peer in self.peers:
            peer.send(step)

    def recover(self, error: BaseException) -> None:
        """Begin again after a step that failed here or on another rank. Raises RankLostError, or the other's reason."""
        self.exchange.leave()
        reasons = [(peer.rank, self._receive(peer, messages.Stopped).reason) for peer in self.peers]
        if self.lost is not None:
            raise self.lost from error
        self.exchange.resume()
        for peer in self.peers:
            peer.send(messages.Resume())
        self.exchange.reset()
        if isinstance(error, InterruptedExchangeError):
            failed = ", ".join(f"rank {rank}: {reason}" for rank, reason in reasons if reason is not None)
            raise RuntimeError(f"a step has failed on {failed}") from error

    def close(self, reason: str = "rank 0 was closed") -> None:
        """End the processes and wait for them; kill those that do not end. Idempotent.

        Ranks of other machines get the reason.
        """
        self.dismiss(reason)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for process in (peer.process for peer in self.peers if peer.process is not None):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._watcher.is_alive() and threading.current_thread() is not self._watcher:
            self._watcher.join()
        if self._exchange is not None:
            self._exchange.close()
        torch.set_num_threads(self._num_threads)

    def dismiss(self, reason: str = "rank 0 was closed") -> None:
        """Let the processes end, and do not wait for them."""
        self._is_closing.set()
        for peer in self.peers:
            peer.end(reason)

    def _ranked_model(self, weight_bytes: int) -> "RankedModel":
        """Return the model of all ranks."""
        assert self.own_model is not None, "ranks that have not joined"
        return RankedModel(self.own_model, self.link(), weight_bytes)

    def _open_exchange(self, layout: MemoryLayout) -> RankExchange:
        """Start the processes of the ranks, and return rank 0's exchanges with them."""
        memory = create_memory(layout)
        try:
            self._exchange = SharedRanks(Shard(0, self._num_ranks, self._mode), layout, memory)
            self._start_processes(range(1, self._num_ranks), memory)
        finally:
            os.close(memory)
        return self._exchange

    def _start_processes(self, ranks: Sequence[int], memory: int) -> None:
        environment = dict(os.environ) if "OMP_WAIT_POLICY" in os.environ else SPINS | os.environ
        for rank in ranks:
            process, connection = start_module(self.rank_module, env=environment, descriptors=[memory])
            channel = Channel(connection, messages.decode_report)
            self._add(Peer(rank, channel, process, f"process {process.pid}"))

    def _add(self, peer: Peer) -> None:
        """Begin to watch a rank."""
        peer.channel.silence_limit_s = self._silence_limit_s
        self.peers.append(peer)
        peer.start(lambda peer: self._lose(peer.refusal or peer.lost()), lambda report: self._handles(peer, report))

    def _handles(self, peer: Peer, report: messages.Report) -> bool:
        """Handle a report that comes unasked, in the thread that reads; return whether it was one."""
        return False

    def _receive(self, peer: Peer, kind: type[ReportT]) -> ReportT:
        """Wait for a report. Raises the reason of the rank that was lost first."""
        try:
            return peer.receive(kind)
        except RankLostError as error:
            raise self.lost or error from error

    def _check_hello(self, peer: Peer, hello: messages.Hello) -> None:
        """Raise ConfigError for a rank that cannot be one of this run."""
        if hello.version != __version__:
            raise ConfigError(f"rank {peer.rank} runs Quire {hello.version}, rank 0 runs {__version__}")

    def _host_of(self, peer: Peer) -> str:
        """Return the place for exchanges over a network, as `messages.Load` has it; empty: there is one machine."""
        return ""

    def _common_isa(self, hellos: list[messages.Hello]) -> CpuIsa:
        """Return the best instruction set that all ranks have. ConfigError if there is none."""
        asked = self._options.cpu_isa
        usable = usable_isas() if asked == "auto" else (asked,)
        common = [isa for isa in usable if all(isa in hello.isas for hello in hellos)]
        if not common:
            raise ConfigError(f"cpu_isa {asked}: not all ranks have it; they have {[each.isas for each in hellos]}")
        return cast(CpuIsa, common[0])

    def _threads_of(self, rank: int) -> int:
        """Return a rank's share of the threads of the machine, at least 1."""
        share, rest = divmod(self._num_threads, self._num_ranks)
        return max(1, share + (rank < rest))

    def _watch(self) -> None:
        """Send heartbeats, and notice ranks that send none, until closed."""
        while not self._is_closing.wait(BEAT_INTERVAL_S):
            self.on_beat()
            for peer in list(self.peers):
                peer.channel.beat()
                if peer.channel.is_silent:
                    self._lose(peer.lost(f"gave no sign for {self._silence_limit_s:g} s"))

    def _lose(self, error: EngineError) -> None:
        """End all ranks, and the step that waits for them. Only the first reason counts."""
        with self._losing:
            if self.lost is not None or self._is_closing.is_set():
                return
            self.lost = error
        log.error("%s; the engine ends", error)
        for peer in self.peers:
            if peer.process is not None:
                peer.process.kill()
            peer.end(str(error))
        if self._exchange is not None:
            self._exchange.interrupt()
        self.on_lost(error)


class RankedModel:
    """The `LanguageModel` of all ranks: rank 0's, which lets the others compute along."""

    def __init__(self, model: Decoder, link: Link, weight_bytes: int) -> None:
        self._model, self._link = model, link
        self.vocab_size, self.dtype, self.device = model.vocab_size, model.dtype, model.device
        self.back_end, self.kv_geometry, self.progress = model.back_end, model.kv_geometry, model.progress
        self.layer_flops, self.spec = model.layer_flops, model.spec
        self.num_parameters, self.weight_bytes = num_parameters(model.spec), weight_bytes

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Compute a batch on all ranks; return hidden states [num_tokens, hidden_size]."""
        self._link.send(FORWARD, batch.token_ids[:, None])
        return self._model.forward(batch, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [num_rows, vocab_size], until the next call."""
        self._link.send(LOGITS, hidden)
        return self._model.logits(hidden)


class RankedWorker:
    """The `StepWorker` of all ranks."""

    def __init__(self, worker: StepWorker, ranks: RankSet, link: Link) -> None:
        self._worker, self._ranks, self._link = worker, ranks, link

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step on all ranks."""
        try:
            self._ranks.send_plan(plan)
            result = self._worker.execute(plan)
            self._link.send(END)
        except BaseException as error:
            if self._ranks.lost is not None:
                raise self._ranks.lost from error
            self._ranks.recover(error)
            raise
        return result
