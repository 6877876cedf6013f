"""Process of a rank: `python -m quire.engine.parallel.process FD [INHERITED]`.

Rank 0 starts those of its machine, with a socket to itself and a descriptor of what they exchange through. The command
of a node, or a Ray actor, starts those that join over TCP, with a socket to itself alone. A process beats from the
first moment, while torch is still being loaded, and ends with the other end of its sockets, at any time.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from quire.core import logs
from quire.core.errors import ConfigError, EngineError, ModelError
from quire.engine.messages import failed
from quire.engine.options import EngineOptions
from quire.engine.parallel import rank_messages
from quire.engine.parallel.addresses import AddressBook
from quire.engine.parallel.channel import BEAT_INTERVAL_S, Channel
from quire.engine.parallel.join import join_run


def main() -> None:
    """Serve the descriptors with the numbers given as arguments."""
    logs.set_up("rank", logging.WARNING)  # the engine logs the same
    connection, *inherited = map(int, sys.argv[1:])
    if inherited:
        run_forked(connection, inherited[0])
    else:
        run_member(connection)


def run_forked(connection: int, inherited: int) -> None:
    """Serve rank 0, which has started this process."""
    channel = Channel(socket.socket(fileno=connection), rank_messages.decode_command)
    channel.start(lambda: os._exit(0))
    _start_beating(channel, lambda: os._exit(1))
    try:
        serve(channel, inherited)
    except (ConfigError, ModelError):  # reported before
        sys.exit(1)


def run_member(connection: int) -> NoReturn:
    """Join the run that the command of the node names, and serve rank 0."""
    agent = Channel(socket.socket(fileno=connection), rank_messages.decode_join)
    agent.start(lambda: os._exit(1))
    try:
        Member(agent, agent.receive()).run()
    except EOFError:
        threading.Event().wait()  # the thread that reads ends the process
    except Exception as error:
        if not isinstance(error, EngineError):
            logging.exception("the rank ends")
        failure = failed(error)
        agent.offer(rank_messages.Ended(failure.kind, failure.message))
    os._exit(1)


class Member:
    """A rank that joins, its channel to rank 0, and that to the command of its node. Raises as `join_run`."""

    def __init__(self, agent: Channel, join: rank_messages.Join) -> None:
        self._agent, self._join = agent, join
        self._reason = f"rank 0 at {join.address} port {join.port} has closed the connection"
        connection, seals = join_run(join)
        self._channel = Channel(connection, rank_messages.decode_command, seals)
        self._book = AddressBook(self._channel.send)

    def run(self) -> NoReturn:
        """Serve rank 0. Errors as in `quire.engine.parallel.rank.serve`."""
        join, channel = self._join, self._channel
        channel.silence_limit_s = join.options.stall_limit
        silence = f"rank 0 at {join.address} gave no sign for {join.options.stall_limit:g} s (stall_limit)"
        _start_beating(channel, lambda: self.end(silence))
        _start_beating(self._agent, lambda: None)
        self._agent.send(rank_messages.HasJoined())
        channel.start(lambda: self.end(self._reason), self._handles)
        serve(channel, self._book, join.options)

    def end(self, reason: str) -> NoReturn:
        """End the process, with a reason for the command of the node."""
        self._agent.offer(rank_messages.Ended("EngineError", reason))
        os._exit(1)

    def _handles(self, command: rank_messages.Command) -> bool:
        if isinstance(command, rank_messages.End):
            self._reason = command.reason
            return True
        if isinstance(command, rank_messages.Published):
            self._book.add(command)
            return True
        return False


def serve(channel: Channel, inherited: int | AddressBook, own: EngineOptions | None = None) -> NoReturn:
    """Serve rank 0, as `quire.engine.parallel.rank.serve`."""
    from quire.engine.parallel import rank  # noqa: PLC0415 (loads torch, for seconds)

    rank.serve(channel, inherited, own)


def _start_beating(channel: Channel, on_silence: Callable[[], None]) -> None:
    """Start to send heartbeats; `on_silence` is called when the other end is silent for too long."""

    def beat() -> None:
        while not channel.is_silent():
            channel.beat()
            time.sleep(BEAT_INTERVAL_S)
        on_silence()

    threading.Thread(target=beat, name="beat", daemon=True).start()


if __name__ == "__main__":
    main()
