"""Speculative decoding: speed by acceptance, on recorded texts, and where nothing can be guessed.

    python bench/speculation.py MODEL [--quantization int8] [--parts oracle,texts,nothing,control]
    python bench/speculation.py MODEL --parts draft --draft-model FOLDER

* oracle: drafts of 4 tokens from the same request's answer without drafts, each token wrong with probability 1 - a; the
  answers must be the same. Once with every step verifying 4, once with lengths that adapt.
* texts: recorded texts (speculation_texts.json, from the project's history and documentation) take the place of what
  is sampled, so that a model with random weights writes them; drafts are kept where they equal the text.
* nothing: texts of random tokens, which no n-gram predicts; and of few different ones, where n-grams are always found
  and always wrong; 1, 16 and 64 sequences. Slowdown by drafters that cannot help.
* simulated: tokens of the recorded texts by the cost of their steps, as the lengths reckon it, for several shortest
  n-grams and for suffixes; without a model, and the same on every machine.
* control: host time of a step without a model, and of all that a drafter adds to it when it finds nothing.
* draft: acceptance by oracle, but the draft model (--draft-model) computes; the cost of drafting is in it.
* draft-model: the same for two shapes of Qwen2.5 (--shapes) with random weights, made without files.
* mtp: the same with the MTP head of a shape of Qwen3.5 (--shapes 3.5-4b), drafts of 3 tokens; before that the times of
  single steps by what the head does in them, in random turns, which tell more than ratios on a busy machine.
* eagle3: the same with an EAGLE-3 head of 32,000 tokens (--shapes qwen3-4b).

One engine, its drafter on and off in turns; medians over turns of the ratio within a turn. A shared machine changes its
speed: run it alone, or with --threads 1, which counts CPU time, so that other processes matter little.
"""

import itertools
import json
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast

import numpy as np
import typer
from numpy.typing import NDArray
from torch import Tensor

from quire import LLM, SamplingParams
from quire.core.config import CacheConfig
from quire.core.plan import NewRow, StepPlan
from quire.core.sequence import Request
from quire.core.speculation import SpeculationConfig, parse_speculation
from quire.core.token_ids import pack_tokens
from quire.decoding.sampler import SampledTokens
from quire.engine.assembly import build_engine
from quire.engine.engine import Engine
from quire.engine.formats import load_tokenizer
from quire.engine.options import EngineOptions
from quire.execution.batch import IntArray, PersistentBatch, StepInputs
from quire.execution.drafter import Drafter, DraftRows, rows_to_draft
from quire.execution.drafting.draft_model import DraftModel
from quire.execution.drafting.drafters import AdaptiveLength, LimitedDrafter, StepCost, make_drafter
from quire.execution.row_results import num_accepted
from quire.execution.worker import Worker
from quire.extension.isas import set_threads_of_kernels, threads_of_kernels
from quire.model.resolve import DEMO_MODEL
from quire.text.tokenizer import Tokenizer
from quire_lab.bench.report import machine_facts
from random_models import (
    QWEN2_5_0_5B,
    QWEN2_5_7B,
    QWEN3_4B,
    QWEN3_5_0_8B,
    QWEN3_5_4B,
    random_draft_model,
    random_model,
    random_model_with_head,
)
from without_model import engine_without_model

TEXTS = Path(__file__).with_name("speculation_texts.json")
NUM_DRAFTS = 4
NO_STEP = cast("StepInputs", None)  # lookups read no tensors of a step
PROMPT_LEN, MAX_LEN = 64, 2048
SHAPES = {"7b": QWEN2_5_7B, "0.5b": QWEN2_5_0_5B, "3.5-0.8b": QWEN3_5_0_8B, "3.5-4b": QWEN3_5_4B, "qwen3-4b": QWEN3_4B}
NUM_DRAFTS_OF_HEADS = 3
Tokens = list[int]


class Counts:
    """A drafter whose steps and verified drafts are counted."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.num_verified, self.num_accepted = drafter, 0, 0
        self.apply, self.draft, self.reads_hidden = drafter.apply, drafter.draft, drafter.reads_hidden

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Count, and pass on."""
        self.num_verified += num_drafts
        self.num_accepted += num_accepted
        self.drafter.record(row, num_drafts, num_accepted)


