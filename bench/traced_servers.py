"""CPU time that traces add to a request in the processes of servers, of Quire and vLLM, with traces and without.

    python bench/traced_servers.py MODEL --vllm PYTHON

Servers get the same requests in turn, `--requests` in a round, and send their spans to a collector in this process,
over HTTP in protobuf. A round's time is that of the process with the HTTP server, in which both engines make their
spans, and none of the process of steps; it ends where the server's next round begins, so it has the spans that are sent
in between. What traces add is the difference of two servers in one round.
"""

import asyncio
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from quire_lab.bench.http_load import open_session
from side_by_side.adapters.protocol import Settings
from side_by_side.engines import Engine, EngineSpec, Server
from side_by_side.roster import CPUS, OURS, vllm_environment

VLLM = "vLLM-CPU"
LIMITS = ("--max-model-len", "1024", "--port", "{port}")
PROMPT, ANSWER, CONCURRENCY = 32, 4, 8
FLUSHED_S = 6.0  # vLLM's SDK sends what it has every 5 s


class Collector:
    """An endpoint of OTLP that counts spans by their path."""

    def __init__(self) -> None:
        self.num_spans = num_spans = Counter[str]()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                num_spans[self.path] += sum(len(s.spans) for r in request.resource_spans for s in r.scope_spans)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()


def servers(model: Path, vllm: Path | None, collector: str) -> list[EngineSpec]:
    """Return each server without traces, and with."""
    ours = (sys.executable, "-c", "from quire.cli.main import main; main()", "serve", str(model), *LIMITS)
    specs = [EngineSpec(OURS, ours, is_server=True)]
    if vllm:
        command = (str(vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--enforce-eager")
        environment = vllm_environment(vllm, Settings(str(model), len(CPUS), kv_cache_gib=1))
        environment |= {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        specs.append(EngineSpec(VLLM, (*command, *LIMITS), environment, is_server=True))
    return [
        EngineSpec(spec.title + title, (*spec.command, *flags(spec.title)), spec.environment, is_server=True)
        for spec in specs
        for title, flags in (
            ("", lambda _: ()),
            (", traced", lambda title: ("--otlp-traces-endpoint", f"{collector}/{title}")),
        )
    ]


def cpu_ns(engine: Engine) -> int:
    """Return the CPU time of a server's first process, all its threads: Linux' clock of another process."""
    return time.clock_gettime_ns(~engine.pid << 3 | 2)


async def ask(engine: Server, bodies: list[dict[str, Any]]) -> None:
    """Send requests, some at a time."""
    waiting = iter(bodies)
    async with open_session(None) as session:

        async def client() -> None:
            for body in waiting:
                async with session.post(f"{engine.url}/v1/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    await response.read()

        await asyncio.gather(*(client() for _ in range(CONCURRENCY)))


def main(
    model: Path,
    vllm: Annotated[Path | None, typer.Option(help="its environment's python")] = None,
    rounds: int = 12,
    requests: int = 1000,
) -> None:
    """Measure and print."""
    rng, collector = random.Random(0), Collector()
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engines = list[Server]()
        for spec in servers(model, vllm, collector.url):
            engine = spec.start(Path(folder) / f"{spec.title}.log")
            stack.callback(engine.stop)
            assert isinstance(engine, Server)
            engines.append(engine)
        begun = {engine.title: list[int]() for engine in engines}
        for number in range(rounds + 2):    # the first warms up; the last tells where the one before has ended
            fixed = {"model": str(model), "max_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
            prompts = [[rng.randrange(300, vocab_size) for _ in range(PROMPT)] for _ in range(requests)]
            bodies = [fixed | {"prompt": prompt} for prompt in prompts]
            for engine in engines if number % 2 else engines[::-1]:
                begun[engine.title].append(cpu_ns(engine))
                asyncio.run(ask(engine, bodies))
            time.sleep(FLUSHED_S)
    us = {title: [(b - a) / 1e3 / requests for a, b in pairwise(at[1:])] for title, at in begun.items()}
    for title, found in us.items():
        print(f"{title}: {spread(found)} us of CPU for a request")
    added = {}
    for title in us.keys() - {each for each in us if each.endswith(", traced")}:
        pairs = zip(us[f"{title}, traced"], us[title], strict=True)
        added[title] = [traced - plain for traced, plain in pairs]
        num_spans = collector.num_spans[f"/{title}"] / (rounds + 2) / requests
        print(f"{title}: traces add {spread(added[title])} us for {num_spans:.2f} spans a request")
    if VLLM in added:
        print(f"ratio of the medians {statistics.median(added[OURS]) / statistics.median(added[VLLM]):.2f}")


def spread(values: list[float]) -> str:
    """Return the median and the quartiles."""
    first, median, third = statistics.quantiles(values, n=4)
    return f"{median:.0f} ({first:.0f} to {third:.0f})"


if __name__ == "__main__":
    typer.run(main)
