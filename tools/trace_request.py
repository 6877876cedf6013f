"""Trace of one request: the Python calls, functions, files and moves between files that it takes.

    python tools/trace_request.py [decode | completion]

`decode` is one step of one sequence in `LLM`, without the text; `completion` is what the server's process does for one
completion of two tokens over HTTP, from its bytes to those of the answer. With a name, the calls are printed in order.
A move is a call in another file than the call before. Files are those of the package; a resumed coroutine is a call.
"""

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import quire
from quire import LLM, SamplingParams
from quire.engine.launcher import EngineProcess
from quire.engine.options import EngineOptions
from quire.server.app import create_app
from quire.server.http.http_server import HttpServer
from quire.server.http.sockets import bind, port_of
from quire.server.lifecycle import close_service, connect
from quire.server.options import ServerOptions

# At most this much is paid by one request. A change that takes less lowers them: the test fails below `SLACK` of a
# budget, too. A completion takes 296 calls and 145 moves; 303 and 148 where each message of the engine arrives apart.
BUDGETS = {
    "decode": {"calls": 107, "files": 33, "moves": 60},
    "completion": {"calls": 306, "files": 32, "moves": 150},
}
SLACK = 0.85  # Python 3.12 makes no call of a comprehension, a fifteenth of the calls of 3.11

OPTIONS = EngineOptions(num_kv_blocks=64, max_num_seqs=4)
BODY = {"model": "quire-demo", "prompt": "def add(", "max_tokens": 2, "temperature": 0.7, "top_p": 0.9}
HOST = "127.0.0.1"
TURNS = 12  # the shortest counts: two messages may arrive in one read, or a heartbeat between them

SOURCES = f"{Path(quire.__file__).parent}/"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a Python function of the package: its file, below the package, and its name with its class."""

    file: str
    function: str


def figures(calls: list[Call]) -> dict[str, int]:
    """Return what the calls cost a reader; `BUDGETS` has limits for the first three."""
    files = {call.file for call in calls}
    return {
        "calls": len(calls),
        "files": len(files),
        "moves": sum(before.file != after.file for before, after in pairwise(calls)),
        "functions": len(set(calls)),
        "lines": sum(Path(SOURCES, file).read_bytes().count(b"\n") for file in files),
    }


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Record the calls of this thread, and of those that it starts."""
    calls: list[Call] = []

    def note(frame, event: str, argument: object) -> None:  # noqa: ANN001 (a frame)
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCES):
            calls.append(Call(code.co_filename[len(SOURCES) :], code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def trace_decode() -> list[Call]:
    """Return the calls of one step of one sequence that decodes."""
    params = SamplingParams(max_tokens=8, temperature=0.7, top_p=0.9, detokenize=False)
    steps: list[list[Call]] = []
    with LLM(num_kv_blocks=64, max_num_seqs=4) as llm, recorded() as calls:
        for _ in llm.stream([[5, 6, 7, 8, 9]], params):
            steps.append(calls[:])
            calls.clear()
    return shortest(steps[2:-1])


def trace_completion(spawn: Callable[[EngineOptions], EngineProcess] = EngineProcess.spawn) -> list[Call]:
    """Return the calls of the server for one completion, the engine's not among them. `spawn` starts the engine."""
    with bind(HOST, 0) as listener:
        return asyncio.run(_trace_completion(spawn(OPTIONS), listener))


async def _trace_completion(child: EngineProcess, listener: socket.socket) -> list[Call]:
    service = await connect([child], OPTIONS, ServerOptions())
    http = HttpServer(create_app(service))
    turns = []
    try:
        await http.start(listener, HOST)
        reader, writer = await asyncio.open_connection(HOST, port_of(listener))
        for turn in range(TURNS + 1):
            with recorded() as calls:
                await _complete(reader, writer)
            if turn:  # the first one loads what is loaded once
                turns.append(calls)
        writer.close()
    finally:
        await http.stop()
        await close_service(service)
    return shortest(turns)


async def _complete(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ask for a completion, and read all of the answer."""
    body = json.dumps(BODY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert answer.startswith(b"http/1.1 200"), answer
    await reader.readexactly(int(answer.split(b"content-length:")[1].split()[0]))


def shortest(turns: list[list[Call]]) -> list[Call]:
    """Return the turn with the fewest calls."""
    return min(turns, key=len)


TRACES = {"decode": trace_decode, "completion": trace_completion}


def main() -> None:
    """Print the figures beside their budgets, and for a trace that the arguments name its calls."""
    for name in sys.argv[1:] or TRACES:
        calls = TRACES[name]()
        if sys.argv[1:]:
            for before, call in pairwise([Call("", ""), *calls]):
                print(f"{'' if call.file == before.file else call.file:45} {call.function}")
        found, budgets = figures(calls), BUDGETS[name]
        figures_of = [f"{found[key]:,} {key}" + (f" of {budgets[key]}" if key in budgets else "") for key in found]
        print(f"{name + ':':12}" + ", ".join(figures_of))


if __name__ == "__main__":
    main()
