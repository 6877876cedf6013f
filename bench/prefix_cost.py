"""Cost of the prefix cache for requests without hits: the control plane with it and without, in turn.

    python bench/prefix_cost.py

* decoding: `quire bench control-plane`, sequences that decode and have nothing in common. Two engines in one process
  take turns of `--steps` steps; the figure is the median of the ratios of neighbours.
* whole lives: requests arrive, are computed and finish, `--num-seqs` at a time, in a cache that is full of
  earlier requests' blocks, so that each allocation evicts one. No batch is prepared here.

A shared machine changes its speed from one second to the next: only ratios within a pair mean something.
"""

import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from quire.core.config import CacheConfig
from quire.engine.engine import Engine
from quire_lab.bench.control_plane import decoding_engine
from quire_lab.bench.report import client_facts
from without_model import InOrder, engine_without_model, request_of, run_all

PROMPT_LEN, OUTPUT_LEN, BLOCK_SIZE = 128, 128, 16
TOKEN_BUDGET = 2048


def decoding_pairs(num_seqs: int, steps: int, num_pairs: int) -> Iterator[tuple[float, float]]:
    """Yield microseconds per sequence and step, with the cache and without, of neighbouring turns."""
    with_cache, without = (
        decoding_engine(num_seqs, (num_pairs + 1) * steps, PROMPT_LEN, BLOCK_SIZE, enable_prefix_caching=enabled)
        for enabled in (True, False)
    )

    def run(engine: Engine) -> float:
        started_s = time.perf_counter()
        for _ in range(steps):
            engine.step()
        return (time.perf_counter() - started_s) / steps / num_seqs * 1e6

    yield from in_turn(lambda: run(with_cache), lambda: run(without), num_pairs)


def life_pairs(num_seqs: int, num_pairs: int) -> Iterator[tuple[float, float]]:
    """Yield microseconds per output token of requests that arrive and finish, with the cache and without."""
    num_blocks = num_seqs * ((PROMPT_LEN + OUTPUT_LEN) // BLOCK_SIZE + 1)
    with_cache, without = (
        engine_without_model(CacheConfig(num_blocks, BLOCK_SIZE, enable_prefix_caching=enabled), num_seqs, TOKEN_BUDGET)
        for enabled in (True, False)
    )
    num_asked = 0

    def run(engine: Engine) -> float:
        nonlocal num_asked
        first, num_asked = num_asked, num_asked + num_seqs
        asked = (request_of(i, [i] * PROMPT_LEN, OUTPUT_LEN) for i in range(first, num_asked))
        started_s = time.perf_counter()
        run_all(engine, InOrder(asked), num_seqs)
        return (time.perf_counter() - started_s) / num_seqs / OUTPUT_LEN * 1e6

    run(with_cache)  # fills it
    yield from in_turn(lambda: run(with_cache), lambda: run(without), num_pairs)
    assert with_cache.kv_stats().evicted_blocks > 0, "the cache was never full"


def in_turn(left: Callable[[], float], right: Callable[[], float], num_pairs: int) -> Iterator[tuple[float, float]]:
    """Yield what both give, pair by pair, in changing order. The first pair warms up."""
    gc.disable()
    for number in range(num_pairs + 1):
        pair = (left(), right()) if number % 2 else (right(), left())[::-1]
        gc.collect()
        if number:
            yield pair
    gc.enable()


def main(
    num_seqs: Annotated[int, typer.Option(min=1, help="sequences at a time")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="of a turn of decoding: a multiple of 16")] = 32,
    pairs: Annotated[int, typer.Option(min=1, help="of turns of decoding")] = 100,
    life_rounds: Annotated[int, typer.Option(min=1, help="pairs of whole lives")] = 30,
    output: Annotated[Path | None, typer.Option(help="Markdown; JSON beside it")] = None,
) -> None:
    """Measure both, and print a table."""
    measured = {
        "decoding, us per sequence and step": list(decoding_pairs(num_seqs, steps, pairs)),
        "whole lives in a full cache, us per output token": list(life_pairs(num_seqs, life_rounds)),
    }
    lines = ["| | with the cache | without | with / without | quartiles |", "| --- | --- | --- | --- | --- |"]
    for title, values in measured.items():
        both = np.array(values)
        low, middle, high = np.percentile(both[:, 0] / both[:, 1], [25, 50, 75])
        on, off = np.median(both, axis=0)
        lines.append(f"| {title} | {on:.2f} | {off:.2f} | {middle:.3f} | {low:.3f} to {high:.3f} |")
    facts = client_facts() | {"num_seqs": num_seqs, "date": time.strftime("%Y-%m-%d")}
    table = "\n".join(lines) + "\n\n" + ", ".join(f"{key} {value}" for key, value in facts.items()) + "\n"
    print(table)
    if output is not None:
        output.write_text(table, encoding="utf-8")
        output.with_suffix(".json").write_text(json.dumps({"facts": facts, "pairs": measured}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
