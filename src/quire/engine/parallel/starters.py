"""Starters of ranks: children of this process, or processes that join over TCP, on this machine and on others.

`make_rank_set` chooses one of them, a transport and a device.
"""

import importlib.util
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty
from typing import Protocol

from quire.core.errors import ConfigError, EngineError, NotInstalledError
from quire.core.host_limits import num_threads
from quire.core.optional_package import NEEDS_KERNELS, NEEDS_TORCH, needs_library
from quire.engine.devices import uses_gpu
from quire.engine.launcher import spinning_environment, start_module, wait_or_kill
from quire.engine.options import EngineOptions
from quire.engine.parallel import node, rank_messages
from quire.engine.parallel.addresses import RunAddress, run_address
from quire.engine.parallel.channel import Channel
from quire.engine.parallel.join import Joined, JoinPort
from quire.engine.parallel.node import Members, threads_of
from quire.engine.parallel.peer import Peer
from quire.engine.parallel.rank_set import RankSet, Starter, Transport
from quire.extension.isas import usable_isas

JOIN_SHARE = 0.9            # part of the start timeout, for all ranks to join


class ForkedRanks:
    """A `Starter` of processes of this machine. `num_threads`: of this process, which the ranks divide."""

    def __init__(self, options: EngineOptions, num_threads: int) -> None:
        self._num_ranks, self._num_threads = options.tensor_parallel_size, num_threads
        self._peers: list[Peer] = []

    def start(
        self, inherited: Sequence[int], check: Callable[[], None], lose: Callable[[EngineError], None]
    ) -> Iterator[Peer]:
        """Yield each rank once its process is started."""
        for rank in range(1, self._num_ranks):
            process, connection = start_module(
                node.PROCESS_MODULE, env=spinning_environment(), descriptors=inherited
            )
            channel = Channel(connection, rank_messages.decode_report)
            self._peers.append(Peer(rank, channel, process, f"process {process.pid}"))
            yield self._peers[-1]

    def threads_of(self, rank: int) -> int:
        """Return a rank's share of the threads of the machine, at least 1."""
        share, rest = divmod(self._num_threads, self._num_ranks)
        return max(1, share + (rank < rest))

    def close(self) -> None:
        """Wait for the processes. Idempotent."""
        wait_or_kill(peer.process for peer in self._peers if peer.process is not None)


class Placement(Protocol):
    """Starts processes that join a run. `address`: where rank 0 listens for them."""

    address: RunAddress
    num_first_threads: int  # threads of rank 0

    def start(self, port: int, lose: Callable[[EngineError], None]) -> None:
        """Start the processes. `lose` is called, by any thread, when one has ended, if that can be known here."""

    def close(self) -> None:
        """End the processes. Idempotent."""


