"""Longest pause of a running stream while many clients connect at once and wait, and while all of them disconnect.

    python bench/bursts.py                                 # 1,000 and 8,000 connections, three turns
    python bench/bursts.py --other OTHER/.venv/bin/python  # a server of another checkout takes turns

A real `quire serve` runs a model of one narrow layer with one seat, which the stream has. A process reads the stream,
another one connects, sends a request on each connection, and closes them. All share the machine, so there are two
figures for each phase: the longest gap between two reads of the stream, and the most CPU time that the thread of the
event loop used between two steps of a timer of 1 ms, which counts no other process.
"""

import json
import multiprocessing
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

import quire

READY = re.compile(r"Quire is serving .+ on http://([^:]+):(\d+)")
WAITING = re.compile(rb"^vllm:num_requests_waiting{\S* ([\d.]+)", re.MULTILINE)
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 4096, "max_position_embeddings": 131072,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5, "dtype": "float32",
}  # fmt: skip
FLAGS = (
    "--load-format", "dummy", "--tokenizer", str(Path(quire.__file__).parent / "model/demo"), "--port", "0",
    "--max-num-seqs", "1", "--max-queued-requests", "20000",
)  # fmt: skip
LIMIT_S, POLL_S, WARM_S = 60.0, 0.5, 1.0
TIMED_SERVER = """
import sys, time, uvloop
from pathlib import Path
from quire.cli.main import main

path, make, longest_s, last_s = Path(sys.argv.pop(1)), uvloop.new_event_loop, 0.0, 0.0

def new_event_loop():
    loop = make()

    def tick():
        global longest_s, last_s
        used_s = time.thread_time() - last_s
        if not path.exists():
            longest_s = 0.0
        if used_s > longest_s:
            path.write_text(str(longest_s := used_s))
        last_s = time.thread_time()
        loop.call_later(0.001, tick)

    loop.call_soon(tick)
    return loop

uvloop.new_event_loop = new_event_loop
main()
"""


class Server(NamedTuple):
    """A running server: its address, and the file with the longest turn of its event loop so far, in seconds."""

    host: str
    port: int
    longest: Path

    def num_waiting(self) -> int:
        with urllib.request.urlopen(f"http://{self.host}:{self.port}/metrics", timeout=LIMIT_S) as page:
            return sum(int(float(found)) for found in WAITING.findall(page.read()))


@contextmanager
def serving(python: Path) -> Iterator[Server]:
    """Run a server with this interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        longest = Path(folder) / "longest_s"
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        command = [str(python), "-c", TIMED_SERVER, str(longest), "serve", folder, *FLAGS]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            ready = next((found for line in process.stdout if (found := READY.search(line))), None)
            if ready is None:
                raise SystemExit(f"the server ended with {process.wait()} before it was ready")
            yield Server(ready[1], int(ready[2]), longest)
        finally:
            process.terminate()
            process.communicate()


def request(**fields: object) -> bytes:
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(body)}\r\n\r\n".encode() + body


def read_stream(server: Server, asked: Connection) -> None:
    """Read a stream; answer each message with the longest gap since the last one, in seconds, and end at a False."""
    with socket.create_connection((server.host, server.port)) as stream:
        stream.sendall(request(prompt=[7, 8, 9], max_tokens=100_000, ignore_eos=True, stream=True))
        longest_s, last_s = 0.0, time.perf_counter()
        while True:
            if not stream.recv(1 << 16):
                raise SystemExit("the stream ended too soon")
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
            if asked.poll():
                if not asked.recv():
                    return
                asked.send(longest_s)
                longest_s = 0.0


def measure(server: Server, count: int) -> list[float]:
    """Return (gap, CPU time) of connecting and of disconnecting, in seconds."""
    figures = list[float]()
    ours, theirs = multiprocessing.Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=read_stream, args=(server, theirs))
    reader.start()
    time.sleep(WARM_S)

    def lap() -> float:
        ours.send(True)
        return float(ours.recv())

    def wait_for(num_waiting: int) -> None:
        end_s = time.monotonic() + LIMIT_S
        while server.num_waiting() != num_waiting and time.monotonic() < end_s:
            time.sleep(POLL_S)
        figures.extend((lap(), float(server.longest.read_text())))
        server.longest.unlink()

    lap()
    server.longest.unlink(missing_ok=True)
    message, clients = request(prompt=[5, 6, 7], max_tokens=2), list[socket.socket]()
    for _ in range(count):
        clients.append(socket.create_connection((server.host, server.port)))
        clients[-1].sendall(message)
    wait_for(count)
    for client in clients:
        client.close()
    wait_for(0)
    ours.send(False)
    reader.join()
    return figures


def main(
    other: Annotated[Path | None, typer.Option(help="interpreter of a checkout to compare with")] = None,
    count: Annotated[list[int] | None, typer.Option(help="connections (repeatable)")] = None,
    turns: Annotated[int, typer.Option(help="bursts of each size")] = 3,
) -> None:
    """Print the table."""
    print(f"{'':46} {'connecting, ms':>18} {'disconnecting, ms':>18}")
    print(f"{'interpreter':35} {'clients':>10} {'gap':>9} {'CPU':>8} {'gap':>9} {'CPU':>8}")
    with ExitStack() as stack:
        pythons = [Path(sys.executable), *([] if other is None else [other])]
        servers = {python: stack.enter_context(serving(python)) for python in pythons}
        for number in count or [1000, 8000]:
            for _ in range(turns):
                for python, server in servers.items():
                    gap_s, cpu_s, last_gap_s, last_cpu_s = measure(server, number)
                    figures = f"{gap_s * 1e3:9.1f} {cpu_s * 1e3:8.1f} {last_gap_s * 1e3:9.1f} {last_cpu_s * 1e3:8.1f}"
                    print(f"{str(python)[-35:]:35} {number:10,} {figures}", flush=True)


if __name__ == "__main__":
    typer.run(main)
