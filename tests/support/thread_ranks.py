"""Ranks of tensor parallelism as threads of one process: exchanges through shared memory as between processes."""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.core.arrays import Array
from quire.engine.parallel import rank_messages
from quire.engine.parallel.channel import BEAT_INTERVAL_S, Channel
from quire.engine.parallel.peer import Peer
from quire.engine.parallel.rank import serve
from quire.engine.parallel.rank_messages import MemoryLayout
from quire.engine.parallel.shared_memory import SharedRanks, create_memory
from quire.engine.parallel.starters import ForkedRanks
from quire.kernels.cpp.cpp_gather import InterruptedExchangeError
from quire.model.decoder import Decoder
from quire.model.sharding import Mode, Shard
from quire.model.spec import DecoderSpec

T = TypeVar("T")


def make_ranks(num_ranks: int, layout: MemoryLayout, mode: Mode = "gather") -> list[SharedRanks]:
    """Return the ranks over memory that each of them has mapped by itself."""
    descriptor = create_memory(layout)
    try:
        return [SharedRanks(Shard(rank, num_ranks, mode), layout, descriptor) for rank in range(num_ranks)]
    finally:
        os.close(descriptor)


def in_threads(ranks: Sequence[SharedRanks], call: Callable[[SharedRanks], T]) -> list[T]:
    """Return what `call` returns for each rank, run all at once; after an exception in one, the others end too."""

    def run(rank: SharedRanks) -> T:
        try:
            return call(rank)
        except BaseException:
            rank.group.interrupt()
            raise

    with ThreadPoolExecutor(len(ranks)) as threads:
        futures = [threads.submit(run, rank) for rank in ranks]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, InterruptedExchangeError)), errors[0])
    return [future.result() for future in futures]


class RankDecoder:
    """A rank's decoder with logits of its own on rank 0, and zeros for those of the others."""

    def __init__(self, decoder: Decoder, *, is_first: bool) -> None:
        self._decoder, self._is_first = decoder, is_first

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._decoder, name)

    def logits(self, hidden: Array) -> Array:
        if self._is_first:
            found: Array = self._decoder.logits(hidden).copy()
            return found
        self._decoder.head_sums(hidden)
        return np.zeros((len(hidden), self._decoder.vocab_size), np.float32)


def logits_of_ranks(
    num_ranks: int, spec: DecoderSpec, load: Callable[[SharedRanks], Decoder], use: Callable[[RankDecoder], Tensor],
    mode: Mode = "gather",
) -> Tensor:  # fmt: skip
    """Return rank 0's result of `use`, which every rank calls with its decoder."""
    ranks = make_ranks(num_ranks, MemoryLayout.of(spec, 8, num_ranks), mode)

    def run(rank: SharedRanks) -> Tensor:
        with torch.inference_mode():
            return use(RankDecoder(load(rank), is_first=rank.shard.rank == 0))

    return in_threads(ranks, run)[0]


def assert_ranks_have_the_bits_of_one(
    spec: DecoderSpec, load: Callable[[SharedRanks | None], Decoder], use: Callable[[Any], Tensor],
    rank_counts: Sequence[int] = (2, 3, 4),
) -> None:  # fmt: skip
    """Compare what `use` returns for a whole decoder with what it does for the ranks."""
    counts = *(net.num_value_heads for net in spec.delta_nets), *(each.num_heads for each in spec.mambas)
    alone, most = use(load(None)), min([spec.num_heads, *counts])
    for num_ranks in (count for count in rank_counts if count <= most):
        found = logits_of_ranks(num_ranks, spec, load, use)
        assert torch.equal(found, alone), f"{num_ranks} ranks"


class ThreadRanks(ForkedRanks):
    """A starter of ranks as threads of this process, which run what the processes run."""

    def start(self, inherited: Sequence[int], check: object, lose: object) -> Iterator[Peer]:
        """Yield each rank once its thread is started."""
        for rank in range(1, self._num_ranks):
            ours, theirs = socket.socketpair()
            thread = RankThread(theirs, os.dup(inherited[0]))
            self._peers.append(Peer(rank, Channel(ours, rank_messages.decode_report), thread, "a thread"))
            yield self._peers[-1]


class RankThread:
    """A thread in place of a rank's process."""

    def __init__(self, connection: socket.socket, memory: int) -> None:
        self.pid = os.getpid()
        self._memory = memory
        self._channel = Channel(connection, rank_messages.decode_command)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join()  # it ends with its socket, however long a step takes
        return 0

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed."""

    def _run(self) -> None:
        has_ended = threading.Event()
        self._channel.start(has_ended.set)
        beating = threading.Thread(target=self._beat, args=(has_ended,))
        beating.start()
        with suppress(EOFError, ConnectionError):
            serve(self._channel, self._memory)
        self._channel.close()
        os.close(self._memory)
        beating.join()

    def _beat(self, has_ended: threading.Event) -> None:
        while not has_ended.wait(BEAT_INTERVAL_S):
            self._channel.beat()
