"""Time from the start of a process to a model's first token, and peak memory.

    python bench/start_up.py MODEL [--rounds 5]

`offline` is a fresh interpreter that imports LLM and makes one token; `serve` is `quire serve` until its ready line,
and then until one token has come over HTTP. Memory is the high-water mark of the process that holds the weights (VmHWM:
what it mapped of files counts too), with and without the weights. Files are in the page cache after a first round
that does not count.
"""

import json
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

KV_CACHE_MEMORY = "512MiB"  # of zeros, which take no memory until they are written to
PROMPT = list(range(5, 13))
OFFLINE = f"""
import sys, time
from quire import LLM, SamplingParams
imported_s = time.monotonic()
llm = LLM(sys.argv[1], kv_cache_memory={KV_CACHE_MEMORY!r})
loaded_s = time.monotonic()
llm.generate([{PROMPT}], SamplingParams(max_tokens=1))
print(imported_s, loaded_s, time.monotonic(), llm._engine.model.weight_bytes, open("/proc/self/status").read())
"""
Measures = dict[str, float]


def offline(model: str) -> Measures:
    """Make one token in a process of its own."""
    started_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", OFFLINE, model], capture_output=True, text=True, check=True)
    imported_s, loaded_s, token_s, weight_bytes, status = done.stdout.split(maxsplit=4)
    peak_mb = peak_bytes(status) / 1e6
    return {
        "import, s": float(imported_s) - started_s,
        "load, s": float(loaded_s) - float(imported_s),
        "first token, s": float(token_s) - started_s,
        "peak, MB": peak_mb,
        "peak - weights, MB": peak_mb - int(weight_bytes) / 1e6,
    }


def serve(model: str) -> Measures:
    """Start a server and ask it for one token."""
    command = [sys.executable, "-c", "from quire.cli.main import main; main()", "serve", model, "--port", "0"]
    started_s = time.monotonic()
    command += ["--kv-cache-memory", KV_CACHE_MEMORY, "--served-model-name", "m"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        url = next(found[1] for line in server.stdout if (found := re.search(r"on (http://\S+)", line)))
        ready_s = time.monotonic()
        ask_for_one_token(url)
        token_s = time.monotonic()
        peak = max(peak_bytes(Path(f"/proc/{child}/status").read_text()) for child in children(server.pid))
        server.terminate()
    return {"ready, s": ready_s - started_s, "first token, s": token_s - started_s, "engine's peak, MB": peak / 1e6}


def ask_for_one_token(url: str) -> None:
    body = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        answer.read()


def children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


def peak_bytes(status: str) -> int:
    """Return the high-water mark of a process from its /proc/*/status."""
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024


def report(name: str, measure: Callable[[str], Measures], model: str, rounds: int) -> None:
    measure(model)
    results = [measure(model) for _ in range(rounds)]
    for key in results[0]:
        values = [result[key] for result in results]
        print(f"{name:8} {key:24} {statistics.median(values):8.2f}  ({min(values):.2f} to {max(values):.2f})")


def main(
    model: Annotated[str, typer.Argument(help="a model folder")],
    rounds: Annotated[int, typer.Option(help="starts of each kind that count")] = 5,
) -> None:
    """Print medians, and the range, of both ways to start."""
    report("offline", offline, model, rounds)
    report("serve", serve, model, rounds)


if __name__ == "__main__":
    typer.run(main)
