"""Exchange of activations between machines, by collectives of torch.distributed's gloo over TCP.

Columns of ranks differ in number, and a collective's parts do not, so each part has room for the most columns. The
addresses at which the ranks' gloo listens travel over the ranks' own channels; gloo's connections themselves know no
secret.
"""

import ctypes
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import proxy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import GatherOptions, Store, Work
from torch.distributed import ProcessGroupGloo

from quire.core.arrays import FLOAT32, Array, DType
from quire.core.errors import RankLostError
from quire.engine.parallel.addresses import AddressBook
from quire.engine.parallel.collectives import as_bytes, joined, padded, widest
from quire.engine.parallel.link import GatheredHead
from quire.engine.parallel.peer import Peer
from quire.engine.parallel.rank_messages import MemoryLayout, Published, Report
from quire.extension import _kernels
from quire.kernels.cpp.cpp_gather import InterruptedExchangeError
from quire.kernels.layers import Linear
from quire.kernels.torch_arrays import to_array, to_tensor, torch_dtype
from quire.model.sharding import ADDED_BYTES, Cut, Shard

COLLECTIVE_TIMEOUT = timedelta(days=1)  # heartbeats find ranks that do not answer
CONNECT_TIMEOUT = timedelta(minutes=1)
TO_FIRST = GatherOptions()
TO_FIRST.rootRank = 0
POLL = timedelta(seconds=0.25)          # between looks at an interruption


