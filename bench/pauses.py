"""Pauses of a server's event loop, and of an honest stream, under one hostile request of each kind at its bounds.

    python bench/pauses.py                              # the demo model
    python bench/pauses.py --python OTHER/.venv/bin/python   # a server of another checkout, for a comparison
    python bench/pauses.py --only explain --only n=64

A real `quire serve` runs; one connection asks for `/health` again and again, and one reads a stream of tokens.
The table has, for each kind, the longest and the 99th percentile of the times to an answer of `/health` and of the gaps
between tokens, and the status and seconds of the hostile request itself. Gaps contain the engine's steps, so they are
compared with those of the row `nothing`. Everything shares this machine: its cores bound what can be seen.
"""

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import typer

READY = re.compile(r"Quire is serving .+ on (http://\S+)")
QUIRE = ("-c", "from quire.cli.main import main; main()")
ENGINE_FLAGS = ("--max-model-len", "2048", "--num-kv-blocks", "12000", "--max-num-seqs", "256")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WARM_S, LIMIT_S = 0.5, 120.0
Body = dict[str, Any]


class Ask(NamedTuple):
    """One HTTP request of a hostile client."""

    path: str
    content: bytes
    method: str = "POST"


def ask(path: str, **body: Any) -> Ask:  # noqa: ANN401 (JSON)
    return Ask(path, json.dumps(body).encode())


def prompts(count: int, length: int) -> list[list[int]]:
    """Return different prompts of token ids."""
    return [[5 + (number + position * 7) % 900 for position in range(length)] for number in range(count)]


def chat(**fields: Any) -> Ask:  # noqa: ANN401 (JSON)
    return ask(CHAT, **{"messages": [{"role": "user", "content": "Write a story"}], "max_tokens": 60} | fields)


def completion(**fields: Any) -> Ask:  # noqa: ANN401 (JSON)
    return ask(COMPLETIONS, **{"prompt": [5, 6], "max_tokens": 60, "ignore_eos": True} | fields)


