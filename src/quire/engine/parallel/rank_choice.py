"""Choice of the starter, the transport and the device of ranks."""

import importlib.util

from quire.core.errors import ConfigError, NotInstalledError
from quire.core.host_limits import num_threads
from quire.core.optional_package import NEEDS_KERNELS, NEEDS_TORCH, needs_library
from quire.engine.devices import uses_gpu
from quire.engine.options import EngineOptions
from quire.engine.parallel.rank_set import RankSet, Starter, Transport
from quire.engine.parallel.starters import ByHand, ForkedRanks, JoinedRanks, Placement
from quire.kernels.cpp.isas import usable_isas


def make_rank_set(options: EngineOptions) -> RankSet:
    """Return all ranks of a run but this one. ConfigError for what is not served.

    | started | on CPUs | on GPUs |
    | --- | --- | --- |
    | as children | shared memory | NCCL, whose ranks meet in a file |
    | by hand, on several machines | gloo over TCP | NCCL, whose ranks meet at a port of rank 0 |
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