class BookStore(Store):
    """The address book as torch.distributed asks for it. `number`: of the time that the ranks connect."""

    def __init__(self, book: AddressBook, number: int) -> None:
        super().__init__()
        self._book, self._number = book, number

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # as gloo calls it
        """Publish an entry."""
        self._book.publish(self._number, key, bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for an entry. InterruptedExchangeError if it does not come."""
        value = self._book.find(self._number, key)
        if value is None:
            raise InterruptedExchangeError("the ranks did not find each other")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for entries. InterruptedExchangeError if they do not come."""
        for key in keys:
            self.get(key)


class NetworkRanks:
    """A `RankExchange` over a network. `host`: the address of this machine at which the other ranks reach it."""

    def __init__(self, shard: Shard, host: str, book: AddressBook) -> None:
        self.shard = shard
        self._host, self._book = host, book
        self._num_connects = 0
        self._group: Any = None  # a ProcessGroupGloo, of which torch's types know no method
        self._is_interrupted = threading.Event()

    def gather(self, cut: Cut) -> "NetworkGather":
        """Return the exchange of an activation that is divided like this."""
        return NetworkGather(self, cut)

    def sum(self, width: int) -> "NetworkSum":
        """Return the exchange of partial sums of an activation of this width."""
        return NetworkSum(self, width)

    def joined_head(self, head: Linear, cut: Cut) -> GatheredHead:
        """Return the head of all ranks from this one's."""
        return GatheredHead(
            lambda own, cut: to_array(self.gather_columns_to_first(to_tensor(own), cut)), head, cut
        )

    def broadcast(self, rows: Array | None, shape: Sequence[int], dtype: DType) -> Array:
        """Return rows [num_rows, width] of rank 0, which passes them, on every rank; others know shape and dtype."""
        sent = np.empty(tuple(shape), dtype) if rows is None else np.ascontiguousarray(rows)
        if sent.size:
            self._run(lambda group: group.broadcast(as_bytes(to_tensor(sent)), 0))
        return sent

    def gather_columns(self, own: Tensor, cut: Cut) -> Tensor:
        """Return [num_rows, width] of all ranks' columns, for own [num_rows, columns of this rank]."""
        if not len(own):
            return own.new_empty(0, cut.width)
        sent, received = padded(own, cut), own.new_empty(self.shard.num_ranks, len(own), widest(cut))
        self._run(lambda group: group._allgather_base(as_bytes(received), as_bytes(sent)))
        return joined(received, cut)

    def sum_rows(self, own: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sums [num_rows, width] in `dtype` of all ranks' own, float32, added in the order of the ranks.

        Of few rows every rank gets all partial sums, which is one collective. Of many each rank adds some columns, and
        gets the sums of the others: fewer bytes travel, and the bits are the same.
        """
        num_rows, width = own.shape
        num_ranks = self.shard.num_ranks
        if not own.numel():
            return own.to(dtype)
        if own.nbytes <= ADDED_BYTES:
            partial = own.new_empty(num_ranks, num_rows, width)
            self._run(lambda group: group._allgather_base(as_bytes(partial), as_bytes(own.contiguous())))
            return _added(partial).to(dtype)
        cut = Cut(tuple(-(-width // num_ranks) * rank for rank in range(num_ranks + 1)))  # alike, and so padded
        padded = F.pad(own, (0, cut.width - width))
        sent = padded.view(num_rows, num_ranks, -1).transpose(0, 1).contiguous()  # [num_ranks, num_rows, columns]
        partial = torch.empty_like(sent)
        self._run(lambda group: group.alltoall_base(partial, sent, [], []))
        return self.gather_columns(_added(partial).to(dtype), cut)[:, :width].contiguous()

    def gather_columns_to_first(self, own: Tensor, cut: Cut) -> Tensor:
        """Return [num_rows, width] of all ranks' columns on rank 0, of other ranks nothing: [0, width]."""
        num_rows, is_first = len(own), self.shard.rank == 0
        if not num_rows:
            return own.new_empty(0, cut.width)
        sent = as_bytes(padded(own, cut))
        received = own.new_empty(self.shard.num_ranks if is_first else 0, num_rows, widest(cut))
        parts = [list(as_bytes(received).view(-1, len(sent)).unbind())] if is_first else []
        self._run(lambda group: group.gather(parts, [sent], TO_FIRST))
        return joined(received, cut) if is_first else own.new_empty(0, cut.width)

    def interrupt(self) -> None:
        """Give up all exchanges of this rank."""
        self._is_interrupted.set()
        self._book.interrupt()

    def leave(self) -> None:
        """Give up all exchanges, and close the connections, by which the other ranks notice."""
        self.interrupt()
        self._drop()

    def resume(self) -> None:
        """Do nothing: `reset` connects again."""

    def reset(self) -> None:
        """Connect the ranks, again after an interruption. Returns when all have called it."""
        self._drop()
        self._is_interrupted.clear()
        self._book.begin(self._num_connects)
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = CONNECT_TIMEOUT
        options._threads = 1
        options._devices = [gloo.create_device(hostname=self._host)]
        store = BookStore(self._book, self._num_connects)
        self._num_connects += 1
        self._group = gloo(store, self.shard.rank, self.shard.num_ranks, options)
        self._group._set_default_timeout(COLLECTIVE_TIMEOUT)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self.leave()

    def _drop(self) -> None:
        self._group = None

    def _run(self, start: Callable[[Any], Work]) -> None:
        """Run a collective. InterruptedExchangeError if it is given up, here or by another rank."""
        group = self._group
        if group is None or self._is_interrupted.is_set():
            self._drop()
            raise InterruptedExchangeError("the exchange between ranks was interrupted")
        try:
            work = start(group)
        except RuntimeError as error:
            del group
            raise self._broken(error) from error
        is_over = False
        while True:
            try:
                work.wait(POLL)
                return
            except RuntimeError as error:
                if is_over:
                    del group, work
                    raise self._broken(error) from error
                is_over = work.is_completed()  # perhaps only since this wait has ended: the next one says how
            if self._is_interrupted.is_set() and not is_over:
                # A thread of gloo's still waits, for a rank that is stopped; freeing the group would wait for it.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
                self._drop()
                raise InterruptedExchangeError("the exchange between ranks was interrupted")

    def _broken(self, error: RuntimeError) -> InterruptedExchangeError:
        """Drop the group, which the frames of an error would keep, so that the other ranks lose the connection."""
        traceback.clear_frames(error.__traceback__)
        self._drop()
        return InterruptedExchangeError(f"the connection between ranks has ended: {str(error)[:200]}")


class NetworkGather:
    """A `GatherHook` over a network, in Python, which the extension calls: its time is that of the network."""

    def __init__(self, ranks: NetworkRanks, cut: Cut) -> None:
        first, stop = cut.of(ranks.shard.rank)
        self.num_own, self.width = stop - first, cut.width
        self._ranks, self._cut = ranks, cut
        # Weak: Python's collector cannot see through the extension, and the ranks hold the model that holds this.
        self._exchange = _kernels.PythonExchange(partial(_gather_at, proxy(ranks), cut))

    @property
    def address(self) -> tuple[int, int]:
        """The function and the context."""
        return self._exchange.gather_address()

    def __call__(self, own: Array) -> Array:
        """Exchange."""
        return to_array(self._ranks.gather_columns(to_tensor(own), self._cut))


class NetworkSum:
    """A `SumHook` over a network, of partial sums of `width` columns."""

    partial_dtype = FLOAT32

    def __init__(self, ranks: NetworkRanks, width: int) -> None:
        self._ranks = ranks
        self._exchange = _kernels.PythonExchange(partial(_sum_at, proxy(ranks), width))  # as in `NetworkGather`

    @property
    def address(self) -> tuple[int, int]:
        """The function and the context."""
        return self._exchange.sum_address()

    def __call__(self, own: Array, dtype: DType) -> Array:
        """Add."""
        return to_array(self._ranks.sum_rows(to_tensor(own), torch_dtype(dtype)))


class Tcp:
    """A `Transport` between machines, for ranks on CPUs. `address`: of rank 0's machine, for the others."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._book = AddressBook(lambda entry: self._publish(entry, self._peers))
        self._peers: Sequence[Peer] = ()

    def inherited(self, layout: MemoryLayout) -> AbstractContextManager[Sequence[int]]:
        """Return nothing: the ranks find each other by the address book."""
        return nullcontext(())

    def open(self, shard: Shard, peers: Sequence[Peer]) -> NetworkRanks:
        """Return rank 0's exchange with ranks that have joined."""
        self._peers = peers
        return NetworkRanks(shard, self._address, self._book)

    def place_of(self, peer: Peer) -> str:
        """Return the rank's own address, at which it connects with the others."""
        return peer.place

    def handles(self, peer: Peer, report: Report) -> bool:
        """Add an entry of the address book, and pass it on to all other ranks."""
        if not isinstance(report, Published):
            return False
        self._book.add(report)
        self._publish(report, [other for other in self._peers if other is not peer])
        return True

    def _publish(self, entry: Published, peers: Sequence[Peer]) -> None:
        with suppress(RankLostError):  # the thread that reads finds the end
            for peer in peers:
                peer.send(entry)


def _gather_at(ranks: NetworkRanks, cut: Cut, own: int, rows: int, num_rows: int, element_bytes: int) -> None:
    """Exchange columns between addresses, as `ColumnExchange` says."""
    first, stop = cut.of(ranks.shard.rank)
    dtype = {2: torch.int16, 4: torch.int32}[element_bytes]
    if num_rows:
        columns = ranks.gather_columns(_memory_at(own, (num_rows, stop - first), dtype), cut)
        _memory_at(rows, (num_rows, cut.width), dtype).copy_(columns)


def _sum_at(ranks: NetworkRanks, width: int, own: int, out: int, num_rows: int, out_is_float: int) -> None:
    """Add partial sums at an address into another one, as `SumExchange` says."""
    dtype = torch.float32 if out_is_float else torch.bfloat16
    if num_rows:
        sums = ranks.sum_rows(_memory_at(own, (num_rows, width), torch.float32), dtype)
        _memory_at(out, (num_rows, width), dtype).copy_(sums)


def _memory_at(address: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return memory of the extension, while it waits, as a tensor of a shape without zeros."""
    memory = (ctypes.c_char * (shape[0] * shape[1] * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _added(partial: Tensor) -> Tensor:
    """Return the sum of partial [num_ranks, num_rows, width] over the ranks, in their order."""
    sums = partial[0].clone()
    for each in partial[1:]:
        sums += each
    return sums
