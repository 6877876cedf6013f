"""Rank 0 of a run whose other ranks Ray places (door of the room).

Ray starts and watches a process for each rank. Plans, heartbeats and activations travel as between nodes that are
started by hand (`starters`), with a secret that each rank gets by the call of its actor.
"""

import secrets
import threading

import msgspec

from quire.engine.options import EngineOptions
from quire.engine.parallel.addresses import RunAddress, checked_address
from quire.engine.parallel.ray_placement import RankPlaces, RayConnection, wait_for_first
from quire.engine.parallel.starters import NodeRankSet

KEY_BYTES = 32
PLACE_SHARE = 0.5               # of the start timeout, for Ray to find room
DEFAULT_ADDRESS = "127.0.0.1"   # of master_addr: then Ray's own address of this machine is taken


class RayRankSet(NodeRankSet):
    """All ranks but this one, in processes that Ray places."""

    def __init__(self, options: EngineOptions) -> None:
        self._connection = RayConnection()
        self._places: RankPlaces | None = None
        self._waiting: threading.Thread | None = None
        try:
            is_given = options.master_addr != DEFAULT_ADDRESS
            address = checked_address(options.master_addr if is_given else self._connection.address, options)
            super().__init__(options, RunAddress(address, 0, secrets.token_bytes(KEY_BYTES)))
        except BaseException:
            self._connection.close()
            raise

    def close(self, reason: str = "rank 0 was closed") -> None:
        """End all ranks and their actors, and free their places. Idempotent."""
        super().close(reason)
        places, self._places = self._places, None
        if places is not None:
            places.close()
        if self._waiting is not None and threading.current_thread() is not self._waiting:
            self._waiting.join()
        self._connection.close()

    def _start_members(self, port: int) -> None:
        """Place the ranks, and start all but this one."""
        options, ranks = self._options, range(1, self._num_ranks)
        timeout_s = PLACE_SHARE * options.start_timeout
        self._places = RankPlaces(self._num_ranks, options.nnodes, self._threads_of_each, timeout_s)
        encoded = msgspec.msgpack.encode(options)
        ends = self._places.start(ranks, encoded, self._run_address.address, port, self._run_address.key)
        self._waiting = threading.Thread(
            target=wait_for_first, args=(ends, ranks, self._lose), name="actors", daemon=True
        )
        self._waiting.start()

    @property
    def _threads_of_each(self) -> int:
        """Threads of each rank, and CPUs that Ray reserves for it: a machine's, divided among its ranks."""
        return max(1, self._num_threads * self._options.nnodes // self._num_ranks)

    def _threads_of(self, rank: int) -> int:
        """Return the threads of rank 0; the others have them by their environment."""
        return self._threads_of_each if rank == 0 else 0
