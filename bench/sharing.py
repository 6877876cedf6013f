"""What sharing saves: blocks of parallel samples and of beams over those without sharing (the paper's figure 15).

    python bench/sharing.py --data ../shared/data --output sharing.md          # and sharing.json, sharing.svg

Requests have the lengths of Alpaca and of ShareGPT's first turns (at most 2,048 tokens), and one token more, the BOS of
the paper's OPT. Saved is the sum over all steps of the blocks that sharing spares, over the sum of the blocks that the
same sequences would hold each by itself; both are counted between two steps. Blocks of 16, no prefix cache, as there.

Parallel samples run through the real scheduler without a model: who shares what follows from lengths alone. Beams run
through the real cache, forks for survivors and frees for losers, and which ones survive comes from `beam_patterns.py`:
from random scores, sure of themselves or not (`--spread`), or from a model (`--model demo`, or a folder).
"""

import csv
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from beam_patterns import Lengths, Parents, model_patterns, random_patterns
from quire import LLM
from quire.cache.manager import KVCacheManager
from quire.cli.bench.machine import client_facts
from quire.core.config import CacheConfig
from quire.core.sequence import NO_ROW
from quire.engine.engine import Engine
from quire.paper.workloads import length_workload, open_text
from sharing_plot import Group, svg
from without_model import InOrder, engine_without_model, request_of, run_all

DATA = Path(__file__).parents[1] / "../shared/data"
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


@dataclass(slots=True)
class Meter:
    """Sums blocks over steps."""

    with_sharing: int = 0
    without: int = 0

    @property
    def saved(self) -> float:
        """Return the share of blocks that sharing makes unnecessary."""
        return 1 - self.with_sharing / self.without

    def count(self, cache: KVCacheManager, seq_ids: Iterable[int]) -> None:
        """Count the state between two steps."""
        self.with_sharing += cache.stats().used_blocks
        self.without += sum(cache.blocks_for(cache.num_tokens(seq_id)) for seq_id in seq_ids)

    def count_engine(self, engine: Engine) -> None:
        """Count the running sequences of an engine."""
        running = [sequence for request in engine.scheduler.running for sequence in request.live]
        self.count(engine.scheduler.cache, (sequence.seq_id for sequence in running if sequence.row != NO_ROW))


@dataclass(frozen=True, slots=True)
class Figure:
    """One bar."""

    workload: str
    decoding: str   # parallel or beam
    n: int
    pattern: str    # where the survivors come from
    saved: float


# --- parallel samples -----------------------------------------------------------------------------------------------


def parallel_saving(requests: Sequence[Lengths], n: int) -> float:
    """Return what `n` samples of each request save."""
    longest = max(map(sum, requests)) // BLOCK_SIZE + 1
    cache = CacheConfig(MAX_OPEN * n * longest, BLOCK_SIZE, enable_prefix_caching=False)
    engine, meter = engine_without_model(cache, MAX_OPEN * n, MAX_TOTAL_LEN), Meter()
    asked = (request_of(i, [PROMPT_TOKEN] * prompt, output, n) for i, (prompt, output) in enumerate(requests))
    run_all(engine, InOrder(asked), MAX_OPEN, lambda: meter.count_engine(engine))
    return meter.saved


# --- beams ----------------------------------------------------------------------------------------------------------


def beam_saving(requests: Sequence[Lengths], width: int, patterns: Iterator[Iterator[Parents]]) -> float:
    """Return what beams save. Requests share nothing with each other, so each may run by itself."""
    meter = Meter()
    for lengths, pattern in zip(requests, patterns, strict=True):
        run_beams(lengths, width, pattern, meter)
    return meter.saved


