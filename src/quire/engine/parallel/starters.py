"""Rank 0 of a run over several machines (door of the room): listens for the other ranks, which join over TCP."""

import socket
import time
from contextlib import suppress
from queue import Empty

from quire.core.errors import ConfigError, EngineError, RankLostError
from quire.core.options import declared_options
from quire.engine.options import EngineOptions
from quire.engine.parallel import messages
from quire.engine.parallel.address_book import AddressBook
from quire.engine.parallel.addresses import RunAddress, run_address
from quire.engine.parallel.channel import Channel
from quire.engine.parallel.join import Joined, JoinPort
from quire.engine.parallel.link import RankExchange
from quire.engine.parallel.node import Members, threads_of
from quire.engine.parallel.rank_set import Peer, RankSet
from quire.engine.parallel.shared_memory import MemoryLayout
from quire.engine.parallel.tcp import NetworkRanks
from quire.model.sharding import Shard

JOIN_SHARE = 0.9            # of the start timeout, for all ranks to join
# Settings of a machine, which may differ; of the model the digest decides.
OWN_SETTINGS = {
    "model", "tokenizer", "node_rank", "swap_dir", "start_timeout", "node_secret_file", "chat_template",
    "generation_config",
}  # fmt: skip


class NodeRankSet(RankSet):
    """All ranks but this one, on this machine and on others. `where` rank 0 listens: by default as the options say."""

    def __init__(self, options: EngineOptions, where: RunAddress | None = None) -> None:
        super().__init__(options)
        self._run_address = where or run_address(options)
        self._book = AddressBook(lambda entry: self._publish(entry, self.peers))
        self._members: Members | None = None

    def close(self, reason: str = "rank 0 was closed") -> None:
        """End the ranks of this machine, and let those of others end. Idempotent."""
        super().close(reason)
        if self._members is not None:
            self._members.close()

    def _open_exchange(self, layout: MemoryLayout) -> RankExchange:
        address, port = self._run_address.address, self._run_address.port
        try:
            listener = socket.create_server((address, port), family=_family(address))
        except OSError as error:
            raise ConfigError(
                f"node 0 cannot listen at {address} port {port} (master_addr, master_port): {error.strerror}"
            ) from error
        with listener:
            self._start_members(listener.getsockname()[1])
            self._accept_ranks(listener)
        self._exchange = self._own_exchange()
        return self._exchange

    def _own_exchange(self) -> RankExchange:
        """Return rank 0's exchanges with the others, once all have joined."""
        return NetworkRanks(Shard(0, self._num_ranks, self._mode), self._run_address.address, self._book)

    def _start_members(self, port: int) -> None:
        """Start the ranks of this machine."""
        own = threads_of(self._options, range(1, self._num_ranks // self._options.nnodes))
        self._members = Members(self._options, own, self._run_address.address, port, self._run_address.key)

    def _accept_ranks(self, listener: socket.socket) -> None:
        """Wait until all ranks have joined. EngineError if they do not, or one is not of this run."""
        port = JoinPort(listener, self._run_address.key)
        limit_s = JOIN_SHARE * self._options.start_timeout
        deadline_s = time.monotonic() + limit_s
        try:
            while missing := set(range(1, self._num_ranks)) - {peer.rank for peer in self.peers}:
                if self.lost is not None:
                    raise self.lost
                if time.monotonic() > deadline_s:
                    ranks = ", ".join(map(str, sorted(missing)))
                    where = self._run_address.address
                    raise EngineError(f"rank {ranks} did not join at {where} within {limit_s:g} s (start_timeout)")
                port.poll()
                with suppress(Empty):
                    while True:
                        self._add_joined(port.joined.get_nowait(), missing)
        finally:
            port.close()

    def _add_joined(self, joined: Joined | ConfigError, missing: set[int]) -> None:
        if isinstance(joined, ConfigError):
            raise joined
        channel = Channel(joined.connection, messages.decode_report, joined.seals)
        if joined.rank not in missing:
            channel.close()
            raise ConfigError(
                f"a rank {joined.rank} has joined twice, or there is none: node_rank must differ between nodes"
            )
        missing.discard(joined.rank)
        self._add(Peer(joined.rank, channel, None, joined.place))

    def _check_hello(self, peer: Peer, hello: messages.Hello) -> None:
        super()._check_hello(peer, hello)
        for each in declared_options(EngineOptions):
            default = each.option.flag_default  # what None means
            theirs, ours = (
                default if (value := getattr(options, each.name)) is None else value
                for options in (hello.options, self._options)
            )
            if each.name not in OWN_SETTINGS and theirs != ours:
                raise ConfigError(f"rank {peer.rank} ({peer.place}) has {each.name} {theirs!r}, rank 0 has {ours!r}")

    def _host_of(self, peer: Peer) -> str:
        return peer.place

    def _threads_of(self, rank: int) -> int:
        """Return the threads of rank 0; other ranks count those of their machines."""
        num_local = self._num_ranks // self._options.nnodes
        return max(1, -(-self._num_threads // num_local)) if rank == 0 else 0

    def _handles(self, peer: Peer, report: messages.Report) -> bool:
        if not isinstance(report, messages.Published):
            return False
        self._book.add(report)
        self._publish(report, [other for other in self.peers if other is not peer])
        return True

    def _publish(self, entry: messages.Published, peers: list[Peer]) -> None:
        with suppress(RankLostError):  # the thread that reads finds the end
            for peer in peers:
                peer.send(entry)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
