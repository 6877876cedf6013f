"""Process of a rank on the machine of rank 0: `python -m quire.engine.parallel.process FD MEMORY`, started by rank 0.

It beats from the first moment, while torch is still being loaded, and ends with rank 0's end of the socket, at any
time.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from quire.core.errors import ConfigError, ModelError
from quire.engine.parallel import messages
from quire.engine.parallel.channel import BEAT_INTERVAL_S, Channel


def beat(channel: Channel, on_silence: Callable[[], None]) -> None:
    """Send heartbeats until rank 0 is silent for too long."""
    while not channel.is_silent:
        channel.beat()
        time.sleep(BEAT_INTERVAL_S)
    on_silence()


def run_rank(serve: Callable[[Channel], None]) -> None:
    """Serve the socket with the number of the first argument; errors of `serve` have been reported."""
    logging.basicConfig(format="%(asctime)s %(levelname)s rank: %(message)s")
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), messages.decode_command)
    channel.start(lambda: os._exit(0))
    threading.Thread(target=beat, args=(channel, lambda: os._exit(1)), name="beat", daemon=True).start()
    try:
        serve(channel)
    except (ConfigError, ModelError):
        sys.exit(1)


def main() -> None:
    """Serve the socket and the memory with the numbers given as arguments."""
    run_rank(_serve)


def _serve(channel: Channel) -> None:
    from quire.engine.parallel.rank import bring_up, start  # noqa: PLC0415 (loads torch, for seconds)
    from quire.engine.parallel.shared_memory import MemoryLayout, SharedRanks  # noqa: PLC0415

    memory = int(sys.argv[2])
    start(channel, lambda load: bring_up(channel, SharedRanks(load.shard, MemoryLayout(*load.layout), memory), load))()


if __name__ == "__main__":
    main()