def run_beams(lengths: Lengths, width: int, pattern: Iterator[Parents], meter: Meter) -> None:
    """Let beams live as their pattern says: the prompt once, a fork for each beam, then a token for each in a step."""
    num_blocks = width * (sum(lengths) // BLOCK_SIZE + 1)
    cache = KVCacheManager(CacheConfig(num_blocks, BLOCK_SIZE, enable_prefix_caching=False))
    beams, num_begun = [0], 1
    cache.create(0)
    cache.append(0, lengths.prompt)
    survivors: Parents | None = [0] * width
    while survivors is not None:
        beams, num_begun = select(cache, beams, survivors, num_begun)
        meter.count(cache, beams)
        survivors = next(pattern, None)
        for beam in beams if survivors is not None else ():
            cache.append(beam, 1)
    cache.check()


def select(cache: KVCacheManager, beams: list[int], parents: Parents, num_begun: int) -> tuple[list[int], int]:
    """Return the next beams: losers are freed first, a parent's first child takes its place, the others are forks."""
    for loser in set(range(len(beams))) - set(parents):
        cache.free(beams[loser])
    chosen, taken = list[int](), set[int]()
    for parent in parents:
        child = beams[parent]
        if parent in taken:
            child, num_begun = num_begun, num_begun + 1
            cache.fork(beams[parent], child)
        taken.add(parent)
        chosen.append(child)
    return chosen, num_begun


# --- lengths --------------------------------------------------------------------------------------------------------


def alpaca(data: Path) -> list[Lengths]:
    """Return the lengths of Alpaca as the paper counted them: without the template, and with OPT's BOS."""
    with open_text(data / "alpaca_lengths.csv.gz") as lines:
        rows = [(int(row["prompt_plain_tokens"]) + 1, int(row["output_tokens"])) for row in csv.DictReader(lines)]
    return [Lengths(*row) for row in rows if row[1] > 0]


def sharegpt(data: Path) -> list[Lengths]:
    """Return the lengths of ShareGPT's first turns."""
    items = length_workload(data / "sharegpt_sample_turns.csv.gz", None, MAX_TOTAL_LEN, vocab_size=2, seed=0)
    return [Lengths(len(item.prompt_token_ids) + 1, item.output_len) for item in items]


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


def plot(figures: Sequence[Figure]) -> str:
    """Return the plot as SVG: a group of bars for each row of the table, the paper's range behind it."""
    groups = []
    for row in dict.fromkeys(map(row_of, figures)):
        workload, decoding, pattern = row
        words = decoding if pattern == "-" else f"{decoding}, {pattern}"
        bars = [(figure.n, figure.saved) for figure in figures if row_of(figure) == row]
        groups.append(Group(workload, words, bars, PAPER[workload, decoding]))
    return svg("KV blocks saved by sharing", groups)


def row_of(figure: Figure) -> tuple[str, str, str]:
    """Return what the figures of one row have in common."""
    return figure.workload, figure.decoding, figure.pattern


def main(
    data: Annotated[Path, typer.Option(help="folder with the lengths")] = DATA,
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
    names = ("alpaca_lengths.csv.gz", "sharegpt_sample_turns.csv.gz")
    if missing := [name for name in names if not (data / name).exists()]:
        sys.exit(f"{data} has no {', '.join(missing)}: nothing to measure (--data FOLDER)")
    sizes, spreads = n or [2, 4, 6], spread or [1.0, 2.0, 4.0, 8.0]
    figures: list[Figure] = []
    for workload, requests in (("Alpaca", alpaca(data)), ("ShareGPT", sharegpt(data))):
        chosen = evenly(requests, num_requests)
        figures += [Figure(workload, "parallel", size, "-", parallel_saving(chosen, size)) for size in sizes]
        chosen = evenly(requests, num_beam_requests)
        for width in sizes:
            for each in spreads:
                saved = beam_saving(chosen, width, random_patterns(chosen, width, each, seed))
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
        output.with_suffix(".svg").write_text(plot(figures), encoding="utf-8")
        record = {"facts": facts, "figures": [asdict(figure) for figure in figures]}
        output.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def model_figures(
    workload: str, requests: list[Lengths], sizes: Sequence[int], model: str, count: int, seed: int
) -> list[Figure]:
    """Return what the beams of a model save. Long requests take too long, and are left out."""
    with LLM(model=None if model == "demo" else model, kv_cache_memory="1GiB", seed=seed) as llm:
        chosen = evenly([each for each in requests if sum(each) <= MODEL_TOTAL_LEN], count)
        return [
            Figure(workload, "beam", width, f"model {Path(model).name}",
                   beam_saving(chosen, width, model_patterns(llm, chosen, width, seed)))
            for width in sizes
        ]


if __name__ == "__main__":
    typer.run(main)