class Oracle:
    """Drafts from the tokens that a row will come to, each right with probability `acceptance`.

    `method`: drafts, too, for its cost alone.
    """

    def __init__(
        self, batch: PersistentBatch, wholes: Sequence[Tokens], acceptance: float, method: DraftModel | None = None
    ) -> None:
        self._batch, self._wholes, self._acceptance, self._method = batch, wholes, acceptance, method
        self.reads_hidden = method is not None and method.reads_hidden
        self._rng = random.Random(1)

    def draft(self, rows: DraftRows, limits: IntArray, step: StepInputs) -> Mapping[int, Sequence[int]]:
        """Return what comes next, with mistakes."""
        if self._method is not None:
            self._method.draft(rows, limits, step)
        drafts = {}
        for row, num_tokens, limit in zip(rows.rows.tolist(), rows.num_tokens.tolist(), limits.tolist(), strict=True):
            known = self._batch.token_ids[row, :num_tokens].tolist()
            whole = next((each for each in self._wholes if each[:num_tokens] == known), [])
            found = whole[num_tokens : num_tokens + limit]
            right = [self._rng.random() < self._acceptance for _ in found]
            if found:
                drafts[row] = [token if is_right else token - 1 for token, is_right in zip(found, right, strict=True)]
        return drafts


class Turns:
    """A drafter that takes random turns: it does nothing, or drafts 0, 1 or 3 tokens by `method`.

    `kind` is that of the last step, and its rows.
    """

    def __init__(self, method: DraftModel) -> None:
        self._method, self._rng = method, random.Random(0)
        self.reads_hidden = method.reads_hidden
        self.kind: tuple[str, int] = "", 0

    def apply(self, plan: StepPlan) -> None:
        """Do nothing."""

    def draft(self, rows: DraftRows, step: StepInputs) -> Mapping[int, Sequence[int]]:
        """Return drafts of one row."""
        name, limit = self._rng.choice([("no head", 0), ("no drafts", 0), ("1 draft", 1), ("3 drafts", 3)])
        self.kind = name, len(step.forward.token_ids)
        return {} if name == "no head" else self._method.draft(rows, np.full(len(rows.rows), limit), step)

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Do nothing."""


class Fixed:
    """Lengths of drafts that do not adapt: as many as there can be."""

    def reset(self, rows: Iterable[int]) -> None:
        """Do nothing."""

    def may_pay(self, num_rows: int) -> bool:
        """Return True."""
        return True

    def limits(self, rows: IntArray, longest: IntArray, num_rows: int) -> IntArray:
        """Return `longest`."""
        return longest

    def record(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Do nothing."""


