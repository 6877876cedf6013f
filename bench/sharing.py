"""Savings by sharing: blocks of parallel samples and of beams over those without sharing (the paper's figure 15).

    python bench/sharing.py --output sharing.md          # and sharing.json, sharing.svg

Requests have the lengths of Alpaca and of ShareGPT's first turns (at most 2,048 tokens), and one token more, the BOS of
the paper's OPT. Saved is the sum over all steps of the blocks that sharing spares, over the sum of the blocks that the
same sequences would hold each by itself; both are counted between two steps. Blocks of 16, no prefix cache, as there.

All run through the real scheduler and cache. Parallel samples need no model: shared blocks follow from lengths
alone. Beams are the engine's own beam search. Which of them survive depends on their scores: random ones, sure of
themselves or not (`--spread`), or those of a model (`--model demo`, or a folder).
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from beams import Lengths, beam_request, model_engine, random_scores, written_prompts
from quire import LLM
from quire.core.config import CacheConfig
from quire.core.plan import StepPlan, StepResult
from quire.core.sequence import Request
from quire.engine.engine import Engine
from quire_lab.bench.report import client_facts
from quire_lab.paper.plots import Lines, drawn, rendered
from quire_lab.paper.runs import Meter
from quire_lab.sim.datasets import DATA_FOLDER, DATASETS
from quire_lab.sim.workloads import fitting
from without_model import InOrder, always_the_same, engine_without_model, request_of, run_all

BLOCK_SIZE = 16
MAX_TOTAL_LEN = 2048
MODEL_TOTAL_LEN = 1024
MAX_OPEN = 32
PROMPT_TOKEN = 1
PAPER = {  # n = 2 and 6: what the paper's text gives
    ("Alpaca", "parallel"): (0.061, 0.098),
    ("Alpaca", "beam"): (0.376, 0.552),
    ("ShareGPT", "parallel"): (0.162, 0.305),
    ("ShareGPT", "beam"): (0.443, 0.663),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One bar."""

    workload: str
    decoding: str   # parallel or beam
    n: int
    pattern: str    # where the survivors come from
    saved: float


def saving(engine: Engine, requests: Iterable[Request]) -> float:
    """Serve requests and return what sharing saves."""
    meter = Meter()
    run_all(engine, InOrder(iter(requests)), MAX_OPEN, lambda: meter.count(engine.scheduler))
    return meter.saved


def without_model(requests: Sequence[Lengths], n: int, answer: Callable[[StepPlan], StepResult]) -> Engine:
    """Return an engine that is never short of blocks."""
    longest = max(map(sum, requests)) // BLOCK_SIZE + 1
    cache = CacheConfig(MAX_OPEN * n * longest, BLOCK_SIZE, enable_prefix_caching=False)
    return engine_without_model(cache, MAX_OPEN * n, MAX_TOTAL_LEN, answer)


def parallel_saving(requests: Sequence[Lengths], n: int) -> float:
    """Return what `n` samples of each request save."""
    asked = (request_of(i, [PROMPT_TOKEN] * prompt, output, n) for i, (prompt, output) in enumerate(requests))
    return saving(without_model(requests, n, always_the_same), asked)


def random_beam_saving(requests: Sequence[Lengths], width: int, spread: float, seed: int) -> float:
    """Return what beams with random scores save."""
    asked = (beam_request(i, [PROMPT_TOKEN] * prompt, output, width) for i, (prompt, output) in enumerate(requests))
    return saving(without_model(requests, width, random_scores(width, spread, seed)), asked)


def lengths_of(workload: str, data: Path) -> list[Lengths]:
    """Return all lengths of a data set that fit into the model, as the paper counted them: with OPT's BOS."""
    dataset = DATASETS[workload.lower()]
    num_more = 1 if workload == "ShareGPT" else 0  # Alpaca's have it already
    read = fitting(dataset.read(data / dataset.file), dataset.file, MAX_TOTAL_LEN)
    return [Lengths(prompt + num_more, output) for prompt, output in read]


