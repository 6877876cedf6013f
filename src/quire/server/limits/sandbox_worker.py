"""Sandbox process: one job after the other, each within limits on time and memory that the kernel enforces.

For work on what clients or models bring, where the work has no bound of its own: a template, a grammar. The kernel
ends the process when a job takes too much CPU time, also after the server has ended; when memory runs out, the process
ends itself. Time in which the machine runs something else does not count. Between jobs it ends with its stream.
`quire.server.limits.sandbox` has the other end.
"""

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable

from quire.core.frames import read_frame

MEMORY_LIMIT_BYTES = 1024**3
OUT_OF_MEMORY = 3           # exit status


def serve_jobs(answer: Callable[[bytes], bytes], limit_s: float) -> None:
    """Answer each frame of the socket, the number of which is the only argument of the process, until it closes.

    `answer` takes the msgpack of a frame and returns a frame, within `limit_s` seconds of CPU time. A MemoryError that
    it raises ends the process without cleanup, which would need memory.
    """
    _set_limits()
    connection = socket.socket(fileno=int(sys.argv[1]))
    stream = connection.makefile("rb")
    while (body := read_frame(stream)) is not None:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            reply = answer(body)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            connection.sendall(reply)
        except OSError:
            return  # the server has ended


def _set_limits() -> None:
    """Ignore SIGINT and SIGTERM, which the server handles, and set the limits that the kernel enforces."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