class Bench:
    """An engine with a drafter, and texts that it writes."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        worker = engine.executor.worker  # type: ignore[attr-defined]
        assert isinstance(worker, Worker)
        assert worker.compute.drafter is not None
        self._engine, self._ids = engine, itertools.count()
        self.compute, self.drafter, self.batch = worker.compute, worker.compute.drafter, worker.compute.batch
        self._sample, self.num_kinds = worker.compute.sample, vocab_size - 400
        self._clock = time.process_time if threads_of_kernels() == 1 else time.perf_counter

    def run(
        self, prompts: list[Tokens], num_tokens: int, drafter: Drafter | None, texts: list[Tokens] | None = None
    ) -> tuple[float, list[Tokens], Counts | None]:
        """Return the seconds of the answers behind their first tokens, and the answers. `texts` replace samples."""
        counts = None if drafter is None else Counts(drafter)
        self.compute.drafter = counts
        self.compute.sample = self._sample if texts is None else self._reciting(prompts, texts)  # type: ignore[method-assign]
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        answers = dict[int, Tokens]()
        for seed, (number, prompt) in enumerate(zip(self._ids, prompts)):  # noqa: B905 (ids do not end)
            self._engine.add(Request(number, pack_tokens(prompt), params, seed=seed, max_tokens=num_tokens))
            answers[number] = []
        started_s, count = 0.0, 0
        while self._engine.scheduler.has_requests:
            for delta in self._engine.step():
                answers[delta.request_id] += delta.token_ids
            if started_s == 0.0 and all(answers.values()):
                started_s, count = self._clock(), sum(map(len, answers.values()))
        seconds = self._clock() - started_s
        return seconds / (sum(map(len, answers.values())) - count), list(answers.values()), counts

    def step_times(self, prompt: Tokens, num_tokens: int, drafter: Turns) -> dict[tuple[str, int], list[float]]:
        """Return the seconds of the steps of an answer, by the drafter's kinds."""
        self.compute.drafter, times = drafter, dict[tuple[str, int], list[float]]()
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        self._engine.add(Request(next(self._ids), pack_tokens(prompt), params, seed=0, max_tokens=num_tokens))
        while self._engine.scheduler.has_requests:
            started_s = self._clock()
            self._engine.step()
            times.setdefault(drafter.kind, []).append(self._clock() - started_s)
        return times

    def _reciting(self, prompts: list[Tokens], texts: list[Tokens]) -> Callable[..., SampledTokens]:
        """Return the worker's sampling with tokens of texts in place of samples, by the prompts of rows."""
        wholes = {tuple(prompt): prompt + text for prompt, text in zip(prompts, texts, strict=True)}

        def sample(inputs: StepInputs, hidden: Tensor, logit_rows: Tensor) -> SampledTokens:
            sampled = self._sample(inputs, hidden, logit_rows)
            tokens = []
            for row, place in zip(inputs.sample_rows.tolist(), inputs.sample_num_tokens.tolist(), strict=True):
                prompt = self.batch.token_ids[row, : int(self.batch.num_prompt_tokens[row])]
                whole = wholes[tuple(prompt.tolist())]
                tokens.append(whole[min(place, len(whole) - 1)])
            return sampled._replace(token_ids=tokens)

        return sample


def random_tokens(rng: random.Random, length: int, kinds: int) -> Tokens:
    return [rng.randrange(300, 300 + kinds) for _ in range(length)]


def gains(bench: Bench, turns: int, drafters: Mapping[str, Callable[[], Drafter]], **asked: Any) -> None:  # noqa: ANN401
    """Print the speed with each drafter, by that without, and what became of drafts."""
    ratios: dict[str, list[float]] = {name: [] for name in drafters}
    plain, seen = [], dict[str, Counts]()
    for turn in range(turns):
        order = list(drafters)[:: -1 if turn % 2 else 1]
        base, expected, _ = bench.run(drafter=None, **asked)
        plain.append(base)
        for name in order:
            seconds, answers, counts = bench.run(drafter=drafters[name](), **asked)
            assert answers == expected, f"{name}: other answers than without drafts"
            assert counts is not None
            ratios[name].append(base / seconds)
            seen[name] = counts
    told = f"  {statistics.median(plain) * 1e3:.1f} ms a token without"
    for name, each in ratios.items():
        own = seen[name]
        share = own.num_accepted / own.num_verified if own.num_verified else 0.0
        spread = f"{min(each):.3f} to {max(each):.3f}"
        told += f"; {name} {statistics.median(each):.3f} x ({spread}; {own.num_verified} drafted, {share:.2f} kept)"
    print(told, flush=True)


def oracle(
    bench: Bench, turns: int, num_tokens: int, acceptances: Sequence[float], method: DraftModel | None = None,
    num_drafts: int = NUM_DRAFTS,
) -> None:  # fmt: skip
    """Print the speed by acceptance, of one sequence."""
    prompts = [random_tokens(random.Random(0), PROMPT_LEN, bench.num_kinds)]
    _, answers, _ = bench.run(prompts, num_tokens, None)
    wholes = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    adaptive: AdaptiveLength = bench.drafter._lengths  # type: ignore[attr-defined]
    for acceptance in acceptances:
        print(f"acceptance {acceptance}", end="")

        def drafter(lengths: AdaptiveLength, acceptance: float = acceptance) -> Drafter:
            return LimitedDrafter(Oracle(bench.batch, wholes, acceptance, method), lengths, num_drafts, bench.batch)

        drafters = {f"k = {num_drafts}": partial(drafter, Fixed()), "adaptive": partial(drafter, adaptive)}
        gains(bench, turns, drafters, prompts=prompts, num_tokens=num_tokens)


