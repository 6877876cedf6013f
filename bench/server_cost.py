"""Cost of the server's own process: CPU of short completions and of streamed tokens, memory of waiting requests.

    python bench/server_cost.py                       # this checkout
    python bench/server_cost.py OLD NEW --rounds 5    # two trees with a .venv each, in turn

The demo model answers, so that the engine, a process of its own, costs little and is not counted. CPU time is that of
all threads of the server's process, by Linux' accounting of the scheduler, between the first request and the last
response; it needs no quiet machine, but a busy one makes caches cold. Memory is the growth of resident memory while
requests wait, with a connection each and a prompt of 16 tokens, behind a few long ones in an engine of one sequence.
Every round starts the servers anew. Of each figure the table holds the median over the rounds and, in brackets, the
extremes; the last column is new over old, within a round.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import typer

READY = re.compile(r"Quire is serving .+ on http://127\.0\.0\.1:(\d+)")
MAIN = "from quire.cli.main import main; main()"
FLAGS = ("--port", "0", "--num-kv-blocks", "2048", "--max-queued-requests", "4096")
NUM_CONNECTIONS = 16
STREAM_TOKENS = 200
WARM_UP = 300                  # requests before anything is measured
NUM_LONG = 32                  # requests that the waiting ones wait for
PROMPT = "The quick brown fox jumps"


@dataclass(frozen=True)
class Server:
    """A server that is ready."""

    process: asyncio.subprocess.Process
    port: int

    def cpu_s(self) -> float:
        """Return the CPU seconds of all threads so far."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9

    def resident_bytes(self) -> int:
        """Return the resident memory."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def serving(tree: Path | None, log: Path, max_num_seqs: int) -> AsyncIterator[Server]:
    """Run the server of a tree; None: of this environment."""
    python = sys.executable if tree is None else str(tree / ".venv" / "bin" / "python")
    with log.open("w", encoding="utf-8") as errors:
        process = await asyncio.create_subprocess_exec(
            python, "-c", MAIN, "serve", *FLAGS, "--max-num-seqs", str(max_num_seqs), stdout=subprocess.PIPE,
            stderr=errors, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            if found := READY.search(line.decode()):
                yield Server(process, int(found[1]))
                break
        else:
            raise SystemExit(f"the server ended before it was ready:\n{log.read_text()}")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


def request(path: str, **body: object) -> bytes:
    """Return the bytes of a request, with the headers of a usual client."""
    sent = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: application/json\r\naccept-encoding: gzip\r\n"
        f"connection: keep-alive\r\ncontent-type: application/json\r\nuser-agent: bench\r\n"
        f"authorization: Bearer none\r\ncontent-length: {len(sent)}\r\n\r\n"
    )
    return head.encode() + sent


async def answer_to(sent: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Send a request; return the body of its response."""
    writer.write(sent)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head
    if found := re.search(rb"content-length: (\d+)", head):
        return await reader.readexactly(int(found[1]))
    body = b""
    while size := int((await reader.readline()).strip(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return body


async def load(port: int, sent: bytes, count: int) -> None:
    """Send a request `count` times, over NUM_CONNECTIONS connections."""
    left = iter(range(count))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in left:
            await answer_to(sent, reader, writer)
        writer.close()

    await asyncio.gather(*(client() for _ in range(NUM_CONNECTIONS)))


async def load_cpu_ms(server: Server, sent: bytes, count: int) -> float:
    """Return the CPU milliseconds of a request."""
    before = server.cpu_s()
    await load(server.port, sent, count)
    return (server.cpu_s() - before) / count * 1e3


async def completion_cpu_ms(server: Server) -> float:
    return await load_cpu_ms(server, request("/v1/completions", prompt=PROMPT, max_tokens=2), 1000)


async def chat_cpu_ms(server: Server) -> float:
    messages = [{"role": "user", "content": PROMPT}]
    return await load_cpu_ms(server, request("/v1/chat/completions", messages=messages, max_tokens=2), 500)


async def token_cpu_us(server: Server) -> float:
    sent = request("/v1/completions", prompt=PROMPT, max_tokens=STREAM_TOKENS, ignore_eos=True, stream=True)
    return await load_cpu_ms(server, sent, 4 * NUM_CONNECTIONS) / STREAM_TOKENS * 1e3


async def waiting_kb(server: Server) -> float:
    """Return the kB of a request that waits, its connection included."""
    async def send(sent: bytes) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        writers.append(writer)

    async def wait_for(count: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        found = 0.0
        while found < count:
            page = await answer_to(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n", reader, writer)
            (found,) = map(float, re.findall(rb"^vllm:num_requests_waiting\{.*\} (.+)$", page, re.MULTILINE))
        writer.close()

    writers: list[asyncio.StreamWriter] = []
    for _ in range(NUM_LONG):
        await send(request("/v1/completions", prompt=[1], max_tokens=1000, ignore_eos=True))
    await wait_for(NUM_LONG - 1)
    before, count = server.resident_bytes(), 1000
    for _ in range(count):
        await send(request("/v1/completions", prompt=list(range(1, 17)), max_tokens=2))
    await wait_for(count)
    grown = server.resident_bytes() - before
    for writer in writers:
        writer.close()
    return grown / count / 1e3


class Measure(NamedTuple):
    """A figure: its name in the table, the function, and how many sequences the engine runs at a time."""

    label: str
    function: Callable[[Server], Awaitable[float]]
    max_num_seqs: int = 64


MEASURES = {
    "completion": Measure("CPU of a completion of 2 tokens, ms", completion_cpu_ms),
    "chat": Measure("CPU of a chat of 2 tokens, ms", chat_cpu_ms),
    "token": Measure("CPU of a streamed token, us", token_cpu_us),
    "waiting": Measure("memory of a waiting request, kB", waiting_kb, max_num_seqs=1),
}


async def measure(tree: Path | None, folder: Path, names: list[str]) -> dict[str, float]:
    """Return the figures of one turn of a tree."""
    figures = {}
    for max_num_seqs in sorted({MEASURES[name].max_num_seqs for name in names}):
        async with serving(tree, folder / "server.log", max_num_seqs) as server:
            await load(server.port, request("/v1/completions", prompt=PROMPT, max_tokens=2), WARM_UP)
            for name in names:
                if MEASURES[name].max_num_seqs == max_num_seqs:
                    figures[name] = await MEASURES[name].function(server)
    return figures


def cell(values: list[float]) -> str:
    return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main(
    trees: Annotated[list[Path] | None, typer.Argument(help="two trees, each with a .venv; none: this one")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    only: Annotated[list[str] | None, typer.Option(help=", ".join(MEASURES))] = None,
) -> None:
    """Measure the trees in turn, and print a table."""
    names, measured = only or [*MEASURES], list(trees) if trees else [None]
    found: list[list[dict[str, float]]] = [[] for _ in measured]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for figures, tree in zip(found, measured, strict=True):
                figures.append(asyncio.run(measure(tree, Path(folder), names)))
    for name in names:
        columns = [[figures[name] for figures in turns] for turns in found]
        ratios = [[new / old for old, new in zip(columns[0], column, strict=True)] for column in columns[1:]]
        print(f"| {MEASURES[name].label} | {' | '.join(map(cell, columns + ratios))} |")


if __name__ == "__main__":
    typer.run(main)
