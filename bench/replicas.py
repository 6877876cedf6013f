"""Routing rules of several engines: prefix hits and balance, beside one engine with the same total cache.

    python bench/replicas.py --output replicas.md --plot replicas.svg

* chats: engines with the demo model serve sharegpt_sample_turns.csv.gz. Every answer is a request with all that was
  said before as its prompt, earlier answers as the engine gave them; `--chats` conversations are open at a time.
* trace: a simulation of Llama-3.1-8B on H100s under mooncake_conversation.jsonl.gz, `--speed-up` times as fast.

A hit rate is the share of prompt tokens that were cached. The one engine of a comparison has the blocks of all, and in
the simulation the speed of all. Balance: tokens that the busiest engine has computed, over the mean.
"""

import asyncio
import csv
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, NamedTuple, get_args

import typer
from matplotlib.figure import Figure
from prometheus_client.parser import text_string_to_metric_families

from quire.core.sampling_params import SamplingParams
from quire.engine.fleet.fleet import Fleet, FleetSettings, connect_fleet
from quire.engine.fleet.router import Routing
from quire.engine.launcher import spawn_engines
from quire.engine.metrics.page import Metrics
from quire.engine.options import EngineOptions
from quire_lab.sim.datasets import DATA_FOLDER
from quire_lab.sim.hardware import HARDWARE, CostModel, Hardware
from quire_lab.sim.models import read_model
from quire_lab.sim.planning import plan_memory
from quire_lab.sim.simulation import FleetSimulation
from quire_lab.sim.workloads import TraceSlice, WorkItem, open_text, trace_workload

CHATS, TRACE = "sharegpt_sample_turns.csv.gz", "mooncake_conversation.jsonl.gz"
MODEL, HARDWARE_NAME, LONGEST = "Llama-3.1-8B", "H100", 131_072
RULES = get_args(Routing)
FIRST_TOKEN, NUM_TOKENS = 300, 1500     # a chat's random tokens: above the special ones
CHAT_MODEL_LEN = 2048


class Row(NamedTuple):
    """One rule under one workload."""

    workload: str
    rule: str
    hit_rate: float
    balance: float              # computed tokens, largest over mean
    seconds: float              # the chats', or simulated


# --- chats ------------------------------------------------------------------------------------------------------------


class Chat(NamedTuple):
    """One conversation: for each answer, the tokens that the user says before it, and the answer's length."""

    turns: list[tuple[list[int], int]]


def read_chats(path: Path, count: int, longest_answer: int, seed: int) -> list[Chat]:
    """Return conversations that fit, with random tokens of their own."""
    generator, chats = random.Random(seed), list[Chat]()
    with open_text(path) as file:
        for _, rows in groupby(csv.DictReader(file), itemgetter("conversation")):
            said, turns, total = list[int](), list[tuple[list[int], int]](), 0
            for row in rows:
                length = int(row["tokens"])
                if row["role"] == "gpt" and said:
                    answer = min(length, longest_answer)
                    total += len(said) + answer
                    if answer < 1 or total > CHAT_MODEL_LEN:
                        break
                    turns.append((said, answer))
                    said = []
                elif row["role"] != "gpt":
                    said = said + [FIRST_TOKEN + generator.randrange(NUM_TOKENS) for _ in range(length)]
            if turns:
                chats.append(Chat(turns))
    generator.shuffle(chats)
    return chats[:count]


async def serve_chats(
    chats: Sequence[Chat], num_engines: int, num_blocks: int, num_open: int, routing: Routing
) -> Row:
    """Serve all chats, `num_open` at a time."""
    options = EngineOptions(
        num_kv_blocks=num_blocks, max_model_len=CHAT_MODEL_LEN, data_parallel_size=num_engines, max_num_seqs=32
    )
    metrics = Metrics("demo", num_engines=num_engines)
    fleet = await connect_fleet(spawn_engines(options), FleetSettings(options, metrics, routing=routing))
    try:
        waiting, num_prompt, num_cached = deque(chats), 0, 0

        async def client() -> None:
            nonlocal num_prompt, num_cached
            while waiting:
                chat, prompt = waiting.popleft(), list[int]()
                for said, answer_len in chat.turns:
                    prompt = prompt + said
                    tokens, found = await ask(fleet, prompt, answer_len)
                    num_prompt, num_cached = num_prompt + len(prompt), num_cached + found
                    prompt = prompt + tokens

        begun_s = time.monotonic()
        await asyncio.gather(*(client() for _ in range(num_open)))
        seconds = time.monotonic() - begun_s
        computed = list(computed_tokens(metrics))
        rule = routing if num_engines > 1 else "one engine"
        balance = max(computed) * len(computed) / sum(computed)
        name = f"chats, {num_engines} engines" if num_engines > 1 else "chats"
        return Row(name, rule, num_cached / num_prompt, balance, seconds)
    finally:
        await fleet.close()


