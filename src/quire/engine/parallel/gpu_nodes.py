"""Rank 0 of a run over the GPUs of several machines (door of the room)."""

from quire.engine.parallel.gpu_ranks import GpuRankSet
from quire.engine.parallel.nccl import GpuRanks, open_network_store
from quire.engine.parallel.rank_set import Peer
from quire.engine.parallel.starters import NodeRankSet


class GpuNodeRankSet(NodeRankSet, GpuRankSet):
    """All ranks but this one, on the GPUs of this machine and of others."""

    _store_port: int

    def _own_exchange(self) -> GpuRanks:
        store, self._store_port = open_network_store(self._run_address.address, self._num_ranks)
        return self._ranks_by(lambda: store)

    def _host_of(self, peer: Peer) -> str:
        return f"{self._run_address.address} {self._store_port}"
