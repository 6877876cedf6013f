"""Command of a node other than the first: starts the processes of its ranks, and ends with them.

Loads no torch.
"""

import logging
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue

from quire.core.errors import ConfigError, EngineError, ModelError, error_of
from quire.engine.launcher import num_threads_of, spinning_environment, start_module, wait_or_kill
from quire.engine.options import EngineOptions
from quire.engine.parallel.addresses import master_address, secret_key
from quire.engine.parallel.channel import BEAT_INTERVAL_S, Channel
from quire.engine.parallel.rank_messages import Ended, HasJoined, Join, NodeReport, decode_node_report

log = logging.getLogger(__name__)

PROCESS_MODULE = "quire.engine.parallel.process"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


class Members:
    """Processes of ranks on this machine, each with so many threads, which join a run."""

    def __init__(
        self, options: EngineOptions, num_threads: Mapping[int, int], address: str, port: int, key: bytes
    ) -> None:
        self._processes: list[tuple[subprocess.Popen[bytes], Channel]] = []
        self._ranks, self._stall_limit_s = list(num_threads), options.stall_limit
        self._ends = SimpleQueue[tuple[int, Ended | None]]()
        environment = spinning_environment()
        for rank, num_own in num_threads.items():
            process, connection = start_module(PROCESS_MODULE, env=environment | {"OMP_NUM_THREADS": str(num_own)})
            channel = Channel(connection, decode_node_report)
            channel.silence_limit_s = options.start_timeout
            channel.start(partial(self._ends.put, (rank, None)), partial(self._note, rank, channel))
            self._processes.append((process, channel))
            channel.send(Join(options, rank, address, port, key))

    def wait(self) -> EngineError:
        """Wait until one of them ends, or is silent because it is stopped; return the reason."""
        while True:
            with suppress(Empty):
                rank, ended = self._ends.get(timeout=BEAT_INTERVAL_S)
                break
            for rank, (process, channel) in zip(self._ranks, self._processes, strict=True):
                if channel.is_silent():
                    process.kill()
                    limit_s = channel.silence_limit_s
                    return EngineError(f"the process of rank {rank} gave no sign for {limit_s:g} s (stall_limit)")
        if ended is None:
            return EngineError(f"the process of rank {rank} has ended")
        return error_of(ended.kind, ended.message, EngineError)

    def close(self) -> None:
        """End the processes. Idempotent."""
        for _, channel in self._processes:
            channel.close()
        wait_or_kill([process for process, _ in self._processes])

    def _note(self, rank: int, channel: Channel, report: NodeReport) -> bool:
        if isinstance(report, HasJoined):
            channel.silence_limit_s = self._stall_limit_s
        else:
            self._ends.put((rank, report))
        return True


def threads_of(options: EngineOptions, ranks: Sequence[int]) -> Mapping[int, int]:
    """Return the threads of ranks on this machine, by its threads and all of its ranks."""
    num_local = options.tensor_parallel_size // options.nnodes
    return {rank: num_threads_of(rank % num_local, num_local, os.environ) for rank in ranks}


def run_node(options: EngineOptions, num_restarts: int = 0) -> EngineError:
    """Run the ranks of this node until they end, and after that again, `num_restarts` times; return the last reason.

    ConfigError for settings that do not work.
    """
    address, key = master_address(options), secret_key(options)
    num_local = options.tensor_parallel_size // options.nnodes
    ranks = range(options.node_rank * num_local, (options.node_rank + 1) * num_local)
    for number in range(num_restarts + 1):
        with running(options, ranks, address, key) as members:
            reason = members.wait()
        if isinstance(reason, ConfigError | ModelError) or number == num_restarts:
            break
        pause_s = min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S)
        log.error("%s; restart %d of %d in %g s (restart_engine)", reason, number + 1, num_restarts, pause_s)
        time.sleep(pause_s)
    return reason


@contextmanager
def running(options: EngineOptions, ranks: Sequence[int], address: str, key: bytes) -> Iterator[Members]:
    """Run ranks that join node 0; all have ended afterwards."""
    members = Members(options, threads_of(options, ranks), address, options.master_port, key)
    try:
        yield members
    finally:
        members.close()
