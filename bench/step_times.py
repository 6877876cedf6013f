"""Errors of predicted step times: steps of random mixtures of prompts and decodes, by the steps before them.

    python bench/step_times.py MODEL                                        # settings of the table, in turns
    python bench/step_times.py MODEL --settings '{"cpu_isa": "avx2"}' --seconds 60
    OMP_NUM_THREADS=1 python bench/step_times.py MODEL --cpu-time           # on a machine that does other work

Requests arrive by chance, with prompts of 4 to 8,000 tokens and limits of a step that change; the first eighth of the
steps, in which prices are learnt, does not count. Other work on the machine is in the figures, as it is in those of a
server, but with `--cpu-time`: then steps are measured in the running time of the one thread that computes them.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from adapters import write_adapter
from quire import LLM, LoRARequest, SamplingParams
from quire.execution import worker
from quire.extension.isas import usable_isas
from quire_lab.bench.report import machine_facts

PROMPTS, OUTPUTS, CHUNKS = (4, 16, 60, 200, 700, 1500, 3000, 8000), (10, 50, 200), (8, 16, 32, 64, 128, 256, 512)
MOST_REQUESTS, ARRIVAL_RATE, STEPS_PER_CHUNK = 12, 0.08, 40
CLOSE, LEARNING = 0.2, 1 / 8
VOCABULARY, RANK = 30_000, 16
COMMON = {"max_model_len": 8500, "num_kv_blocks": 4000, "enable_prefix_caching": False}
Settings = dict[str, Any]


def cases() -> dict[str, Settings]:
    """Return the settings of the table by name."""
    return {isa: {"cpu_isa": isa} for isa in usable_isas() or ("portable",)} | {
        "int8 weights": {"quantization": "int8"},
        "KV cache in 8 bits": {"kv_cache_dtype": "int8_per_token_head"},
        "speculation": {"speculative_config": {"method": "ngram"}},
        "adapters": {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK},
    }


def ratios_of(
    llm: LLM, seconds: float, adapters: list[LoRARequest | None], clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Run random requests for so long; return measured over predicted seconds of steps, by their kind."""
    rng, engine, found = random.Random(1), llm._engine.engine, dict[str, list[float]]()
    ends_s, num_steps = clock() + seconds, 0
    while clock() < ends_s:
        if num_steps % STEPS_PER_CHUNK == 0:
            engine.scheduler.planner._prefill_budget._budget = rng.choice(CHUNKS)
        num_requests = len(engine.scheduler.queues.requests)
        if num_requests == 0 or (num_requests < MOST_REQUESTS and rng.random() < ARRIVAL_RATE):
            prompt = [100 + rng.randrange(VOCABULARY) for _ in range(rng.choice(PROMPTS))]
            params = SamplingParams(max_tokens=rng.choice(OUTPUTS), temperature=0.0, ignore_eos=True)
            tokenized = llm._adapted(llm._tokenize([prompt], params), rng.choice(adapters))
            for prepared in llm._prepare(tokenized, params, None):
                engine.add(prepared.request)
        engine.step()
        num_steps += 1
        if engine.timing is not None and engine.timing.ratio is not None:
            kind = "decode" if engine.timing.kind == "decode" else "with chunks"
            found.setdefault(kind, []).append(engine.timing.ratio)
    return found


def main(
    model: Annotated[Path, typer.Argument(help="folder of a model")],
    settings: Annotated[str, typer.Option(help="of one engine, as JSON, instead of the table's")] = "",
    seconds: Annotated[float, typer.Option(help="for each row")] = 40.0,
    dummy: Annotated[bool, typer.Option(help="random weights of the shapes in config.json")] = False,
    cpu_time: Annotated[bool, typer.Option(help="running time of the one thread that computes, not wall time")] = False,
) -> None:
    """Print how far measured steps were from predicted ones."""
    if cpu_time:
        worker.time = SimpleNamespace(perf_counter=time.thread_time)
    clock = time.process_time if cpu_time else time.monotonic
    print(machine_facts())
    print(f"{'settings':24}{'steps':14}{'number':>8}{'within 20 %':>14}{'off, median':>14}{'p90':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for name, own in ({settings: json.loads(settings)} if settings else cases()).items():
            adapters: list[LoRARequest | None] = [None]
            if "enable_lora" in own:
                adapters += [write_adapter(model, Path(folder) / str(number), number, RANK) for number in range(2)]
            with LLM(model, load_format="dummy" if dummy else "auto", **COMMON | own) as llm:
                for kind, ratios in sorted(ratios_of(llm, seconds, adapters, clock).items()):
                    off = sorted(abs(1 / ratio - 1) for ratio in ratios[int(len(ratios) * LEARNING) :])
                    close = sum(each <= CLOSE for each in off) / len(off)
                    print(
                        f"{name:24}{kind:14}{len(off):8}{100 * close:13.0f}%{100 * statistics.median(off):13.1f}%"
                        f"{100 * off[int(0.9 * len(off))]:7.0f}%", flush=True,
                    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
