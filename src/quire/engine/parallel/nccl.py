"""Exchange of activations between GPUs, by NCCL.

Collectives run in the stream that computes, and no host waits for them, so a step with them is captured as a graph like
any other. For that they ask for `asyncOp` False (else torch runs them in a stream of its own), the group is connected
before the first of them, and each process has one GPU. The group's address book is a file in memory that the processes
of a machine inherit, or of several machines a store of torch.distributed on the first. NCCL's algorithm, and so the
order of a sum, follows from the number of ranks and of elements, and from how they are connected.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions, FileStore, Store
from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]  # documented, not listed

from quire.core.errors import ConfigError
from quire.engine.parallel import rank_messages
from quire.engine.parallel.collectives import as_bytes, joined, padded, widest
from quire.engine.parallel.link import GatheredHead
from quire.engine.parallel.peer import Peer
from quire.kernels.layers import Linear
from quire.model.sharding import Cut, Shard

log = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT = timedelta(days=1)  # heartbeats find ranks that do not answer
ABORT_TIMEOUT_S = 3.0
POLL_S = 0.25                           # between looks at an interruption, while the ranks connect
SUM, FROM_FIRST, ALL = AllreduceOptions(), BroadcastOptions(), AllgatherOptions()
for _options in (SUM, FROM_FIRST, ALL):
    _options.asyncOp = False


def open_group(store: Store, shard: Shard, device: torch.device) -> ProcessGroup:
    """Return NCCL's group of one GPU of each rank, connected. Returns when all ranks have called it."""
    from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415 (torch for CPUs has none)

    options = ProcessGroupNCCL.Options()
    options._timeout = COLLECTIVE_TIMEOUT
    nccl = ProcessGroupNCCL(store, shard.rank, shard.num_ranks, options)
    nccl.eager_connect_single_device(device)
    group = ProcessGroup(store, shard.rank, shard.num_ranks)
    group._set_default_backend(ProcessGroup.BackendType.NCCL)
    group._register_backend(device, ProcessGroup.BackendType.NCCL, nccl)
    return group


def file_store(descriptor: int, num_ranks: int) -> Callable[[], Store]:
    """Return what opens the address book of one machine, in the file of a descriptor, which may be closed then."""
    own = os.dup(descriptor)  # for the process's life: threads of the group may read it after `close`
    return lambda: FileStore(f"/proc/self/fd/{own}", num_ranks)


