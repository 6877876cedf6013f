"""Exchanges of two ranks on this machine: shared memory, our exchange over TCP, and the calls of torch's gloo below it.

    python bench/rank_exchanges.py [--seconds 0.3] [--turns 3]

Each rank has half of the columns of an activation in bfloat16, and gets all of them. `shared memory` is the exchange of
ranks of one machine, `TCP` that of ranks of several, `all-gather` and `send, receive` are gloo's calls without what we
add (room for the most columns, the bytes of any dtype, looks at an interruption), and `sockets` are blocking ones in
Python, with TCP_NODELAY: what an exchange of our own over TCP could reach. Ways alternate within a turn; a figure is
the fastest tenth of a turn's exchanges, which other processes of the machine disturb least: the median over turns, with
extremes.
"""

import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo

from quire.engine.parallel.addresses import AddressBook
from quire.engine.parallel.shared_memory import MemoryLayout, SharedRanks, create_memory
from quire.engine.parallel.tcp import NetworkRanks
from quire.extension.isas import set_threads_of_kernels
from quire.kernels.cpp.cpp_gather import REGION_BYTES
from quire.model.sharding import Cut, Shard
from quire_lab.bench.report import machine_facts

SIZES = ((1, 896), (1, 4096), (8, 4096), (64, 4096), (512, 4096))  # rows of a decode or a chunk, columns
Exchange = Callable[[Tensor], Tensor]


def main(
    seconds: Annotated[float, typer.Option(help="of each way and size, in each turn")] = 0.3, turns: int = 3
) -> None:
    """Print microseconds of an exchange."""
    torch.set_num_threads(1)
    set_threads_of_kernels(1)
    ours, theirs = socket.create_server(("127.0.0.1", 0)), get_context("fork").Pipe()
    memory, store = create_memory(MemoryLayout(REGION_BYTES, 1, 1)), os.memfd_create("store")
    place = ours.getsockname()
    process = get_context("fork").Process(target=run, args=(1, theirs[1], memory, store, place, None, seconds, turns))
    process.start()
    found = run(0, theirs[0], memory, store, place, ours, seconds, turns)
    process.join()
    print(machine_facts())
    for (num_rows, width), ways in found.items():
        print(f"{num_rows} x {width}: " + ", ".join(f"{way} {spread(values)}" for way, values in ways.items()))


def spread(values: list[float]) -> str:
    """Return the median and the extremes."""
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f}) us"


def run(
    rank: int, pipe: Connection, memory: int, store: int, place: Any, listener: socket.socket | None,  # noqa: ANN401
    seconds: float, turns: int,
) -> dict[tuple[int, int], dict[str, list[float]]]:  # fmt: skip
    """Exchange, and return the medians of each turn."""
    shard = Shard(rank, 2)
    shared = SharedRanks(shard, MemoryLayout(REGION_BYTES, 1, 1), memory)
    shared.reset()
    book = AddressBook(pipe.send)
    network = NetworkRanks(shard, "127.0.0.1", book)
    entries = Entries(pipe, book)
    entries.pass_on(network.reset)
    gloo: Any = ProcessGroupGloo(FileStore(f"/proc/self/fd/{store}", 2), rank, 2)
    other = listener.accept()[0] if listener else socket.create_connection(place)
    other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found: dict[tuple[int, int], dict[str, list[float]]] = {}
    for num_rows, width in SIZES:
        cut = Cut((0, width // 2, width))
        ways: dict[str, Exchange] = {
            "shared memory": shared.gather(cut), "TCP": network.gather(cut),
            "all-gather": lambda own: all_gather(gloo, own), "send, receive": lambda own: swap(gloo, rank, own),
            "sockets": lambda own: over_sockets(other, own),
        }  # fmt: skip
        own = torch.randn(num_rows, width // 2).bfloat16()
        found[num_rows, width] = {way: [] for way in ways}
        for _ in range(turns):
            for way, exchange in ways.items():
                found[num_rows, width][way].append(measured(exchange, own, shared, rank, seconds))
    return found


class Entries:
    """Entries of the address book that the other process publishes."""

    def __init__(self, pipe: Connection, book: AddressBook) -> None:
        self._pipe, self._book = pipe, book

    def pass_on(self, connect: Callable[[], None]) -> None:
        """Connect, in a thread beside the one that reads."""
        def read() -> None:
            while (entry := self._pipe.recv()) is not None:
                self._book.add(entry)

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        connect()
        self._pipe.send(None)
        reading.join()


def measured(exchange: Exchange, own: Tensor, shared: SharedRanks, rank: int, seconds: float) -> float:
    """Return the microseconds within which a tenth of exchanges end; rank 0 decides how many there are."""
    exchange(own)
    began_s = time.perf_counter()
    for _ in range(10):
        exchange(own)
    count = torch.tensor([[max(20, int(10 * seconds / (time.perf_counter() - began_s)))]])
    times_s = []
    for _ in range(int(shared.broadcast(None if rank else count, (1, 1), torch.int64))):
        began_s = time.perf_counter()
        exchange(own)
        times_s.append(time.perf_counter() - began_s)
    return 1e6 * statistics.quantiles(times_s, n=10)[0]


def all_gather(gloo: Any, own: Tensor) -> Tensor:  # noqa: ANN401 (of which torch's types know no method)
    """Gather alike parts."""
    received = own.new_empty(2, *own.shape)
    gloo._allgather_base(received.view(-1), own.view(-1)).wait()
    return torch.cat([*received], dim=1)


def swap(gloo: Any, rank: int, own: Tensor) -> Tensor:  # noqa: ANN401
    """Send a part, and receive the other."""
    received = torch.empty_like(own)
    sending, receiving = gloo.send([own], 1 - rank, 0), gloo.recv([received], 1 - rank, 0)
    sending.wait()
    receiving.wait()
    return torch.cat([own, received] if rank == 0 else [received, own], dim=1)


def over_sockets(other: socket.socket, own: Tensor) -> Tensor:
    """Send a part in pieces that the sockets hold, and receive the other."""
    received = torch.empty_like(own)
    sent, read = memoryview(own.view(torch.uint8).numpy()).cast("B"), memoryview(received.view(torch.uint8).numpy())
    read = read.cast("B")
    for start in range(0, len(sent), 1 << 16):
        other.sendall(sent[start : start + (1 << 16)])
        at, stop = start, min(start + (1 << 16), len(read))
        while at < stop:
            at += other.recv_into(read[at:stop])
    return torch.cat([own, received], dim=1)


if __name__ == "__main__":
    typer.run(main)
