"""Rank 0 of tensor parallelism, in the engine's process: starts the other ranks, sends them plans, and watches them.

A rank that has ended is noticed by its socket, one that is stopped by its heartbeats; from then on every step raises
RankLostError. A step that fails on any rank fails on all, and the next one begins with all of them: the engine isolates
the request that is the cause, as with one rank.
"""

import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import Tensor

from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.errors import ConfigError, EngineError, ModelError, RankLostError
from quire.core.frames import frame, read_frame
from quire.core.plan import StepPlan, StepResult
from quire.core.plan_codec import encode
from quire.core.version import __version__
from quire.engine.launcher import SPINS, start_module
from quire.engine.loading import LoadedModel
from quire.engine.options import CpuIsa, EngineOptions
from quire.engine.parallel import messages
from quire.engine.parallel.digest import model_digest
from quire.engine.parallel.link import END, FORWARD, LOGITS, Link
from quire.engine.parallel.shared_memory import MemoryLayout, SharedRanks, create_memory
from quire.execution.executor import StepWorker
from quire.kernels.cpp.back_end import usable_isas
from quire.kernels.cpp.gather import InterruptedExchangeError
from quire.model.batch import ForwardBatch
from quire.model.decoder import Decoder
from quire.model.footprint import num_parameters
from quire.model.kv_cache import KVCache
from quire.model.resolve import resolve_model
from quire.model.sharding import Shard, check_shardable
from quire.model.spec import DecoderSpec

log = logging.getLogger(__name__)

STOPPED_LIMIT_S = 8.0    # without a heartbeat: below the default of --stall-limit
WATCH_INTERVAL_S = 0.25
CLOSE_TIMEOUT_S = 3.0
RANK_MODULE = "quire.engine.parallel.rank"

ReportT = TypeVar("ReportT", messages.Hello, messages.Loaded, messages.Allocated, messages.Stopped)


