"""Process of a rank that joins over TCP: `python -m quire.engine.parallel.member FD`, started by a node's command.

It ends with that command, with the connection to rank 0, and when rank 0 sends no heartbeats.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from quire.core.errors import ConfigError, EngineError
from quire.engine.messages import failed
from quire.engine.parallel import messages
from quire.engine.parallel.address_book import AddressBook
from quire.engine.parallel.channel import Channel
from quire.engine.parallel.handshake import FrameSeal, answer
from quire.engine.parallel.node_messages import Ended, Join, Joined, decode_join
from quire.engine.parallel.process import beat

CONNECT_SHARE = 0.8         # of the start timeout, for node 0 to listen: before it gives up
CONNECT_PAUSE_S = 0.2


class Member:
    """A rank, its channel to rank 0, and that to the command of its node. Raises as `join_run`."""

    def __init__(self, agent: Channel, join: Join) -> None:
        self._agent, self._join = agent, join
        self._reason = f"rank 0 at {join.address} port {join.port} has closed the connection"
        connection, seals = join_run(join)
        self._channel = Channel(connection, messages.decode_command, seals)
        self._book = AddressBook(self._channel.send)

    def run(self) -> NoReturn:
        """Join the run, and serve it. Errors as of `quire.engine.parallel.rank.start`."""
        join, channel = self._join, self._channel
        channel.silence_limit_s = join.options.stall_limit
        silence = f"rank 0 at {join.address} gave no sign for {join.options.stall_limit:g} s (stall_limit)"
        for to, on_silence in ((channel, lambda: self.end(silence)), (self._agent, lambda: None)):
            threading.Thread(target=beat, args=(to, on_silence), name="beat", daemon=True).start()
        self._agent.send(Joined())
        channel.start(lambda: self.end(self._reason), self._handles)
        from quire.engine.parallel.rank import start  # noqa: PLC0415 (loads torch, for seconds)

        start(channel, self._bring_up, join.options)()

    def end(self, reason: str) -> NoReturn:
        """End the process, with a reason for the command of the node."""
        self._agent.offer(Ended("EngineError", reason))
        os._exit(1)

    def _bring_up(self, load: messages.Load) -> Callable[[], NoReturn]:
        """Load the rank's part, on the kind of device that rank 0 has."""
        if load.options.device == "cuda":
            from quire.engine.parallel.gpu_rank import bring_up as bring_up_on_gpu  # noqa: PLC0415
            from quire.engine.parallel.nccl import network_store  # noqa: PLC0415 (loads torch)

            return bring_up_on_gpu(self._channel, partial(network_store, load.host, load.num_ranks), load)
        from quire.engine.parallel.rank import bring_up  # noqa: PLC0415
        from quire.engine.parallel.tcp import NetworkRanks  # noqa: PLC0415 (loads torch)

        return bring_up(self._channel, NetworkRanks(load.shard, load.host, self._book), load)

    def _handles(self, command: messages.Command) -> bool:
        if isinstance(command, messages.End):
            self._reason = command.reason
            return True
        if isinstance(command, messages.Published):
            self._book.add(command)
            return True
        return False


def join_run(join: Join) -> tuple[socket.socket, tuple[FrameSeal, FrameSeal]]:
    """Return a connection to rank 0 that has proven the secret, and its seals. Tries until the time is over.

    EngineError if rank 0 does not listen for long, or closes every connection. ConfigError as in `answer`.
    """
    limit_s = CONNECT_SHARE * join.options.start_timeout
    deadline_s = time.monotonic() + limit_s
    while True:
        connection = None
        failed = "did not listen"
        try:
            connection = socket.create_connection((join.address, join.port), timeout=CONNECT_PAUSE_S * 10)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            failed = "did not let this rank join"
            return connection, answer(connection, join.key, join.rank, max(1.0, deadline_s - time.monotonic()))
        except OSError as error:
            if connection is not None:
                connection.close()
            if time.monotonic() > deadline_s:
                raise EngineError(
                    f"node 0 {failed} at {join.address} port {join.port} within {limit_s:g} s "
                    f"(master_addr, master_port, start_timeout): {error}"
                ) from error
            time.sleep(CONNECT_PAUSE_S)


def main() -> None:
    """Serve the socket with the number given as the only argument."""
    logging.basicConfig(format="%(asctime)s %(levelname)s rank: %(message)s")
    agent = Channel(socket.socket(fileno=int(sys.argv[1])), decode_join)
    agent.start(lambda: os._exit(1))
    try:
        Member(agent, agent.receive()).run()
    except EOFError:
        threading.Event().wait()  # the thread that reads ends the process
    except Exception as error:
        if not isinstance(error, EngineError):
            logging.exception("the rank ends")
        failure = failed(error)
        agent.offer(Ended("ConfigError" if isinstance(error, ConfigError) else failure.kind, failure.message))
        os._exit(1)


if __name__ == "__main__":
    main()
