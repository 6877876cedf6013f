"""Time from the start of a process to a model's first token, and peak memory.

    python bench/start_up.py MODEL [--rounds 5] [--text "The capital of France is"] [--against PYTHON] [--llama FOLDER]

`offline` is a fresh interpreter that imports LLM and makes one token; `serve` is `quire serve` until its ready line,
and then until one token has come over HTTP. Memory is the high-water mark of the process that holds the weights (VmHWM:
what it mapped of files counts too), with and without the weights. With a text as the prompt there are also `generate`,
`quire generate` until its first byte, and `llama.cpp`: a process of node until its first token, with node-llama-cpp in
FOLDER/node_modules. `--against` measures the interpreter of another environment, too. Starts alternate, round by round;
files are in the page cache after a first round that does not count.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

KV_CACHE_MEMORY = "512MiB"  # zeros take no memory until they are written to
PROMPT = list(range(5, 13))
ENTRY = "from quire.cli.entry import main; main()"
OFFLINE = f"""
import json, sys, time
from quire import LLM, SamplingParams
imported_s = time.monotonic()
llm = LLM(sys.argv[1], kv_cache_memory={KV_CACHE_MEMORY!r})
loaded_s = time.monotonic()
llm.generate([json.loads(sys.argv[2])], SamplingParams(max_tokens=1))
print(imported_s, loaded_s, time.monotonic(), llm._engine.model.weight_bytes, open("/proc/self/status").read())
"""
LLAMA = """
const { getLlama } = await import(process.argv[2] + "/node_modules/node-llama-cpp/dist/index.js");
const llama = await getLlama({ gpu: false, build: "never", maxThreads: Number(process.argv[4]), logLevel: "error" });
const model = await llama.loadModel({ modelPath: process.argv[3] });
const context = await model.createContext({ contextSize: 512, threads: Number(process.argv[4]) });
const ids = model.tokenize(process.argv[5]);
for await (const id of context.getSequence().evaluate(ids, { temperature: 0 })) {
    console.log(id);
    process.exit(0);
}
"""
Measures = dict[str, float]
Prompt = str | list[int]


def offline(model: str, python: str, prompt: Prompt) -> Measures:
    """Make one token in a process of its own."""
    started_s = time.monotonic()
    command = [python, "-c", OFFLINE, model, json.dumps(prompt)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported_s, loaded_s, token_s, weight_bytes, status = done.stdout.split(maxsplit=4)
    peak_mb = peak_bytes(status) / 1e6
    return {
        "import, s": float(imported_s) - started_s,
        "load, s": float(loaded_s) - float(imported_s),
        "first token, s": float(token_s) - started_s,
        "peak, MB": peak_mb,
        "peak - weights, MB": peak_mb - int(weight_bytes) / 1e6,
    }


def generate(model: str, python: str, prompt: Prompt) -> Measures:
    """Make one token by the command line."""
    command = [python, "-c", ENTRY, "generate", model, "--prompt", str(prompt), "--max-tokens", "1"]
    return {"first token, s": first_byte_s([*command, "--temperature", "0", "--kv-cache-memory", KV_CACHE_MEMORY])}


def llama_cpp(model: str, folder: str, prompt: Prompt) -> Measures:
    """Make one token by llama.cpp, with as many threads as this process has CPUs."""
    arguments = [str(Path(each).resolve()) for each in (folder, model)]
    num_threads = str(len(os.sched_getaffinity(0)))
    with tempfile.NamedTemporaryFile("w", suffix=".mjs") as script:  # -e would be passed on to children of node
        script.write(LLAMA)
        script.flush()
        return {"first token, s": first_byte_s(["node", script.name, *arguments, num_threads, str(prompt)])}


def first_byte_s(command: list[str]) -> float:
    """Return the time from the start of a process to its first byte on standard output."""
    started_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        time_s = time.monotonic() - started_s
        process.stdout.read()
    return time_s


def serve(model: str, python: str, prompt: Prompt) -> Measures:
    """Start a server and ask it for one token."""
    command = [python, "-c", ENTRY, "serve", model, "--port", "0"]
    started_s = time.monotonic()
    command += ["--kv-cache-memory", KV_CACHE_MEMORY, "--served-model-name", "m"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        url = next(found[1] for line in server.stdout if (found := re.search(r"on (http://\S+)", line)))
        ready_s = time.monotonic()
        ask_for_one_token(url, prompt)
        token_s = time.monotonic()
        peak = max(peak_bytes(Path(f"/proc/{child}/status").read_text()) for child in children(server.pid))
        server.terminate()
    return {"ready, s": ready_s - started_s, "first token, s": token_s - started_s, "engine's peak, MB": peak / 1e6}


def ask_for_one_token(url: str, prompt: Prompt) -> None:
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1}).encode()
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


def report(name: str, results: list[Measures]) -> None:
    for key in results[0]:
        values = [result[key] for result in results]
        print(f"{name:20} {key:24} {statistics.median(values):8.2f}  ({min(values):.2f} to {max(values):.2f})")


def main(
    model: Annotated[str, typer.Argument(help="a model folder, or a GGUF file")],
    rounds: Annotated[int, typer.Option(help="starts of each kind that count")] = 5,
    text: Annotated[str, typer.Option(help="the prompt; empty: token ids, for models without a tokenizer")] = "",
    against: Annotated[str, typer.Option(help="the interpreter of another environment")] = "",
    llama: Annotated[str, typer.Option(help="a folder with node_modules of node-llama-cpp")] = "",
) -> None:
    """Print medians, and the range, of all ways to start."""
    prompt: Prompt = text or PROMPT
    starts: dict[str, Callable[[], Measures]] = {}
    for place, python in {"": sys.executable, ", against": against}.items():
        for start in (offline, generate, serve) if text else (offline, serve):
            if python:
                starts[start.__name__ + place] = partial(start, model, python, prompt)
    if llama:
        starts["llama.cpp"] = partial(llama_cpp, model, llama, prompt)
    results: dict[str, list[Measures]] = {name: [] for name in starts}
    for number in range(rounds + 1):
        for name, measure in starts.items():
            measures = measure()
            if number > 0:
                results[name].append(measures)
    for name, found in results.items():
        report(name, found)


if __name__ == "__main__":
    typer.run(main)
