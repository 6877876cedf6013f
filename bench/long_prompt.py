"""Streams beside one long prompt: the gaps between their tokens, and how much later the prompt's first token comes.

    python bench/long_prompt.py MODEL --target 500 --target 80 --target none    # this checkout, at targets of a step
    python bench/long_prompt.py MODEL --target none --flags "" --flags "-dp 2 --prefill-engines 1"    # prefill apart
    python bench/long_prompt.py MODEL --server "before=OTHER/.venv/bin/quire serve {model} --port {port}" \\
        --server "vLLM=PYTHON -m vllm.entrypoints.openai.api_server --model {model} --port {port} --enforce-eager"

Each server has an OpenAI-compatible `/v1/completions` that takes token ids, and is started for its turn. The long
prompt is computed alone first, then beside the streams with other tokens. A gap is the time between two events of a
stream while the long prompt is computed. Servers take turns; figures are of each turn, and the last lines are medians.
"Moved s" are the seconds of reads of KV blocks from another engine, of both long prompts.
"""

import asyncio
import json
import math
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
import typer

QUIRE = (sys.executable, "-c", "from quire.cli.main import main; main()", "serve")
START_LIMIT_S, LIMIT_S, POLL_S = 300.0, 1200.0, 0.2
WARM_S, AFTER_S, MAX_TOKENS, VOCABULARY = 2.0, 0.5, 3_000, 30_000
COLUMNS = ("decode ms", "gap p50", "gap p99", "gap max", "tokens", "prompt s", "alone s", "times alone", "moved s")


class Figures(NamedTuple):
    """Milliseconds, tokens of all streams beside the prompt, seconds, and their ratio."""

    decode_ms: float
    median_ms: float
    p99_ms: float
    longest_ms: float
    num_tokens: float
    prompt_s: float
    alone_s: float
    times_alone: float
    moved_s: float


class Contest(NamedTuple):
    """Requests that every server gets."""

    model: str
    prompt_len: int
    num_streams: int
    computes_alone: bool = True


def long_prompt(length: int, seed: int) -> list[int]:
    return [100 + (position * 7919 + seed * 104_729) % VOCABULARY for position in range(length)]


@asynccontextmanager
async def serving(command: list[str], port: int) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """Run a server; yield a client, and the name of its model."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as client:
            deadline_s = time.monotonic() + START_LIMIT_S
            while True:
                with suppress(httpx.TransportError):
                    answer = await client.get("/v1/models")
                    if answer.status_code == httpx.codes.OK:
                        yield client, answer.json()["data"][0]["id"]
                        return
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"not ready, status {process.returncode}: {shlex.join(command)}")
                await asyncio.sleep(POLL_S)
    finally:
        process.terminate()
        process.wait()


async def compute(client: httpx.AsyncClient, model: str, prompt: list[int]) -> float:
    """Return the seconds until a prompt's only token."""
    started_s = time.perf_counter()
    answer = await client.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 1})
    answer.raise_for_status()
    return time.perf_counter() - started_s


async def stream(client: httpx.AsyncClient, model: str, number: int, times_s: list[float]) -> None:
    """Note when the events of a stream arrive, until it is cancelled."""
    body = {
        "model": model, "prompt": [10 + number, 20, 30, 40], "max_tokens": MAX_TOKENS, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                times_s.append(time.perf_counter())  # noqa: PERF401 (others read the list meanwhile)


async def measure(contest: Contest, command: str) -> Figures:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = shlex.split(command.format(model=contest.model, port=port))
    async with serving(words, port) as (client, model):
        await compute(client, model, [5, 6, 7])
        alone_s = math.nan
        if contest.computes_alone:
            alone_s = await compute(client, model, long_prompt(contest.prompt_len, 1))
        all_times_s = [list[float]() for _ in range(contest.num_streams)]
        tasks = [asyncio.create_task(stream(client, model, *each)) for each in enumerate(all_times_s)]
        await asyncio.sleep(WARM_S)
        started_s = time.perf_counter()
        prompt_s = await compute(client, model, long_prompt(contest.prompt_len, 2))
        ended_s = time.perf_counter()
        await asyncio.sleep(AFTER_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        moved_s = moved_seconds((await client.get("/metrics")).text)
    pairs = [pair for times_s in all_times_s for pair in pairwise(times_s)]
    beside = sorted(1000 * (last - first) for first, last in pairs if last > started_s and first < ended_s)
    before = [1000 * (last - first) for first, last in pairs if last < started_s]
    if not before or not beside:
        raise SystemExit(f"no tokens arrived beside the prompt, or before it: {command}")
    return Figures(
        statistics.median(before), statistics.median(beside), beside[int(len(beside) * 0.99)], beside[-1], len(beside),
        prompt_s, alone_s, prompt_s / alone_s, moved_s,
    )  # fmt: skip


def moved_seconds(page: str) -> float:
    """Return the seconds of reads from other engines, 0 for a server that does not tell."""
    lines = (line for line in page.splitlines() if line.startswith("quire:kv_transfer_seconds_total{"))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def own_servers(targets: list[str], more: list[str], length: int) -> Iterator[tuple[str, str]]:
    """Yield a name and a command of this checkout's server for each target, and each of further flags."""
    for target in targets:
        for own in more or ["--no-enable-prefix-caching"]:
            flags = f"--port {{port}} --max-model-len {length} --itl-target-ms {target} {own}"
            name = f"Quire, {target}" + (f", {own}" if own in more else "")
            yield name, f"{shlex.join(QUIRE)} {{model}} {flags}"


def main(
    model: Annotated[Path, typer.Argument(help="folder with weights, or of a config.json with --load-format dummy")],
    server: Annotated[list[str], typer.Option(help="NAME=COMMAND with {model} and {port}")] = [],  # noqa: B006
    target: Annotated[list[str], typer.Option(help="of this checkout, ms or none")] = ["500", "none"],  # noqa: B006
    flags: Annotated[list[str], typer.Option(help="further ones of this checkout; several times")] = [],  # noqa: B006
    prompt_len: Annotated[int, typer.Option(help="tokens of the long prompt")] = 16_000,
    alone: Annotated[bool, typer.Option(help="compute the long prompt alone, too")] = True,
    streams: int = 4,
    turns: int = 1,
    output: Annotated[Path | None, typer.Option(help="file for the figures in JSON")] = None,
) -> None:
    """Print a table of all servers, which take turns."""
    contest = Contest(str(model), prompt_len, streams, alone)
    commands = dict(own_servers(target, flags, prompt_len + MAX_TOKENS)) | dict(each.split("=", 1) for each in server)
    found: dict[str, list[Figures]] = {name: [] for name in commands}
    print(f"{'server':44}" + "".join(f"{column:>12}" for column in COLUMNS))
    for _ in range(turns):
        for name, command in commands.items():
            found[name].append(asyncio.run(measure(contest, command)))
            print(row(name, found[name][-1]), flush=True)
    if turns > 1:
        for name, figures in found.items():
            print(row(f"{name}, median", Figures(*map(statistics.median, zip(*figures, strict=True)))))
    if output is not None:
        output.write_text(json.dumps({name: [each._asdict() for each in figures] for name, figures in found.items()}))


def row(name: str, figures: Figures) -> str:
    return f"{name:44}" + "".join(f"{value:12.2f}" for value in figures)


if __name__ == "__main__":
    typer.run(main)
