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


def main() -> None:
    """Serve the socket and the memory with the numbers given as arguments."""
    logging.basicConfig(format="%(asctime)s %(levelname)s rank: %(message)s")
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), messages.decode_command)
    channel.start(lambda: os._exit(0))
    threading.Thread(target=beat, args=(channel, lambda: os._exit(1)), name="beat", daemon=True).start()
    from quire.engine.exchange.shared_memory import MemoryLayout, SharedRanks  # noqa: PLC0415
    from quire.engine.parallel.rank import serve  # noqa: PLC0415 (loads torch, for seconds)

    def open_ranks(load: messages.Load) -> SharedRanks:
        return SharedRanks(load.shard, MemoryLayout(*load.layout), int(sys.argv[2]))

    try:
        serve(channel, open_ranks)
    except (ConfigError, ModelError):
        sys.exit(1)  # reported


if __name__ == "__main__":
    main()
