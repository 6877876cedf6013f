"""Quire beside llama.cpp on real GGUF files, taking turns; prints the table of docs/benchmarks.md.

    python bench/real.py [--rounds 5] [--threads 2] [--binding FOLDER]

llama.cpp is its prebuilt library, with the kernels that it chooses for this CPU. Of its source, which npm brings too,
two programs are compiled that hold no arithmetic: llama-bench (a prompt, one sequence, and the time of a process that
computes a prompt of five tokens) and batched-bench (eight sequences). Quire is `LLM` in a process of its own, and for
the start `quire generate`, with the settings that they have by themselves. An engine waits while the other works; the
first round does not count, and a ratio is that of one round. Threads of llama.cpp spin at barriers: beside other work
measure with --threads 1. `--binding` adds node-llama-cpp in FOLDER/node_modules: the same library behind JavaScript.
"""

import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Protocol

import typer

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))

from real_files import FOLDER, REAL_FILES, fetch  # noqa: E402 (a module of tools/)

MODELS = {"SmolLM2-135M-Instruct, Q4_1": "smollm2", "Gemma 3 270M, Q4_K_M": "gemma3"}
PROMPT_LEN, OUTPUT_LEN, SHORT_PROMPT_LEN, NUM_SEQUENCES = 1500, 64, 32, 8
PROGRAMS = {
    "llama-bench": "tools/llama-bench/*.cpp",
    "batched-bench": "tools/batched-bench/*.cpp",
}
ROWS = {
    "prompt": f"prompt of {PROMPT_LEN:,} tokens, s",
    "eight": f"{NUM_SEQUENCES} sequences, ms per step",
    "one": "one sequence, ms per token",
    "start": "process start to first token, s",
}


def compiled(folder: Path) -> Path:
    """Return the folder of llama.cpp's libraries and programs; the latter are compiled if they are not there."""
    libraries = fetch(REAL_FILES["llama.cpp"], folder)
    source, programs = folder / "llama.cpp-source", folder / "llama.cpp-programs"
    if not source.exists():
        bundle = fetch(REAL_FILES["llama.cpp-source"], folder)
        subprocess.run(
            ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", str(bundle), str(source)], check=True
        )
    programs.mkdir(exist_ok=True)
    includes = [f"-I{source / part}" for part in ("include", "ggml/include", "common", "vendor")]
    names = [
        name.name for pattern in ("libllama*.so", "libggml.*so", "libggml-base.so") for name in libraries.glob(pattern)
    ]
    links = [f"-L{libraries}", *(f"-l:{name}" for name in names), f"-Wl,-rpath,{libraries}", "-pthread"]
    for name, pattern in PROGRAMS.items():
        if not (programs / name).exists():
            print(f"Compiling {name} ...", file=sys.stderr)
            files = map(str, source.glob(pattern))
            command = ["g++", "-std=c++17", "-O2", "-DNDEBUG", *includes, *files, "-o", str(programs / name), *links]
            subprocess.run(command, check=True)
    return programs


class LlamaCpp:
    """llama.cpp's programs over one file. They look for its kernels where they run."""

    def __init__(self, programs: Path, libraries: Path, model: Path, threads: int) -> None:
        self._programs, self._libraries, self._model, self._threads = programs, libraries, str(model), str(threads)

    def _run(self, name: str, *arguments: str) -> str:
        command = [str(self._programs / name), "-m", self._model, *arguments]
        return subprocess.run(command, cwd=self._libraries, capture_output=True, text=True, check=True).stdout

    def _bench(self, *arguments: str) -> float:
        """Return the seconds that llama-bench takes for a run, after one that warms up."""
        output = self._run("llama-bench", "-t", self._threads, "-r", "1", "-o", "json", *arguments)
        return float(json.loads(output)[0]["avg_ns"]) / 1e9

    def prompt(self) -> float:
        """Return the seconds of a prompt."""
        return self._bench("-p", str(PROMPT_LEN), "-n", "0")

    def one(self) -> float:
        """Return the milliseconds of a token."""
        return self._bench("-p", "0", "-n", str(OUTPUT_LEN)) / OUTPUT_LEN * 1e3

    def eight(self) -> float:
        """Return the milliseconds of a step of all sequences."""
        settings = ("-c", "2048", "-b", "2048", "-t", self._threads, "--output-format", "jsonl")
        sizes = ("-npp", str(SHORT_PROMPT_LEN), "-ntg", str(OUTPUT_LEN), "-npl", str(NUM_SEQUENCES))
        output = self._run("batched-bench", *settings, *sizes)
        (line,) = [line for line in output.splitlines() if line.startswith("{")]
        return float(json.loads(line)["t_tg"]) / OUTPUT_LEN * 1e3

    def start(self) -> float:
        """Return the seconds of a process that computes a prompt of five tokens."""
        started_s = time.perf_counter()
        self._run("llama-bench", "-t", self._threads, "-p", "5", "-n", "0", "-r", "1", "--no-warmup")
        return time.perf_counter() - started_s