class Peer:
    """Another rank: its process, and rank 0's end of the socket pair."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.rank, self.process, self.connection = rank, process, connection
        self._input = connection.makefile("rb")

    def send(self, command: messages.Command) -> None:
        """Send a command. RankLostError if the rank has ended."""
        self._send(frame(command))

    def send_load(self, load: messages.Load, descriptor: int) -> None:
        """Send the first command and a descriptor, which goes with a byte of its own before."""
        try:
            socket.send_fds(self.connection, [b"\0"], [descriptor])
        except OSError as error:
            raise self.lost() from error
        self.send(load)

    def receive(self, kind: type[ReportT]) -> ReportT:
        """Wait for a report of this kind. RankLostError if the rank has ended; the error of a `Refused`."""
        try:
            message = read_frame(self._input)
        except OSError as error:
            raise self.lost() from error
        if message is None:
            raise self.lost()
        report: messages.Report = messages.decode_report(message)
        if isinstance(report, messages.Refused):
            refusal = {"ConfigError": ConfigError, "ModelError": ModelError}.get(report.kind, EngineError)
            raise refusal(f"rank {self.rank}: {report.message}")
        assert isinstance(report, kind), f"expected {kind.__name__} of rank {self.rank}, got {report}"
        return report

    def lost(self) -> RankLostError:
        """Return the error of a rank that has ended."""
        return RankLostError(f"rank {self.rank} (process {self.process.pid}) has ended")

    def close(self) -> None:
        """Close the socket, which ends the process."""
        self._input.close()
        self.connection.close()

    def _send(self, message: bytes) -> None:
        try:
            self.connection.sendall(message)
        except OSError as error:
            raise self.lost() from error


class RankSet:
    """All ranks but this one. `open` starts them, `join` and `allocate` bring them up, `close` ends them."""

    def __init__(self, options: EngineOptions, stopped_limit_s: float = STOPPED_LIMIT_S) -> None:
        self.lost: RankLostError | None = None
        self.on_lost: Callable[[RankLostError], None] = lambda error: None  # called by the watching thread
        self.peers: list[Peer] = []
        self._options, self._stopped_limit_s = options, stopped_limit_s
        self._num_ranks = options.tensor_parallel_size
        self._num_threads = torch.get_num_threads()
        self._is_closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._ranks: SharedRanks | None = None

    @property
    def ranks(self) -> SharedRanks:
        """This rank, 0."""
        assert self._ranks is not None, "the ranks have not been opened"
        return self._ranks

    def open(self, spec: DecoderSpec, num_positions: int) -> tuple[SharedRanks, int]:
        """Start the other ranks, which begin to load; return rank 0 and the number of positions of all."""
        check_shardable(spec, self._num_ranks)
        self._start_processes()
        isa = self._common_isa([peer.receive(messages.Hello) for peer in self.peers])
        path = resolve_model(self._options.model)
        options = replace(self._options, model=str(path), cpu_isa=isa)
        layout, digest = MemoryLayout.of(spec, options.resolved_max_num_seqs), model_digest(path)
        descriptor = create_memory(layout)
        try:
            self._ranks = SharedRanks(Shard(0, self._num_ranks), layout, descriptor)
            for peer in self.peers:
                threads = self._threads_of(peer.rank)
                load = messages.Load(options, peer.rank, self._num_ranks, threads, num_positions, layout, digest)
                peer.send_load(load, descriptor)
        finally:
            os.close(descriptor)
        torch.set_num_threads(self._threads_of(0))
        self._watcher.start()
        return self._ranks, num_positions

    def join(self, loaded: LoadedModel) -> LoadedModel:
        """Wait until all ranks have loaded; return the model of all of them. RankLostError if one has ended."""
        others = [peer.receive(messages.Loaded).weight_bytes for peer in self.peers]
        model = loaded.model
        assert isinstance(model, Decoder)
        return replace(loaded, model=RankedModel(model, Link(self.ranks), model.weight_bytes + sum(others)))

    def allocate(self, cache: CacheConfig, scheduling: SchedulerConfig) -> None:
        """Let all ranks allocate what rank 0 has: their parts of as many blocks."""
        sizes = messages.Allocate(
            cache.num_blocks, cache.num_swap_blocks, scheduling.max_num_seqs, scheduling.max_model_len
        )
        for peer in self.peers:
            peer.send(sizes)
        for peer in self.peers:
            peer.receive(messages.Allocated)

    def worker(self, worker: StepWorker) -> "RankedWorker":
        """Return the worker of all ranks around rank 0's."""
        return RankedWorker(worker, self, Link(self.ranks))

    def send_plan(self, plan: StepPlan) -> None:
        """Send a plan to all ranks. RankLostError if one is lost."""
        if self.lost is not None:
            raise self.lost
        message = frame(messages.Step(encode(plan)))
        for peer in self.peers:
            peer.connection.sendall(message)

    def recover(self, error: BaseException) -> None:
        """Begin again after a step that failed here or on another rank. Raises RankLostError, or the other's reason."""
        group = self.ranks.group
        group.interrupt()
        try:
            reasons = [(peer.rank, peer.receive(messages.Stopped).reason) for peer in self.peers]
        except RankLostError as lost:
            raise self.lost or lost from error
        if self.lost is not None:
            raise self.lost from error
        group.resume()
        group.reset()
        for peer in self.peers:
            peer.send(messages.Resume())
        if isinstance(error, InterruptedExchangeError):
            failed = ", ".join(f"rank {rank}: {reason}" for rank, reason in reasons if reason is not None)
            raise RuntimeError(f"a step has failed on {failed}") from error

    def close(self) -> None:
        """End the processes and wait for them; kill those that do not end. Idempotent."""
        self._is_closing.set()
        for peer in self.peers:
            peer.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for peer in self.peers:
            try:
                peer.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                peer.process.kill()
                peer.process.wait()
        if self._watcher.is_alive() and threading.current_thread() is not self._watcher:
            self._watcher.join()
        torch.set_num_threads(self._num_threads)

    def _start_processes(self) -> None:
        environment = dict(os.environ) if "OMP_WAIT_POLICY" in os.environ else SPINS | os.environ
        for rank in range(1, self._num_ranks):
            self.peers.append(Peer(rank, *start_module(RANK_MODULE, env=environment)))

    def _common_isa(self, hellos: list[messages.Hello]) -> CpuIsa:
        """Return the best instruction set that all ranks have. ConfigError for another version, or if there is none."""
        for peer, hello in zip(self.peers, hellos, strict=True):
            if hello.version != __version__:
                raise ConfigError(f"rank {peer.rank} runs Quire {hello.version}, rank 0 runs {__version__}")
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
        """Notice ranks that have ended or are stopped, until closed."""
        poll, seen = select.poll(), {peer.rank: (0, time.monotonic()) for peer in self.peers}
        by_descriptor = {peer.connection.fileno(): peer for peer in self.peers}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLRDHUP)
        while not self._is_closing.is_set():
            ended = poll.poll(WATCH_INTERVAL_S * 1000)
            if self._is_closing.is_set():
                return
            if ended:
                self._lose(by_descriptor[ended[0][0]].lost())
                return
            now = time.monotonic()
            for peer in self.peers:
                count, since_s = seen[peer.rank]
                found = self.ranks.group.num_beats(peer.rank)
                if found != count:
                    seen[peer.rank] = found, now
                elif now - since_s > self._stopped_limit_s:
                    text = f"rank {peer.rank} (process {peer.process.pid}) gave no sign for {self._stopped_limit_s:g} s"
                    self._lose(RankLostError(text))
                    return

    def _lose(self, error: RankLostError) -> None:
        """End all ranks, and the step that waits for them."""
        log.error("%s; the engine ends", error)
        self.lost = error
        for peer in self.peers:
            peer.process.kill()
        self.ranks.group.interrupt()
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
        except RankLostError:
            raise
        except BaseException as error:
            self._ranks.recover(error)
            raise
        return result