def evenly(requests: list[Lengths], count: int) -> list[Lengths]:
    """Return at most `count` of the requests, spread evenly over their totals: few stand for all."""
    ordered, count = sorted(requests, key=sum), min(count, len(requests))
    return [ordered[(2 * number + 1) * len(ordered) // (2 * count)] for number in range(count)]


# --- report ---------------------------------------------------------------------------------------------------------


def markdown(figures: Sequence[Figure], sizes: Sequence[int]) -> str:
    """Return a row for each workload, way of decoding and pattern."""
    lines = [
        f"| workload | decoding | survivors from | {' | '.join(f'n = {n}' for n in sizes)} | the paper, n = 2 and 6 |",
        "| --- " * (4 + len(sizes)) + "|",
    ]
    for row in dict.fromkeys(map(row_of, figures)):
        saved = {figure.n: figure.saved for figure in figures if row_of(figure) == row}
        low, high = PAPER[row[0], row[1]]
        cells = [*row, *(f"{saved[n]:.1%}" for n in sizes), f"{low:.1%} to {high:.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(figures: Sequence[Figure]) -> bytes:
    """Return the table as SVG: a panel for each workload, with what the paper gives for 2 and 6 answers."""
    series: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for (workload, decoding), saved in PAPER.items():
        told = [(n, 100 * share) for n, share in zip((2, 6), saved, strict=True)]
        series.setdefault(workload, {})[f"the paper, {decoding}"] = told
    for figure in figures:
        name = figure.decoding if figure.pattern == "-" else f"{figure.decoding}, {figure.pattern}"
        series[figure.workload].setdefault(name, []).append((figure.n, 100 * figure.saved))
    axes = ("samples or beams", "KV blocks saved by sharing, %")
    return rendered(drawn([Lines(workload, *axes, curves) for workload, curves in series.items()]), "svg")


def row_of(figure: Figure) -> tuple[str, str, str]:
    """Return what the figures of one row have in common."""
    return figure.workload, figure.decoding, figure.pattern


def main(
    data: Annotated[Path, typer.Option(help="folder with the lengths")] = DATA_FOLDER,
    n: Annotated[list[int] | None, typer.Option(min=2, help="samples and beams: 2, 4, 6")] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="of each workload, for parallel samples")] = 10_000,
    num_beam_requests: Annotated[int, typer.Option(min=1, help="of each workload, for random beams")] = 200,
    spread: Annotated[list[float] | None, typer.Option(help="of the random logits: 1, 2, 4, 8")] = None,
    model: Annotated[str | None, typer.Option(help="also beams of a model: demo, or a folder")] = None,
    num_model_requests: Annotated[int, typer.Option(min=1, help="of each workload, for the model's beams")] = 40,
    seed: Annotated[int, typer.Option()] = 0,
    output: Annotated[Path | None, typer.Option(help="Markdown; JSON and SVG beside it")] = None,
) -> None:
    """Measure, print the table, and write it with its plot."""
    names = ("Alpaca", "ShareGPT")
    if missing := [file for name in names if not (data / (file := DATASETS[name.lower()].file)).exists()]:
        sys.exit(f"{data} has no {', '.join(missing)}: nothing to measure (--data FOLDER)")
    sizes, spreads = n or [2, 4, 6], spread or [1.0, 2.0, 4.0, 8.0]
    figures: list[Figure] = []
    for workload in names:
        requests = lengths_of(workload, data)
        chosen = evenly(requests, num_requests)
        figures += [Figure(workload, "parallel", size, "-", parallel_saving(chosen, size)) for size in sizes]
        chosen = evenly(requests, num_beam_requests)
        for width in sizes:
            for each in spreads:
                saved = random_beam_saving(chosen, width, each, seed)
                figures.append(Figure(workload, "beam", width, f"random, spread {each:g}", saved))
        if model is not None:
            figures += model_figures(workload, requests, sizes, model, num_model_requests, seed)
        print(markdown([f for f in figures if f.workload == workload], sizes), flush=True)
    facts = client_facts() | {
        "requests": num_requests,
        "beam_requests": num_beam_requests,
        "model_requests": num_model_requests,
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
    }
    if output is not None:
        note = ", ".join(f"{key} {value}" for key, value in facts.items())
        output.write_text(f"{markdown(figures, sizes)}\n{note}\n", encoding="utf-8")
        output.with_suffix(".svg").write_bytes(plot(figures))
        record = {"facts": facts, "figures": [asdict(figure) for figure in figures]}
        output.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def model_figures(
    workload: str, requests: list[Lengths], sizes: Sequence[int], model: str, count: int, seed: int
) -> list[Figure]:
    """Return what the beams of a model save. Long requests take too long, and are left out."""
    folder = None if model == "demo" else model
    chosen = evenly([each for each in requests if sum(each) <= MODEL_TOTAL_LEN], count)
    with LLM(folder, kv_cache_memory="1GiB", seed=seed) as llm:
        prompts = written_prompts(llm, chosen, seed)
    figures = []
    for width in sizes:
        asked = (beam_request(i, prompts[i], lengths.output, width) for i, lengths in enumerate(chosen))
        saved = saving(model_engine(folder, MAX_OPEN * width, seed), asked)
        figures.append(Figure(workload, "beam", width, f"model {Path(model).name}, {len(chosen)} requests", saved))
    return figures


if __name__ == "__main__":
    typer.run(main)