def texts(bench: Bench, name: str, tokenizer: Tokenizer, turns: int, max_tokens: int) -> None:
    """Print the speed on recorded texts."""
    for each in json.loads(TEXTS.read_text()):
        prompt, text = (tokenizer.encode(each[key]) for key in ("prompt", "output"))
        count = min(len(text), max_tokens)
        print(f"{each['kind']}, {len(prompt)} and {count} tokens", end="")
        gains(bench, turns, {name: lambda: bench.drafter}, prompts=[prompt], num_tokens=count, texts=[text])


def nothing(bench: Bench, name: str, turns: int, num_tokens: int) -> None:
    """Print the speed where no draft can be right."""
    for num_seqs in (1, 16, 64):
        for kinds, told in ((bench.num_kinds, "nothing found"), (10, "all found is wrong")):
            rng = random.Random(num_seqs)
            prompts = [random_tokens(rng, 32, kinds) for _ in range(num_seqs)]
            written = [random_tokens(rng, num_tokens, kinds) for _ in range(num_seqs)]
            print(f"{num_seqs} sequences, {told}", end="")
            count = num_tokens if num_seqs == 1 else num_tokens // 2 if num_seqs == 16 else num_tokens // 4
            gains(bench, turns, {name: lambda: bench.drafter}, prompts=prompts, num_tokens=count, texts=written)


def options_of_shapes(quantization: str, isa: str) -> EngineOptions:
    return EngineOptions(
        quantization=quantization or None, cpu_isa=isa, max_model_len=512, max_num_seqs=1, num_kv_blocks=64,
        enable_prefix_caching=False,
    )  # fmt: skip


def head(
    method_name: str, shape: str, quantization: str, isa: str, turns: int, num_tokens: int,
    acceptances: Sequence[float],
) -> None:  # fmt: skip
    """Print the speed by acceptance with the passes of a head, of a shape with random weights."""
    options = replace(
        options_of_shapes(quantization, isa), spec_method=method_name, spec_tokens=NUM_DRAFTS_OF_HEADS,
        spec_model="random weights" if method_name == "eagle3" else None,
    )  # fmt: skip
    loaded, own = random_model_with_head(SHAPES[shape], options)
    bench = Bench(build_engine(options, loaded, draft_model=own).engine, loaded.model.vocab_size)
    weights = [each.weight_bytes / 2**30 for each in (loaded.model, own.model)]
    print(f"{shape}: weights {weights[0]:.2f} GiB, of the head {weights[1]:.2f}, {own.pass_bytes} bytes a pass")
    method: DraftModel = bench.drafter._method  # type: ignore[attr-defined]
    prompt = random_tokens(random.Random(0), PROMPT_LEN, bench.num_kinds)
    num_steps = min(turns * num_tokens, options.max_model_len - PROMPT_LEN)
    for (name, rows), times in sorted(bench.step_times(prompt, num_steps, Turns(method)).items()):
        print(f"  steps of {rows} rows, {name}: {statistics.median(times) * 1e3:.1f} ms, median of {len(times)}")
    oracle(bench, turns, num_tokens, acceptances, method, NUM_DRAFTS_OF_HEADS)


def draft_model(
    shapes: Sequence[str], quantization: str, isa: str, turns: int, num_tokens: int, acceptances: Sequence[float]
) -> None:
    """Print the speed by acceptance with the passes of a draft model: both of `shapes`, with random weights."""
    target, draft = (SHAPES[name] for name in shapes)
    options = replace(
        options_of_shapes(quantization, isa), spec_model="random weights", spec_tokens=NUM_DRAFTS,
    )  # fmt: skip
    started_s = time.perf_counter()
    loaded = random_model(target, options)
    small = random_draft_model(draft, options, loaded)
    bench = Bench(build_engine(options, loaded, draft_model=small).engine, loaded.model.vocab_size)
    weights = [each.weight_bytes / 2**30 for each in (loaded.model, small.model)]
    print(
        f"{shapes[0]} with {shapes[1]}: weights {weights[0]:.2f} and {weights[1]:.2f} GiB, made in "
        f"{time.perf_counter() - started_s:.0f} s, peak memory of the process {peak_gib():.1f} GiB",
        flush=True,
    )
    oracle(bench, turns, num_tokens, acceptances, bench.drafter._method)  # type: ignore[attr-defined]
    print(f"peak memory of the process {peak_gib():.1f} GiB", flush=True)