def open_network_store(address: str, num_ranks: int) -> tuple[Store, int]:
    """Open the address book of several machines, at an IP address of this one; return it and its port.

    It asks for no secret, as NCCL's own connections do not.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(
        address, port, num_ranks, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def network_store(place: str, num_ranks: int) -> Store:
    """Return the address book that another machine has at a place, "ADDRESS PORT"; RuntimeError if nothing is there."""
    address, port = place.split()
    return TCPStore(address, int(port), num_ranks, wait_for_workers=False)


class InterruptedCollectiveError(RuntimeError):
    """A collective was given up, or another rank has left."""


class NcclRanks:
    """A `RankExchange` of GPUs. `open_store`: opens the group's address book, and may wait for it.

    It is connected once: after an interruption the run is over.
    """

    def __init__(self, shard: Shard, device: torch.device, open_store: Callable[[], Store]) -> None:
        self.shard, self.device = shard, device
        self._open_store = open_store
        self._group: ProcessGroup | None = None
        self._is_interrupted = threading.Event()

    def gather(self, cut: Cut) -> "NcclGather":
        """Return the exchange of an activation that is divided like this."""
        return NcclGather(self, cut)

    def sum(self, width: int) -> "NcclSum":
        """Return the exchange of partial sums of an activation of this width."""
        return NcclSum(self)

    def joined_head(self, head: Linear, cut: Cut) -> GatheredHead:
        """Return the head of all ranks from this one's."""
        return GatheredHead(self._gather_columns_to_first, head, cut)

    def broadcast(self, rows: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return rows [num_rows, width] of rank 0, which passes them, on every rank; others know shape and dtype."""
        sent = torch.empty(*shape, dtype=dtype, device=self.device) if rows is None else rows.contiguous()
        if sent.numel():
            self._run(lambda group: group.broadcast([as_bytes(sent)], FROM_FIRST))
        return sent

    def gather_columns(self, own: Tensor, cut: Cut) -> Tensor:
        """Return [num_rows, width] of all ranks' columns, for own [num_rows, columns of this rank]."""
        received = own.new_empty(self.shard.num_ranks, len(own), widest(cut))
        if received.numel():
            sent = padded(own, cut)
            self._run(lambda group: group._allgather_base(as_bytes(received), as_bytes(sent), ALL))
        return joined(received, cut)

    def _gather_columns_to_first(self, own: Tensor, cut: Cut) -> Tensor:
        columns = self.gather_columns(own, cut)
        return columns if self.shard.rank == 0 else columns[:0]

    def sum_rows(self, own: Tensor) -> Tensor:
        """Return the sums of all ranks' own [num_rows, width], in its place."""
        own = own.contiguous()
        if own.numel():
            self._run(lambda group: group.allreduce([own], SUM))
        return own

    def interrupt(self) -> None:
        """Give up: kernels that wait for another rank end, and what they leave is not to be used."""
        self._is_interrupted.set()
        self._abort()

    def leave(self) -> None:
        """Give up, which other ranks notice when this one ends."""
        self.interrupt()

    def resume(self) -> None:
        """Do nothing: an exchange that was given up is not begun again."""

    def reset(self) -> None:
        """Connect the ranks. Returns when all have called it. InterruptedCollectiveError after `interrupt`."""
        found = SimpleQueue[ProcessGroup | Exception]()

        def connect() -> None:
            try:
                found.put(open_group(self._open_store(), self.shard, self.device))
            except Exception as error:
                found.put(error)

        threading.Thread(target=connect, name="connect", daemon=True).start()  # NCCL waits for all, whatever happens
        while not self._is_interrupted.is_set():
            with suppress(Empty):
                group = found.get(timeout=POLL_S)
                if isinstance(group, Exception):
                    raise group
                self._group = group
                return
        raise InterruptedCollectiveError("the ranks did not find each other")

    def close(self) -> None:
        """End the connections; no graph with an exchange may be left. Idempotent."""
        self._is_interrupted.set()
        aborting = self._abort()
        if aborting is not None:
            aborting.join(ABORT_TIMEOUT_S)
            if aborting.is_alive():
                log.warning("NCCL did not end within %g s", ABORT_TIMEOUT_S)

    def _abort(self) -> threading.Thread | None:
        """Abort the group in a thread: NCCL waits for the last graph with one of its exchanges to be freed."""
        group, self._group = self._group, None
        if group is None:
            return None
        aborting = threading.Thread(target=group.abort, name="abort", daemon=True)
        aborting.start()
        return aborting

    def _run(self, start: Callable[[ProcessGroup], Any]) -> None:
        """Launch a collective. InterruptedCollectiveError if exchanges were given up."""
        group = self._group
        if group is None or self._is_interrupted.is_set():
            raise InterruptedCollectiveError("the exchange between ranks was interrupted")
        try:
            work = start(group)
            if work is not None:
                work.wait()  # on a GPU the stream waits, not the host
        except RuntimeError as error:
            raise InterruptedCollectiveError(f"the connection between ranks has ended: {str(error)[:200]}") from error


class NcclGather:
    """A `GatherHook` between GPUs."""

    address = None

    def __init__(self, ranks: NcclRanks, cut: Cut) -> None:
        first, stop = cut.of(ranks.shard.rank)
        self.num_own, self.width = stop - first, cut.width
        self._ranks, self._cut = ranks, cut

    def __call__(self, own: Tensor) -> Tensor:
        """Exchange."""
        return self._ranks.gather_columns(own, self._cut)


class NcclSum:
    """A `SumHook` between GPUs: an all-reduce of partial sums that are rounded to the model's dtype."""

    address, partial_dtype = None, None

    def __init__(self, ranks: NcclRanks) -> None:
        self._ranks = ranks

    def __call__(self, own: Tensor, dtype: torch.dtype) -> Tensor:
        """Add."""
        return self._ranks.sum_rows(own).to(dtype)


class Nccl:
    """A `Transport` between GPUs. `address`: of rank 0's machine, for others; None: there is one machine."""

    def __init__(self, num_ranks: int, address: str | None) -> None:
        self._num_ranks, self._address = num_ranks, address
        self._open_store: Callable[[], Store] | None = None
        self._place = ""  # address of the address book, for ranks on other machines

    @contextmanager
    def inherited(self, layout: rank_messages.MemoryLayout) -> Iterator[Sequence[int]]:
        """Return the descriptor of the address book of one machine, if there is one."""
        if self._address is not None:
            yield ()
            return
        book = os.memfd_create("quire-address-book")
        try:
            self._open_store = file_store(book, self._num_ranks)
            yield [book]
        finally:
            os.close(book)

    def open(self, shard: Shard, peers: Sequence[Peer]) -> NcclRanks:
        """Return rank 0's exchange, on the first GPU."""
        if self._address is not None:
            store, port = open_network_store(self._address, self._num_ranks)
            self._open_store, self._place = (lambda: store), f"{self._address} {port}"
        assert self._open_store is not None, "ranks that have not been started"
        return NcclRanks(shard, torch.device("cuda", 0), self._open_store)

    def place_of(self, peer: Peer) -> str:
        """Return where the address book of several machines is."""
        return self._place

    def handles(self, peer: Peer, report: rank_messages.Report) -> bool:
        """Return False: there is no such report."""
        return False


def rank_exchange(command: rank_messages.Load, book: int | None) -> NcclRanks:
    """Return the exchange of another rank, on the GPU of its number. ConfigError if its machine has none.

    `book`: the descriptor of the address book of one machine; None: it is at the place that the command names.
    """
    card, num_cards = command.rank % (command.num_ranks // command.options.nnodes), torch.cuda.device_count()
    if card >= num_cards:
        raise ConfigError(f"rank {command.rank} needs GPU {card} of its machine, but torch sees {num_cards} there")
    torch.cuda.set_device(card)
    num_ranks = command.num_ranks
    open_store = partial(network_store, command.place, num_ranks) if book is None else file_store(book, num_ranks)
    return NcclRanks(command.shard, torch.device("cuda", card), open_store)
