"""Cost of HTTP: the same burst of requests through `quire serve` and through `LLM` in its own process, in turn.

    python bench/http_overhead.py MODEL                         # http32 of bench/peers.py, ids up to 31,999
    python bench/http_overhead.py -- --dtype float32            # the demo model; engine flags after --, for both
    python bench/http_overhead.py MODEL --workload WORKLOADS.json --name http32

Every turn measures one after the other, because the speed of a shared machine drifts: the ratio of two figures from one
turn means more than either figure. The server starts once and has had the whole workload once before it is measured;
while `LLM` runs it idles. `LLM` starts anew for each turn, and has its own untimed pass. Of each figure the table holds
the median over the turns and, in brackets, the extremes.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from quire_lab.bench.report import machine_facts
from quire_lab.sim.statistics import Spread, spread
from quire_lab.sim.workloads import random_workload
from side_by_side.workloads import peer_workloads

QUIRE = (sys.executable, "-c", "from quire.cli.main import main; main()")
READY = re.compile(r"Quire is serving .+ on (http://\S+)")
NUM_STREAMS = 32
INPUT_LEN, OUTPUT_LEN = 40, 65  # requests to the demo model, which knows fewer ids: the means of http32
DRAIN_S = 30


@contextmanager
def server(folder: Path, arguments: Sequence[str]) -> Iterator[str]:
    """Run `quire serve` on a free port; yield its URL once it answers. Its log is shown only if it does not."""
    command, log = [*QUIRE, "serve", "--port", "0", *arguments], folder / "server.log"
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        ready = next((found for line in process.stdout if (found := READY.search(line))), None)
        if ready is None:
            raise SystemExit(f"the server ended with {process.wait()} before it was ready:\n{log.read_text()}")
        yield ready.group(1)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=DRAIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def figures(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a benchmark in a process of its own and return what it wrote as JSON."""
    path = folder / "figures.json"
    subprocess.run([*QUIRE, "bench", *arguments, "--json", str(path)], check=True, stdout=subprocess.DEVNULL)
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def over_http(folder: Path, url: str, workload: Sequence[str]) -> float:
    """Return output tokens per second of a burst over HTTP; every request must have been answered in full."""
    record = figures(folder, "serve", "--url", url, "--arrivals", "burst", *workload)
    counts = record["requests"]
    assert counts["num_finished"] == counts["num_requests"], record.get("errors")
    assert counts["num_output_tokens"] == counts["num_asked_tokens"], counts
    return float(record["rates"]["tokens_per_s"])


def in_process(folder: Path, engine: Sequence[str], workload: Sequence[str]) -> float:
    """Return output tokens per second of the same burst through `LLM`."""
    record = figures(folder, "throughput", *engine, *workload, "--repeats", "1")
    return float(record["figures"]["tokens_per_s"]["median"])


def workload_arguments(folder: Path, model: str | None, workload: Path | None, name: str | None) -> list[str]:
    """Return the flags of the workload that was asked for; without one, of http32, or of its means (demo model)."""
    if workload is None:
        workload = folder / "workload.json"
        items = random_workload(NUM_STREAMS, INPUT_LEN, OUTPUT_LEN, vocab_size=512, seed=0)
        items = items if model is None else peer_workloads()["http32"]
        requests = [{"prompt": item.prompt_token_ids, "n_out": item.output_len} for item in items]
        workload.write_text(json.dumps(requests), encoding="utf-8")
    arguments = ["--workload", str(workload), "--num-prompts", str(NUM_STREAMS)]
    return arguments if name is None else [*arguments, "--name", name]


def cell(values: Spread) -> str:
    return f"{values.median:.4g} ({values.low:.4g} to {values.high:.4g})"


def main(
    model: Annotated[str | None, typer.Argument(help="folder or hub id", show_default="the demo model")] = None,
    engine_flags: Annotated[list[str] | None, typer.Argument(help="after --: flags for both", metavar="FLAGS")] = None,
    workload: Annotated[Path | None, typer.Option(exists=True, help="JSON of token ids")] = None,
    name: Annotated[str | None, typer.Option(help="which workload of it")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="turns of both")] = 5,
    output: Annotated[Path | None, typer.Option(help="Markdown file; figures go beside it as JSON")] = None,
) -> None:
    """Measure both in turn, print the table, and write it where asked."""
    flags = list(engine_flags or [])
    if model is not None and model.startswith("-"):  # no model before the --
        model, flags = None, [model, *flags]
    engine = [*([] if model is None else [model]), "--no-enable-prefix-caching", *flags]  # each turn does the same work
    http: list[float] = []
    offline: list[float] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        asked = workload_arguments(folder, model, workload, name)
        with server(folder, engine) as url:
            over_http(folder, url, asked)
            for turn in range(rounds):
                http.append(over_http(folder, url, asked))
                offline.append(in_process(folder, engine, asked))
                print(f"turn {turn}: HTTP {http[-1]:.4g}, LLM {offline[-1]:.4g} output tokens/s", flush=True)
    ratios = [over / direct for over, direct in zip(http, offline, strict=True)]
    facts = machine_facts() | {"model": Path(model).name if model else "demo", "rounds": rounds}
    table = (
        "| output tokens/s over HTTP | through LLM | HTTP over LLM |\n| --- | --- | --- |\n"
        f"| {cell(spread(http))} | {cell(spread(offline))} | {cell(spread(ratios))} |\n\n"
        + ", ".join(f"{key} {value}" for key, value in facts.items()) + "\n"
    )
    print(table)
    if output is not None:
        output.write_text(table, encoding="utf-8")
        record = {"facts": facts, "http": http, "offline": offline, "ratios": ratios}
        output.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