async def ask(fleet: Fleet, prompt: list[int], answer_len: int) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many tokens of the prompt were cached."""
    params = fleet.inputs.check_params(SamplingParams(temperature=0.0, max_tokens=answer_len, ignore_eos=True))
    prepared = fleet.prepare(fleet.inputs.tokenize(prompt), params)
    stream = await fleet.add(prepared, external_id="chat", arrival_s=time.monotonic())
    output = await anext(stream)
    return output.outputs[0].token_ids, output.num_cached_tokens


def computed_tokens(metrics: Metrics) -> Iterator[float]:
    """Yield the tokens that each engine has computed."""
    for family in text_string_to_metric_families(metrics.exposition()[0].decode()):
        for sample in family.samples:
            if sample.name == "quire:step_computed_tokens_sum":
                yield sample.value


# --- trace ------------------------------------------------------------------------------------------------------------


def simulate(items: Sequence[WorkItem], num_engines: int, routing: Routing, speed: int) -> Row:
    """Simulate engines, each `speed` times as fast as a card and with the cache of as many."""
    model, hardware = read_model(MODEL, "auto", EngineOptions().quantization_options), HARDWARE[HARDWARE_NAME]
    found = plan_memory(model, hardware, EngineOptions(max_model_len=LONGEST))
    cache = replace(found.cache, num_blocks=found.cache.num_blocks * speed)
    config = replace(found.scheduler, max_num_seqs=found.scheduler.max_num_seqs * speed)
    cost = CostModel(model.spec, faster(hardware, speed), cache.block_size, dtype=found.dtype)
    due_s = [item.arrival_s or 0.0 for item in items]
    run = FleetSimulation(num_engines, cache, config, cost, routing).run(items, due_s)
    rule = routing if num_engines > 1 else "one engine"
    whole = run.whole
    name = f"trace, {num_engines} engines" if num_engines > 1 else "trace"
    return Row(name, rule, whole.hit_rate, run.imbalance, whole.duration_s)


def faster(hardware: Hardware, speed: int) -> Hardware:
    """Return hardware with every rate times `speed`."""
    rates = {name: getattr(hardware, name) * speed for name in ("bytes_per_s", "flops_per_s", "host_bytes_per_s")}
    times = {name: getattr(hardware, name) / speed for name in ("copy_s", "step_s", "sequence_s")}
    return replace(hardware, **rates, **times)


# --- report -----------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown; the ratio is to the one engine of the same workload."""
    lines = ["| workload | rule | hit rate | of one engine's | largest over mean | s |", "|" + " --- |" * 6]
    alone = {row.workload: row.hit_rate for row in rows if row.rule == "one engine"}
    for row in rows:
        ratio = row.hit_rate / alone[row.workload.partition(",")[0]]
        figures = f"{row.hit_rate:.3f} | {ratio:.2f} | {row.balance:.2f} | {row.seconds:.1f}"
        lines.append(f"| {row.workload} | {row.rule} | {figures} |")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw hit rates and balance of the rules, a column for each workload."""
    workloads = list(dict.fromkeys(row.workload.partition(",")[0] for row in rows))
    figure = Figure(figsize=(4 * len(workloads), 6), layout="constrained")
    axes = figure.subplots(2, len(workloads), squeeze=False)
    for column, workload in enumerate(workloads):
        own = [row for row in rows if row.workload.partition(",")[0] == workload]
        rules = [row.rule for row in own]
        titles = "hit rate", "computed tokens, largest over mean"
        values = [row.hit_rate for row in own], [row.balance for row in own]
        for axis, title, heights in zip(axes[:, column], titles, values, strict=True):
            axis.bar_label(axis.bar(rules, heights), fmt="%.2f")
            axis.set_title(f"{workload}: {title}")
        axes[1][column].axhline(1.15, linewidth=0.8, linestyle="--", color="black")
    figure.savefig(path)


def main(
    data: Annotated[Path, typer.Option(help="folder of the data sets")] = DATA_FOLDER,
    engines: Annotated[int, typer.Option(help="engines that serve chats")] = 3,
    conversations: Annotated[int, typer.Option(help="chats in all; 0: none")] = 120,
    chats: Annotated[int, typer.Option(help="chats at a time")] = 24,
    blocks: Annotated[int, typer.Option(help="KV blocks of all engines, for the chats")] = 1200,
    answer: Annotated[int, typer.Option(help="most tokens of an answer in a chat")] = 48,
    simulated: Annotated[int, typer.Option(help="engines that are simulated")] = 8,
    requests: Annotated[int, typer.Option(help="requests of the trace; 0: none")] = 1500,
    speed_up: Annotated[float, typer.Option(help="of the trace")] = 1.0,
    seed: int = 0,
    output: Annotated[Path | None, typer.Option(help="the table, as Markdown")] = None,
    plot: Annotated[Path | None, typer.Option(help="a picture of it, in a format of matplotlib's")] = None,
) -> None:
    """Compare the rules, and print the table after each run."""
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)

    if conversations:
        asked = read_chats(data / CHATS, conversations, answer, seed)
        add(asyncio.run(serve_chats(asked, 1, blocks, chats, "prefix")))
        for rule in RULES:
            add(asyncio.run(serve_chats(asked, engines, blocks, chats, rule)))
    if requests:
        items = trace_workload(data / TRACE, TraceSlice(requests, LONGEST, speed_up=speed_up), 100_000, seed)
        add(simulate(items, 1, "prefix", simulated))
        for rule in RULES:
            add(simulate(items, simulated, rule, 1))
    print(table(rows))
    if output is not None:
        output.write_text(table(rows))
    if plot is not None:
        draw(rows, plot)


if __name__ == "__main__":
    typer.run(main)