class Child:
    """A process that answers the name of a row with a time."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, name: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(name, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def prompt(self) -> float:
        """Return the seconds to the first token of a prompt."""
        return self._ask("prompt")

    def one(self) -> float:
        """Return the milliseconds of a token."""
        return self._ask("one")

    def eight(self) -> float:
        """Return the milliseconds of a step of all sequences."""
        return self._ask("eight")


class Quire(Child):
    """`LLM` over one file, in a process that is told what to run."""

    def __init__(self, model: Path, threads: int) -> None:
        self._model = str(model)
        self._environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        super().__init__([sys.executable, __file__, "--child", self._model], self._environment)

    def start(self) -> float:
        """Return the seconds of a process that makes one token."""
        code = "from quire.cli.entry import main; main()"
        prompt = ["--prompt", "Once upon a time", "--max-tokens", "1", "--temperature", "0"]
        started_s = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", code, "generate", self._model, *prompt], env=self._environment,
            capture_output=True, check=True,
        )  # fmt: skip
        return time.perf_counter() - started_s


BINDING = """
const [, , folder, modelPath, threads] = process.argv;
const { getLlama } = await import(folder + "/node_modules/node-llama-cpp/dist/index.js");
const llama = await getLlama({ gpu: false, build: "never", maxThreads: Number(threads), logLevel: "error" });
const model = await llama.loadModel({ modelPath });
const settings = { contextSize: 2048, sequences: NUM_SEQUENCES, batchSize: 2048, threads: Number(threads) };
const context = await model.createContext(settings);
const sequences = Array.from({ length: NUM_SEQUENCES }, () => context.getSequence());
const drawn = () => 1000 + Math.floor(Math.random() * 39000);
async function times(sequence, promptLen, outputLen) {
    await sequence.clearHistory();
    const found = [];
    const ids = Array.from({ length: promptLen }, drawn);
    for await (const _ of sequence.evaluate(ids, { temperature: 0, yieldEogToken: true })) {
        found.push(performance.now());
        if (found.length == outputLen) return found;
    }
}
async function stepMs(count, promptLen) {
    const used = sequences.slice(0, count).map((each) => times(each, promptLen, OUTPUT_LEN + 1));
    const found = await Promise.all(used);
    return (Math.max(...found.map((each) => each.at(-1))) - Math.max(...found.map((each) => each[0]))) / OUTPUT_LEN;
}
const runs = {
    prompt: async () => {
        const started = performance.now();
        return ((await times(sequences[0], PROMPT_LEN, 1))[0] - started) / 1e3;
    },
    one: () => stepMs(1, 1),
    eight: () => stepMs(NUM_SEQUENCES, SHORT_PROMPT_LEN),
};
for (const run of Object.values(runs)) await run();
const { createInterface } = await import("node:readline");
for await (const name of createInterface({ input: process.stdin })) console.log(await runs[name]());
process.exit(0);
"""


class Binding(Child):
    """node-llama-cpp over one file, in a process of node that is told what to run."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        script = BINDING
        for name in ("PROMPT_LEN", "OUTPUT_LEN", "SHORT_PROMPT_LEN", "NUM_SEQUENCES"):
            script = re.sub(rf"\b{name}\b", str(globals()[name]), script)
        self._script = tempfile.NamedTemporaryFile("w", suffix=".mjs")  # noqa: SIM115 (it lives as long as the process)
        self._script.write(script)
        self._script.flush()
        super().__init__(["node", self._script.name, str(folder.resolve()), str(model), str(threads)])

    def close(self) -> None:
        """End the process."""
        super().close()
        self._script.close()


