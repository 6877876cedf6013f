"""Speculative decoding of several servers: tokens per second, and the answers that it changes.

    python bench/speculation_peers.py "Quire=quire serve MODEL --port {port}" "Quire, ngram=quire serve ..."

A server is a name and its command (`env NAME=VALUE command ...` sets variables). Those of one engine share the part of
the name before the comma, and the first of them is the one without drafts. Each prompt goes to /v1/completions alone,
greedy. The servers take their turns one after the other, `--turns` times; the best turn's speed counts, and the answers
of all turns. With M a folder and G the same weights as GGUF, the servers of one run are, for example:

    "Quire=quire serve M --port {port}"
    "Quire, ngram=quire serve M --port {port} --spec-method ngram --spec-tokens 8"
    "vLLM=env VLLM_CPU_KVCACHE_SPACE=2 PYTHON -m vllm.entrypoints.openai.api_server --model M --port {port}"
    "vLLM, ngram=env ... --speculative-config {{\\"method\\":\\"ngram\\",\\"num_speculative_tokens\\":8}}"
    "llama.cpp=llama-server -m G --port {port} -np 1 -c 4096 -t 2"
    "llama.cpp, ngram=llama-server -m G --port {port} -np 1 -c 4096 -t 2 --spec-type ngram-simple"
    "llama.cpp, draft=llama-server -m G --port {port} -np 1 -c 4096 -t 2 -md DRAFT.gguf"
"""

import json
import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

TEXTS = Path(__file__).with_name("speculation_texts.json")
START_S, END_S = 300, 20


def ask(port: int, route: str, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
    """Return the answer of a server, as JSON if it is that."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{route}", headers={"Content-Type": "application/json"})
    request.data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        text = answer.read()
    return json.loads(text) if body is not None else None


def wait_for(port: int, server: "subprocess.Popen[bytes]") -> None:
    """Wait until a server is healthy."""
    end_s = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < end_s:
        try:
            return ask(port, "/health")  # type: ignore[no-any-return]
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server has ended with {server.poll()}, or is not healthy after {START_S} s")


def end(server: "subprocess.Popen[bytes]") -> None:
    """Interrupt a server; kill all of its processes if it has not ended after END_S."""
    server.send_signal(signal.SIGINT)
    try:
        server.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)


def answers(command: str, port: int, prompts: list[str], num_tokens: int) -> tuple[float, list[str]]:
    """Return the tokens per second of a server, and its texts."""
    with subprocess.Popen(
        shlex.split(command.format(port=port)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=os.environ, start_new_session=True,
    ) as server:  # fmt: skip
        try:
            wait_for(port, server)
            body = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False, "seed": 1}
            name = ask(port, "/v1/completions", {"prompt": prompts[0], **body, "max_tokens": 2}).get("model")
            texts, seconds = [], 0.0
            for prompt in prompts:
                first_s = time.perf_counter()
                ask(port, "/v1/completions", {"model": name, "prompt": prompt, **body, "max_tokens": 1})
                started_s = time.perf_counter()
                found = ask(port, "/v1/completions", {"model": name, "prompt": prompt, **body})
                seconds += time.perf_counter() - started_s - (started_s - first_s)  # without the prompt
                assert found["usage"]["completion_tokens"] == num_tokens, found["usage"]
                texts.append(found["choices"][0]["text"])
        finally:
            end(server)
    if seconds <= 0.0:
        raise RuntimeError(f"{num_tokens} tokens take no longer than one: ask for more, or use a larger model")
    return (num_tokens - 1) * len(prompts) / seconds, texts


def main(
    servers: Annotated[list[str], typer.Argument(help="name=command with {port}")],
    num_tokens: Annotated[int, typer.Option(help="tokens of an answer")] = 64,
    turns: Annotated[int, typer.Option(help="turns of each server")] = 1,
    first_port: Annotated[int, typer.Option(help="port of the first server")] = 18480,
    max_chars: Annotated[int, typer.Option(help="characters of a prompt, at most")] = 1500,
) -> None:
    """Print speed, and for how many prompts the text is another than the engine's first server's."""
    prompts = [each["prompt"][-max_chars:] for each in json.loads(TEXTS.read_text())]
    speeds: dict[str, float] = {}
    texts: dict[str, list[str]] = {}
    changed: dict[str, set[int]] = {}
    for _ in range(turns):
        for number, each in enumerate(servers):
            name, command = each.split("=", 1)
            speed, found = answers(command, first_port + number, prompts, num_tokens)
            plain = texts.setdefault(name.split(",")[0], found)
            speeds[name] = max(speeds.get(name, 0.0), speed)
            changed.setdefault(name, set()).update(i for i, text in enumerate(found) if text != plain[i])
            print(f"{name}: {speed:.1f} tokens/s, {len(changed[name])} of {len(prompts)} texts differ", flush=True)
    print("\n| server | tokens/s | speed-up | texts that differ |\n| --- | --- | --- | --- |")
    for name, speed in speeds.items():
        base = speeds[next(other for other in speeds if other.split(",")[0] == name.split(",")[0])]
        print(f"| {name} | {speed:.1f} | {speed / base:.2f} | {len(changed[name])} of {len(prompts)} |")


if __name__ == "__main__":
    typer.run(main)
