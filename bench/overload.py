"""Latency of refusals: bursts of twenty times what a server has places for, on connections that are open already.

    python bench/overload.py                      # the demo model, 4 rows and 8 places in the queue, 10 bursts of 240
    python bench/overload.py --bursts 3 MODEL

Every client sends its request at the same moment. Admitted requests are answered in full, the rest with 429. Of
these the table holds two times: the server's own, from the request that it has read to the answer that it has written
(`duration_s` of its log), and the client's, from the first byte sent to the last byte received, which also counts
requests served before on the same loop, the client's own work, and whatever else the machine does: look at the load.
What does not depend on that is the CPU time of the server's process for each request of a burst, answers included.
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import psutil
import typer
import uvloop

from http_overhead import server

NUM_SEATS, NUM_PLACES = 4, 8
NUM_REQUESTS = 20 * (NUM_SEATS + NUM_PLACES)
BODY = {"prompt": "def area(", "max_tokens": 64, "ignore_eos": True, "temperature": 0}
ARGUMENTS = ("--max-num-seqs", str(NUM_SEATS), "--max-queued-requests", str(NUM_PLACES))


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, float]:
    """Send a request; return the status of its answer and the seconds until all of it was there."""
    started_s = time.perf_counter()
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return int(head.split()[1]), time.perf_counter() - started_s


def computed_s(process: psutil.Process) -> float:
    """Return the seconds that a process has computed."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def burst(
    host: str, port: int, count: int, process: psutil.Process
) -> tuple[list[tuple[int, float]], float]:
    """Send so many requests at once, each on a connection of its own that is open and has served one request.

    Return the answers, and how long the server's process computed for them.
    """
    content = json.dumps(BODY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
    streams = [await asyncio.open_connection(host, port) for _ in range(count)]
    try:
        for reader, writer in streams:
            await ask(reader, writer, f"GET /version HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        before_s = computed_s(process)
        answers = await asyncio.gather(*(ask(*stream, head.encode() + content) for stream in streams))
        return answers, computed_s(process) - before_s
    finally:
        for _, writer in streams:
            writer.close()


def shown(name: str, times_s: Sequence[float]) -> str:
    """Return a row of the table."""
    percent = statistics.quantiles(times_s, n=100, method="inclusive")
    return f"{name:32}{percent[49] * 1e3:10.2f}{percent[98] * 1e3:10.2f}{max(times_s) * 1e3:10.2f}"


def main(model: Annotated[str | None, typer.Argument()] = None, bursts: int = 10) -> None:
    """Print the numbers of admitted and refused requests, and the times of refusals."""
    with tempfile.TemporaryDirectory() as folder:
        with server(Path(folder), [*([model] if model else []), *ARGUMENTS]) as url:
            host, _, port = url.removeprefix("http://").partition(":")
            (process,) = psutil.Process().children()
            uvloop.run(burst(host, int(port), 1, process))  # the first of all is slow
            loads, answers, times_s = [], [], []
            for _ in range(bursts):
                loads.append(os.getloadavg()[0])
                more, seconds = uvloop.run(burst(host, int(port), NUM_REQUESTS, process))
                answers += more
                times_s.append(seconds / NUM_REQUESTS)
        log = (Path(folder) / "server.log").read_text(encoding="utf-8")
    refused_s = [seconds for status, seconds in answers if status == 429]
    num_accepted = sum(status == 200 for status, _ in answers)
    assert num_accepted + len(refused_s) == bursts * NUM_REQUESTS, "an answer that is neither 200 nor 429"
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    inside_s = [line["duration_s"] for line in lines if line["status"] == 429]
    assert len(inside_s) == len(refused_s)
    print(f"{bursts} bursts of {NUM_REQUESTS}: {num_accepted} answered, {len(refused_s)} refused; "
          f"load {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores")
    each = f"{statistics.median(times_s) * 1e3:.2f} ({min(times_s) * 1e3:.2f} to {max(times_s) * 1e3:.2f})"
    print(f"the server's process computed {each} ms per request")
    print(f"{'ms until refused':32}{'median':>10}{'p99':>10}{'longest':>10}")
    print(shown("server: read to written", inside_s))
    print(shown("client: sent to received", refused_s))


if __name__ == "__main__":
    typer.run(main)