def answer(model: str) -> None:
    """Load a file and run what lines of the standard input name; answer each with a time. The child of `Quire`."""
    from quire import LLM  # noqa: PLC0415 (the parent needs none)
    from quire_lab.bench.passes import latency_pass  # noqa: PLC0415
    from quire_lab.sim.workloads import WorkItem  # noqa: PLC0415

    drawn = random.Random(0)

    def items(count: int, prompt_len: int, output_len: int) -> list[WorkItem]:
        return [WorkItem([drawn.randrange(1000, 40_000) for _ in range(prompt_len)], output_len) for _ in range(count)]

    with LLM(model, max_model_len=2048, kv_cache_memory="1GiB") as llm:

        def steps_ms(count: int, prompt_len: int) -> float:
            timelines = latency_pass(llm, items(count, prompt_len, OUTPUT_LEN + 1), concurrency=count)
            first_s = max(timeline.token_times_s[0] for timeline in timelines)
            return (max(timeline.token_times_s[-1] for timeline in timelines) - first_s) / OUTPUT_LEN * 1e3

        def prompt_s() -> float:
            (timeline,) = latency_pass(llm, items(1, PROMPT_LEN, 1), concurrency=1)
            return timeline.token_times_s[0]

        runs: dict[str, Callable[[], float]] = {
            "prompt": prompt_s,
            "one": lambda: steps_ms(1, 1),
            "eight": lambda: steps_ms(NUM_SEQUENCES, SHORT_PROMPT_LEN),
        }
        for run in runs.values():
            run()
        for line in sys.stdin:
            print(runs[line.strip()](), flush=True)


class Engine(Protocol):
    """Engine that is measured: a method for each row that it has."""

    def prompt(self) -> float: ...
    def one(self) -> float: ...
    def eight(self) -> float: ...


@contextmanager
def engines(programs: Path, folder: Path, model: Path, threads: int, binding: Path | None) -> Iterator[list[Engine]]:
    """Open the engines over a file: Quire, llama.cpp and, if it is asked for, the binding."""
    children: list[Child] = [Quire(model, threads)]
    if binding is not None:
        children.append(Binding(binding, model, threads))
    try:
        yield [children[0], LlamaCpp(programs, folder / REAL_FILES["llama.cpp"].path, model, threads), *children[1:]]
    finally:
        for child in children:
            child.close()


def spread(values: list[float]) -> str:
    """Return the median and the extremes."""
    low, middle, high = (f"{each:.3g}" for each in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def main(
    rounds: Annotated[int, typer.Option(help="turns of each engine in each row")] = 5,
    threads: int = 2,
    folder: Annotated[Path, typer.Option(help="where `make real` has put the files")] = FOLDER,
    rows: Annotated[str, typer.Option(help="of the table")] = ",".join(ROWS),
    models: Annotated[str, typer.Option(help="names of tools/real_files.py")] = ",".join(MODELS.values()),
    binding: Annotated[Path | None, typer.Option(help="a folder with node_modules of node-llama-cpp")] = None,
) -> None:
    """Measure the engines in turn."""
    folder = folder.resolve()
    programs = compiled(folder)
    print(f"{cpu()}, {threads} threads, {rounds} rounds; llama.cpp {REAL_FILES['llama.cpp'].archives[0].package}\n")
    names = ["llama.cpp", "node-llama-cpp"] if binding else ["llama.cpp"]
    print("| file | | Quire |", " | ".join(f"{name} | Quire / {name}" for name in names), "|")
    print("| --- | --- | --- |" + " --- | --- |" * len(names))
    for title, name in MODELS.items():
        if name not in models.split(","):
            continue
        with engines(programs, folder, fetch(REAL_FILES[name], folder), threads, binding) as found:
            for row in rows.split(","):
                able = [each for each in found if hasattr(each, row)]
                turns = [[getattr(each, row)() for each in able] for _ in range(rounds + 1)][1:]
                mine, *others = map(list, zip(*turns, strict=True))
                cells = [title, ROWS[row], spread(mine)]
                for other in others:
                    cells += [spread(other), spread([one / two for one, two in zip(mine, other, strict=True)])]
                print("|", " | ".join(cells + ["", ""] * (len(names) - len(others))), "|", flush=True)


def cpu() -> str:
    """Return the name of the processor."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        answer(sys.argv[2])
    else:
        typer.run(main)
