"""Quire against transformers, in one process: `generate` in static batches, and its continuous batching.

    python bench/compare_transformers.py MODEL WORKLOADS.json --output table.md

All engines get the same requests (token ids in, greedy, end-of-sequence ignored), all at once, and have the same
threads. They take turns in every repeat, because the speed of a shared machine drifts: a ratio of two figures from one
turn means more than either figure. A small read of memory before and after tells how far it drifted. Of each figure
the table holds the median over the repeats and, in brackets, the extremes.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import transformers
import typer
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from quire import LLM
from quire.cli.bench.machine import machine_facts
from quire.cli.bench.passes import latency_pass
from quire.cli.bench.statistics import Spread, Timeline, latencies, spread
from quire.cli.bench.workloads import WorkItem, token_id_workload

STATIC_BATCH = 16
PAD_TOKEN = 0  # masked out, so any id will do
KV_BLOCKS = {"page_size": 32, "num_blocks": 1024}
MAX_BATCH_TOKENS = 2048
MAX_SEQS = 64
READ_BYTES = 512 * 1024 * 1024

Engine = Callable[[list[WorkItem]], list[Timeline]]


class Figure(NamedTuple):
    """What a workload is judged by."""

    title: str
    of_pass: Callable[[list[WorkItem], list[Timeline]], float]
    more_is_better: bool


def wall_s(timelines: list[Timeline]) -> float:
    return max(timeline.token_times_s[-1] for timeline in timelines)


FIGURES = {
    "decode1": Figure("ms per output token", lambda items, times: latencies(times)["tpot_s"].p50 * 1e3, False),
    "prefill": Figure(
        "prompt tokens/s", lambda items, times: sum(len(i.prompt_token_ids) for i in items) / wall_s(times), True
    ),
}
THROUGHPUT = Figure("output tokens/s", lambda items, times: sum(i.output_len for i in items) / wall_s(times), True)


class TokenClock(StoppingCriteria):
    """Never stops anything; notes when each token of the batch was made."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def static_batches(model: PreTrainedModel) -> Engine:
    """Return transformers' `generate` over batches of 16, padded on the left, each as long as its longest answer."""

    def run_batch(items: list[WorkItem], started_s: float) -> list[Timeline]:
        longest = max(len(item.prompt_token_ids) for item in items)
        padding = [longest - len(item.prompt_token_ids) for item in items]
        ids = [[PAD_TOKEN] * pad + item.prompt_token_ids for pad, item in zip(padding, items, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        clock = TokenClock()
        with torch.inference_mode():
            model.generate(
                torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=max(item.output_len for item in items),
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        times = [time_s - started_s for time_s in clock.times_s]
        return [Timeline(0.0, times[: item.output_len]) for item in items]

    def run(items: list[WorkItem]) -> list[Timeline]:
        started_s = time.perf_counter()
        batches = [items[i : i + STATIC_BATCH] for i in range(0, len(items), STATIC_BATCH)]
        return [timeline for batch in batches for timeline in run_batch(batch, started_s)]

    return run


def continuous_batching(model: PreTrainedModel) -> Engine:
    """Return transformers' continuous batching; its thread and its cache live for one run, and are not timed."""
    config = ContinuousBatchingConfig(
        max_batch_tokens=MAX_BATCH_TOKENS, max_requests_per_batch=MAX_SEQS, **KV_BLOCKS
    )
    generation = GenerationConfig(do_sample=False, pad_token_id=PAD_TOKEN, eos_token_id=-1)

    def run(items: list[WorkItem]) -> list[Timeline]:
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, timeout=5, warmup=False
        ) as manager:
            started_s = time.perf_counter()
            places = {
                manager.add_request(
                    item.prompt_token_ids, max_new_tokens=item.output_len, eos_token_id=-1, record_timestamps=True
                ): place
                for place, item in enumerate(items)
            }
            timelines = {}
            while len(timelines) < len(items):
                output = manager.get_result(timeout=1)
                if output is not None and output.is_finished():
                    times = [time_s - started_s for time_s in output.timestamps]
                    timelines[places[output.request_id]] = Timeline(0.0, times)
                elif not manager.is_running():
                    raise RuntimeError("transformers' continuous batching has stopped")
        return [timelines[place] for place in range(len(items))]

    return run


def load_engines(model_folder: Path, dtype: str) -> dict[str, Engine]:
    """Return the engines by their titles; the two of transformers share one model."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    model.eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=PAD_TOKEN, eos_token_id=None)
    llm = LLM(
        model=str(model_folder),
        dtype=dtype,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_BATCH_TOKENS,
        num_kv_blocks=KV_BLOCKS["page_size"] * KV_BLOCKS["num_blocks"] // 16,
    )
    return {
        "Quire": lambda items: latency_pass(llm, items, concurrency=len(items)),
        f"generate, batches of {STATIC_BATCH}": static_batches(model),
        "continuous batching": continuous_batching(model),
    }


def timed(engine: Engine, items: list[WorkItem]) -> list[Timeline]:
    """Run a workload and make sure that all of it was done."""
    timelines = engine(items)
    made = [len(timeline.token_times_s) for timeline in timelines]
    assert made == [item.output_len for item in items], f"tokens made and asked for differ: {made}"
    return timelines


def read_gb_per_s() -> float:
    """Return how fast all threads together read memory now: the bound of decoding."""
    numbers = torch.ones(READ_BYTES // 4)
    numbers.sum()
    started_s = time.perf_counter()
    numbers.sum()
    return READ_BYTES / (time.perf_counter() - started_s) / 1e9


def ratio(figure: Figure, ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return how many times faster we are, over the repeats."""
    pairs = zip(ours, theirs, strict=True)
    return spread([our / their if figure.more_is_better else their / our for our, their in pairs])


def cell(values: Spread, unit: str = "") -> str:
    def short(number: float) -> str:
        return f"{number:.0f}" if number >= 100 else f"{number:.3g}"

    return f"{short(values.median)}{unit} ({short(values.low)} to {short(values.high)})"


def markdown(results: dict[str, dict[str, list[float]]]) -> str:
    """Return the table: a row per workload, a column per engine, then Quire over each of the others."""
    engines = list(next(iter(results.values())))
    columns = ["workload", "figure", *engines, *(f"Quire over {engine}" for engine in engines[1:])]
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    for name, by_engine in results.items():
        figure = FIGURES.get(name, THROUGHPUT)
        cells = [name, figure.title, *(cell(spread(values)) for values in by_engine.values())]
        cells += [cell(ratio(figure, by_engine["Quire"], by_engine[engine]), "x") for engine in engines[1:]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(
    model: Annotated[Path, typer.Argument(exists=True, help="folder in Hugging Face format")],
    workloads: Annotated[Path, typer.Argument(exists=True, help="JSON: lists of requests by name")],
    only: str = "decode1,prefill,offline64,chat32,prefix",
    repeats: int = 3,
    dtype: str = "bfloat16",
    output: Annotated[Path | None, typer.Option(help="Markdown file; figures go beside it as JSON")] = None,
) -> None:
    """Measure, print the table, and write it where asked."""
    engines = load_engines(model, dtype)
    facts = machine_facts() | {"transformers": transformers.__version__, "model": model.name, "repeats": repeats}
    facts["read_gb_per_s_before"] = round(read_gb_per_s(), 1)  # type: ignore[assignment]
    warm_up = [WorkItem(list(range(1, length)), 12) for length in (16, 40, 128)]
    for engine in engines.values():
        timed(engine, warm_up)
    results: dict[str, dict[str, list[float]]] = {}
    for name in only.split(","):
        items, figure = token_id_workload(workloads, name, None), FIGURES.get(name, THROUGHPUT)
        results[name] = {title: [] for title in engines}
        for repeat in range(repeats):
            for title, engine in engines.items():
                value = figure.of_pass(items, timed(engine, items))
                results[name][title].append(value)
                print(f"{name} #{repeat} {title}: {value:.4g} {figure.title}", flush=True)
    facts["read_gb_per_s_after"] = round(read_gb_per_s(), 1)  # type: ignore[assignment]
    table = markdown(results) + "\n" + ", ".join(f"{key} {value}" for key, value in facts.items()) + "\n"
    print(table)
    if output is not None:
        output.write_text(table, encoding="utf-8")
        output.with_suffix(".json").write_text(json.dumps({"facts": facts, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