def kinds() -> dict[str, list[Ask]]:
    """Return hostile requests by kind; those of a kind are sent one after the other."""
    many = completion(prompt=prompts(1024, 3), max_tokens=1)
    stops = [f" {'e' * 900}{number:02}" for number in range(64)]
    words = [("x" * (1 + number // 2)) + str(number) for number in range(64)]
    keys = ",".join(f'"k{number}":0' for number in range(250_000))
    unknown = b'{"prompt":[5],"max_tokens":1,' + keys.encode() + b"}"
    deep = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"chat_template_kwargs":{"x":['
    return {
        "nothing": [],
        "explain": [many, many, many, Ask("/v1/requests/{id}/explain", b"", "GET")],
        "brackets": [Ask(COMPLETIONS, b'{"prompt":[' + b"[]," * 1_390_000 + b"[]]}")],
        "unknown keys": [Ask(COMPLETIONS, unknown)],
        "templates": [Ask(CHAT, deep + b"[]," * 1_390_000 + b"[]]}}")],
        "logprobs": [chat(n=64, logprobs=True, top_logprobs=20)],
        "logprobs, streamed": [chat(n=64, logprobs=True, top_logprobs=20, stream=True)],
        "prompt logprobs": [completion(prompt=prompts(6, 2000), prompt_logprobs=20, max_tokens=1)],
        "echo with logprobs, streamed": [
            completion(prompt=prompts(6, 2000), echo=True, logprobs=20, max_tokens=1, stream=True)
        ],
        "stop strings": [completion(prompt=prompts(4, 3), n=64, stop=stops)],
        "n=64": [completion(prompt=prompts(4, 1000), n=64)],
        "queued": [completion(prompt=prompts(32, 1000), n=64, stop=stops, max_tokens=2)],
        "beams of 64": [completion(prompt=prompts(1, 1000)[0], n=64, use_beam_search=True, temperature=0)],
        "bad words": [completion(n=64, bad_words=words)],
        "lists of tokens": [
            completion(
                n=64, allowed_token_ids=[*range(5, 4000)], min_tokens=60,
                logit_bias={str(token): 1 for token in range(5, 4000)},
            )
        ],
    }  # fmt: skip


class Probe:
    """Durations, in seconds, taken by a thread until it is stopped."""

    def __init__(self, url: str, take: Callable[[str, "Probe"], None]) -> None:
        self.durations_s: list[float] = []
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=take, args=(url, self))

    def __enter__(self) -> "Probe":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self._thread.join()

    def figures(self) -> str:
        """Return the longest and the 99th percentile in milliseconds."""
        ordered = sorted(self.durations_s) or [0.0]
        return f"{ordered[-1] * 1e3:8.1f} {ordered[len(ordered) * 99 // 100] * 1e3:8.1f}"


def ask_for_health(url: str, probe: Probe) -> None:
    connection = connect(url)
    while not probe.is_over.is_set():
        begun_s = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        probe.durations_s.append(time.perf_counter() - begun_s)
        time.sleep(0.002)


def read_tokens(url: str, probe: Probe) -> None:
    body = json.dumps({"prompt": [7, 8, 9], "max_tokens": 1500, "ignore_eos": True, "stream": True})
    while not probe.is_over.is_set():
        connection = connect(url)
        connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
        response, last_s = connection.getresponse(), 0.0
        while not probe.is_over.is_set() and response.readline():
            now_s = time.perf_counter()
            if last_s:
                probe.durations_s.append(now_s - last_s)
            last_s = now_s
            response.readline()
        connection.close()


def connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=LIMIT_S)


def send(url: str, asks: list[Ask]) -> str:
    """Send the requests of a kind; return the statuses. `{id}` stands for the id of the answer before."""
    connection, statuses, last_id = connect(url), [], ""
    for path, content, method in asks:
        connection.request(method, path.format(id=last_id), content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        read = response.read()
        found = re.search(rb'"id":"([^"]+)"', read[:200])
        last_id = found[1].decode() if found else last_id
        statuses.append(str(response.status))
    connection.close()
    return ",".join(statuses) or "-"


@contextmanager
def server(python: Path) -> Iterator[str]:
    """Run a server on a free port with this interpreter; yield its URL."""
    command = [str(python), *QUIRE, "serve", "--port", "0", *ENGINE_FLAGS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        ready = next((found for line in process.stdout if (found := READY.search(line))), None)
        if ready is None:
            raise SystemExit(f"the server ended with {process.wait()} before it was ready")
        yield ready.group(1)
    finally:
        process.terminate()
        process.communicate()


def main(
    python: Annotated[Path, typer.Option(help="interpreter of the environment to measure")] = Path(sys.executable),
    only: Annotated[list[str] | None, typer.Option(help="kinds (repeatable); all if left out")] = None,
) -> None:
    """Print the table."""
    print(f"{'':30} {'/health, ms':>17} {'tokens, ms':>17}")
    print(f"{'hostile request':30} {'max':>8} {'p99':>8} {'max':>8} {'p99':>8}  seconds  status")
    # a process of its own: a client that reads megabytes would hold up the probes' threads
    with server(python) as url, ProcessPoolExecutor(1, get_context("spawn")) as hostile:
        hostile.submit(send, url, [completion()]).result()
        for name, asks in kinds().items():
            if only and name not in only:
                continue
            with Probe(url, ask_for_health) as health, Probe(url, read_tokens) as tokens:
                time.sleep(WARM_S)
                begun_s = time.perf_counter()
                statuses = hostile.submit(send, url, asks).result()
                took_s = time.perf_counter() - begun_s
                time.sleep(WARM_S)
            print(f"{name:30} {health.figures()} {tokens.figures()}  {took_s:7.2f}  {statuses}", flush=True)


if __name__ == "__main__":
    typer.run(main)