class ByHand:
    """A `Placement` of the ranks of this machine; the commands of other nodes start theirs."""

    def __init__(self, options: EngineOptions, num_threads: int) -> None:
        self.address = run_address(options)
        self._num_local = options.tensor_parallel_size // options.nnodes
        self.num_first_threads = max(1, -(-num_threads // self._num_local))
        self._options = options
        self._members: Members | None = None

    def start(self, port: int, lose: Callable[[EngineError], None]) -> None:
        """Start the ranks of this machine. Their channels to rank 0 show when one has ended."""
        own = threads_of(self._options, range(1, self._num_local))
        self._members = Members(self._options, own, self.address.address, port, self.address.key)

    def close(self) -> None:
        """End the ranks of this machine. Idempotent."""
        if self._members is not None:
            self._members.close()


class JoinedRanks:
    """A `Starter` of processes that join over TCP, wherever their placement starts them."""

    def __init__(self, options: EngineOptions, placement: Placement) -> None:
        self._num_ranks, self._limit_s = options.tensor_parallel_size, JOIN_SHARE * options.start_timeout
        self._placement = placement

    def start(
        self, inherited: Sequence[int], check: Callable[[], None], lose: Callable[[EngineError], None]
    ) -> Iterator[Peer]:
        """Listen, and yield each rank that joins. EngineError if one does not, or one is not of this run."""
        address, port = self._placement.address.address, self._placement.address.port
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"node 0 cannot listen at {address} port {port} (master_addr, master_port): {error.strerror}"
            ) from error
        with listener:
            self._placement.start(listener.getsockname()[1], lose)
            yield from self._accepted(listener, check)

    def threads_of(self, rank: int) -> int:
        """Return the threads of rank 0; the processes of others get theirs from their environments."""
        return 0 if rank else self._placement.num_first_threads

    def close(self) -> None:
        """End what the placement has started. Idempotent."""
        self._placement.close()

    def _accepted(self, listener: socket.socket, check: Callable[[], None]) -> Iterator[Peer]:
        port, missing = JoinPort(listener, self._placement.address.key), set(range(1, self._num_ranks))
        deadline_s = time.monotonic() + self._limit_s
        try:
            while missing:
                check()
                if time.monotonic() > deadline_s:
                    ranks = ", ".join(map(str, sorted(missing)))
                    where = self._placement.address.address
                    raise EngineError(
                        f"rank {ranks} did not join at {where} within {self._limit_s:g} s (start_timeout)"
                    )
                port.poll()
                with suppress(Empty):
                    while True:
                        peer = _peer_of(port.joined.get_nowait(), missing)
                        missing.remove(peer.rank)
                        yield peer
        finally:
            port.close()


def _peer_of(joined: Joined | ConfigError, missing: set[int]) -> Peer:
    if isinstance(joined, ConfigError):
        raise joined
    channel = Channel(joined.connection, rank_messages.decode_report, joined.seals)
    if joined.rank not in missing:
        channel.close()
        raise ConfigError(
            f"a rank {joined.rank} has joined twice, or there is none: node_rank must differ between nodes"
        )
    return Peer(joined.rank, channel, None, joined.place)


def make_rank_set(options: EngineOptions) -> RankSet:
    """Return all ranks of a run but this one. ConfigError for what is not served.

    | started | on CPUs | on GPUs |
    | --- | --- | --- |
    | as children | shared memory | NCCL; ranks meet in a file |
    | by hand, on several machines | gloo over TCP | NCCL; ranks meet at a port of rank 0 |
    | by Ray | gloo over TCP | refused: Ray would have to reserve the very GPU that rank 0 uses, which has no actor |
    """
    if options.node_rank:
        raise ConfigError(
            f"node_rank {options.node_rank}: node 0 has the engine; start the other nodes by `quire serve` with the "
            "same settings"
        )
    is_on_gpu, threads = uses_gpu(options), num_threads()
    if not is_on_gpu and not usable_isas():
        raise NotInstalledError(f"tensor_parallel_size {options.tensor_parallel_size}: {NEEDS_KERNELS}")
    placement = _placement(options, threads)
    if placement is None:
        starter: Starter = ForkedRanks(options, threads)
        address = None
    else:
        starter, address = JoinedRanks(options, placement), placement.address.address
    if is_on_gpu:
        from quire.engine.parallel.gpu_ranks import GpuRanks  # noqa: PLC0415 (loads torch)
        from quire.engine.parallel.nccl import Nccl  # noqa: PLC0415

        return RankSet(options, starter, Nccl(options.tensor_parallel_size, address), GpuRanks(options))
    from quire.engine.parallel.cpu_ranks import CpuRanks  # noqa: PLC0415 (imports the extension)

    return RankSet(options, starter, _shared_memory() if address is None else _tcp(address), CpuRanks())


def _shared_memory() -> Transport:
    from quire.engine.parallel.shared_memory import SharedMemory  # noqa: PLC0415 (imports the extension)

    return SharedMemory()


def _tcp(address: str) -> Transport:
    if importlib.util.find_spec("torch") is None:
        raise NotInstalledError(f"ranks of several machines: {NEEDS_TORCH}")
    from quire.engine.parallel.tcp import Tcp  # noqa: PLC0415 (loads torch)

    return Tcp(address)


def _placement(options: EngineOptions, num_threads: int) -> Placement | None:
    """Return what starts ranks that join over TCP; None: they are children of this process."""
    if options.distributed_executor_backend == "ray":
        with needs_library("distributed_executor_backend 'ray'", "ray", "'quire[ray]'"):
            from quire.engine.parallel.ray_ranks import PlacedByRay  # noqa: PLC0415 (imports Ray, for a second)
        return PlacedByRay(options, num_threads)
    return ByHand(options, num_threads) if options.nnodes > 1 else None