def peak_gib() -> float:
    """Return the most memory that this process has had, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def simulated(tokenizer: Tokenizer, bytes_per_weight: float) -> None:
    """Print speed-ups of lookups on the recorded texts by the constants of avx512_bf16, without a model."""
    cost = StepCost.of("avx512_bf16", bytes_per_weight)(np.arange(1, 10))
    configs = {f"ngram, {size} to 5": SpeculationConfig("ngram", 8, None, size, 5) for size in (1, 2, 3, 5)}
    for name, config in (configs | {"suffix": SpeculationConfig("suffix", 8)}).items():
        speeds: dict[str, list[float]] = {}
        for each in json.loads(TEXTS.read_text()):
            prompt, text = (tokenizer.encode(each[key]) for key in ("prompt", "output"))
            total = _cost_of(config, bytes_per_weight, prompt, text, cost)
            speeds.setdefault(each["kind"], []).append(len(text) * cost[0] / total)
        told = ", ".join(f"{kind} {statistics.mean(own):.2f}" for kind, own in speeds.items())
        print(f"{name}: {told}; all {statistics.mean(itertools.chain(*speeds.values())):.2f} x", flush=True)


def _cost_of(
    config: SpeculationConfig, bytes_per_weight: float, prompt: Tokens, text: Tokens, cost: NDArray[np.float64]
) -> float:
    """Return the cost of the steps that write a text; cost: of a step by its drafts, from 0."""
    whole = prompt + text
    batch = PersistentBatch(1, len(whole), 16, 1 << 20)
    batch.token_ids[0] = whole
    drafter = make_drafter(config, batch, "avx512_bf16", bytes_per_weight)
    drafter.apply(StepPlan(new_rows=[NewRow(0, prompt, len(prompt), [], SamplingParams(), 0)]))
    known, total, drafts = len(prompt), 0.0, list[int]()
    while known < len(whole):
        drafts = drafts[: len(whole) - known - 1]
        total += cost[len(drafts)]
        accepted = num_accepted(drafts, whole[known : known + len(drafts) + 1])
        if drafts:
            drafter.record(0, len(drafts), accepted)
        known += accepted + 1
        last = np.array([known - 1])
        drafts = list(drafter.draft(DraftRows(np.array([0]), last, last), NO_STEP).get(0, []))
    return total


def control(method: str, turns: int, num_seqs: int, num_tokens: int = 300) -> None:
    """Print host time of a step without a model: schedule and update, and all calls of a drafter that finds nothing."""
    rng, plain, drafting = np.random.default_rng(0), [], []
    batch = PersistentBatch(num_seqs, 1024, 16, 32_000)
    batch.token_ids[:] = rng.permutation(batch.token_ids.size).reshape(batch.token_ids.shape)
    config = parse_speculation(json.dumps({"method": method}))
    assert config is not None
    rows, plan = np.arange(num_seqs), StepPlan()
    inputs = [
        cast("StepInputs", SimpleNamespace(sample_rows=rows, sample_num_tokens=np.full(num_seqs, 400 + step)))
        for step in range(100)
    ]
    for _ in range(turns):
        engine = engine_without_model(CacheConfig(num_seqs * 32), num_seqs, 1 << 16)
        for number in range(num_seqs):
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            engine.add(Request(number, pack_tokens([5] * 16), params, seed=number, max_tokens=num_tokens))
        engine.step()
        started_s = time.perf_counter()
        for _ in inputs:
            engine.step()
        plain.append((time.perf_counter() - started_s) / len(inputs))
        drafter = make_drafter(config, batch, "avx512_bf16", 2.0)
        new_rows = [NewRow(row, [0] * 16, 16, [], SamplingParams(), 0) for row in range(num_seqs)]
        drafter.apply(StepPlan(new_rows=new_rows))
        drafter.draft(DraftRows(rows, np.full(num_seqs, 399), np.full(num_seqs, 399)), NO_STEP)
        started_s = time.perf_counter()
        for each in inputs:
            drafter.apply(plan)
            assert not drafter.draft(rows_to_draft(each, {}, {}), NO_STEP)
        drafting.append((time.perf_counter() - started_s) / len(inputs))
    own_us, more_us = min(plain) * 1e6, min(drafting) * 1e6
    print(
        f"{num_seqs} sequences, {method}, nothing found: schedule and update {own_us:.1f} us a step, "
        f"drafter {more_us:.2f} us more: {1 + more_us / own_us:.2f} x",
        flush=True,
    )


def main(
    model: Annotated[str, typer.Argument(help="folder, or demo; without meaning for control and draft-model")],
    quantization: Annotated[str, typer.Option(help="int8 or int4")] = "",
    parts: Annotated[
        str, typer.Option(help="some of oracle, texts, nothing, simulated, control, draft, draft-model, mtp, eagle3")
    ] = "oracle,texts,nothing",
    methods: Annotated[str, typer.Option(help="of texts, nothing and control")] = "ngram",
    own_draft_model: Annotated[str, typer.Option("--draft-model", help="folder, for the part draft")] = "",
    shapes: Annotated[str, typer.Option(help="of target and draft model, for draft-model, mtp and eagle3")] = "7b,0.5b",
    acceptances: Annotated[str, typer.Option(help="of oracles")] = "0,0.25,0.5,0.75,0.9,1",
    isa: Annotated[str, typer.Option(help="instruction set")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: as the engine chooses")] = 0,
    turns: Annotated[int, typer.Option(help="turns of each comparison")] = 3,
    num_tokens: Annotated[int, typer.Option(help="tokens of an answer, at most")] = 96,
) -> None:
    """Compare speeds with speculation and without."""
    if threads:
        set_threads_of_kernels(threads)
    shares = [float(share) for share in acceptances.split(",")]
    print(
        f"{machine_facts()}\n{model} {quantization or 'bfloat16'} {isa}, {threads_of_kernels()} threads", flush=True
    )
    for part in parts.split(","):
        if part == "control":
            for method, num_seqs in product(methods.split(","), (1, 16, 32, 256)):
                control(method, turns, num_seqs)
            continue
        if part == "draft-model":
            draft_model(shapes.split(","), quantization, isa, turns, num_tokens, shares)
            continue
        if part in ("mtp", "eagle3"):
            head(part, shapes.split(",")[0], quantization, isa, turns, num_tokens, shares)
            continue
        if part == "simulated":
            tokenizer = load_tokenizer(DEMO_MODEL if model == "demo" else Path(model))
            assert tokenizer is not None, f"{model} has no tokenizer"
            simulated(tokenizer, {"": 2.0, "int8": 1.03, "int4": 0.57}[quantization])
            continue
        names = {"draft": ["draft_model"], "oracle": ["ngram"]}.get(part, methods.split(","))
        for name in names:
            keys: dict[str, Any] = {
                "method": name, "num_speculative_tokens": NUM_DRAFTS if part in ("oracle", "draft") else 8,
            }  # fmt: skip
            with LLM(
                None if model == "demo" else model, dtype="bfloat16", cpu_isa=isa, quantization=quantization or None,
                max_model_len=MAX_LEN, enable_prefix_caching=False,
                speculative_config=keys | ({"model": own_draft_model} if part == "draft" else {}),
            ) as llm:  # fmt: skip
                bench = Bench(llm._engine.engine, llm.vocab_size)
                print(f"{part}, {name}", flush=True)
                if part == "oracle":
                    oracle(bench, turns, num_tokens, shares)
                elif part == "draft":
                    oracle(bench, turns, num_tokens, shares, bench.drafter._method)  # type: ignore[attr-defined]
                elif part == "texts":
                    assert llm.tokenizer is not None, f"{model} has no tokenizer"
                    texts(bench, name, llm.tokenizer, turns, num_tokens * 2)
                else:
                    nothing(bench, name, turns, num_tokens)


if __name__ == "__main__":
    typer.run(main)
