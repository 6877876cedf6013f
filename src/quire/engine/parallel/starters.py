"""Starters of ranks: children of this process, or processes that join over TCP, on this machine and on others."""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty
from typing import Protocol

from quire.core.errors import ConfigError, EngineError
from quire.engine.launcher import spinning_environment, start_module, wait_or_kill
from quire.engine.options import EngineOptions
from quire.engine.parallel import node, rank_messages
from quire.engine.parallel.addresses import RunAddress, run_address
from quire.engine.parallel.channel import Channel
from quire.engine.parallel.join import Joined, JoinPort
from quire.engine.parallel.node import Members, threads_of
from quire.engine.parallel.peer import Peer

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
        """Start the ranks of this machine, whose ends their channels to rank 0 show."""
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
