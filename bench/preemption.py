"""Cost of a pool that is too small: long generations in a KV cache for 1.5 of them, in each preemption mode.

    python bench/preemption.py --output preemption.md          # --model demo, or a folder

All requests arrive together; the same ones, one after the other in the same pool, are what they are compared with. A
turn has an engine of its own (loading it is not timed), a round has a turn of each kind, and the order changes from
round to round: a shared machine changes its speed, so that only ratios within a round mean something. Answers must be
equal in all turns, token by token.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from quire import LLM, RequestOutput, SamplingParams
from quire_lab.bench.report import machine_facts

ONE_BY_ONE = "one by one"
MODES = ("recompute", "swap", "auto")
MAX_PROMPT_LEN = 32


@dataclass(frozen=True, slots=True)
class Turn:
    """Time and preemptions of one turn of all requests."""

    kind: str
    seconds: float
    preemptions: list[int]      # each request's
    recomputed_tokens: int
    swapped_blocks: int         # out


class Bench:
    """The requests, the settings of the engines, and the answers of the first turn."""

    def __init__(self, model: str, num_requests: int, total_len: int, settings: dict[str, Any]) -> None:
        self._model = None if model == "demo" else model
        self._settings = {"max_model_len": total_len, "enable_prefix_caching": True} | settings
        generator = np.random.default_rng(0)
        lengths = generator.integers(1, MAX_PROMPT_LEN, num_requests, endpoint=True)
        self._prompts = [generator.integers(3, 500, length).tolist() for length in lengths]
        self._params = [
            SamplingParams(max_tokens=int(total_len - length), ignore_eos=True, seed=number, detokenize=False)
            for number, length in enumerate(lengths)
        ]
        self._answers: list[list[int]] | None = None

    def turn(self, kind: str) -> Turn:
        """Run all requests once. AssertionError if an answer is not what it was before."""
        with LLM(self._model, **self._settings, preemption_mode="auto" if kind == ONE_BY_ONE else kind) as llm:
            started_s = time.perf_counter()
            outputs = self._run(llm, kind)
            seconds, stats = time.perf_counter() - started_s, llm.kv_stats()
        answers = [output.outputs[0].token_ids for output in outputs]
        self._answers = self._answers or answers
        assert answers == self._answers, f"{kind}: other answers than in the first turn"
        preemptions = [output.metrics.num_preemptions for output in outputs if output.metrics is not None]
        return Turn(kind, seconds, preemptions, stats.recomputed_tokens, stats.swapped_out_blocks)

    def _run(self, llm: LLM, kind: str) -> list[RequestOutput]:
        if kind != ONE_BY_ONE:
            return llm.generate(self._prompts, self._params, use_tqdm=False)
        pairs = zip(self._prompts, self._params, strict=True)
        return [llm.generate([prompt], params, use_tqdm=False)[0] for prompt, params in pairs]


def markdown(rounds: list[list[Turn]]) -> str:
    """Return a row for each kind: medians of seconds and of ratios within rounds, and what preemptions did."""
    lines = [
        "| 1.5 sequences of room | s | / one by one | quartiles | preemptions | of one request, at most "
        "| tokens recomputed | blocks swapped out |",
        "| --- " * 8 + "|",
    ]
    alone = np.array([turn.seconds for turns in rounds for turn in turns if turn.kind == ONE_BY_ONE])
    for kind in (ONE_BY_ONE, *MODES):
        turns = [turn for turns in rounds for turn in turns if turn.kind == kind]
        seconds = np.array([turn.seconds for turn in turns])
        low, middle, high = np.percentile(seconds / alone, [25, 50, 75])
        most = max(max(turn.preemptions) for turn in turns)
        counts = np.median([(sum(t.preemptions), t.recomputed_tokens, t.swapped_blocks) for t in turns], axis=0)
        total, recomputed, swapped = (f"{count:,.0f}" for count in counts)
        times = f"{np.median(seconds):.2f} | {middle:.2f} | {low:.2f} to {high:.2f}"
        lines.append(f"| {kind} | {times} | {total} | {most} | {recomputed} | {swapped} |")
    return "\n".join(lines) + "\n"


def main(
    model: Annotated[str, typer.Option(help="demo, or a folder")] = "demo",
    dtype: Annotated[str, typer.Option()] = "auto",
    num_requests: Annotated[int, typer.Option(min=2, help="that arrive together")] = 32,
    total_len: Annotated[int, typer.Option(min=2 * MAX_PROMPT_LEN, help="tokens of each, prompt and answer")] = 512,
    block_size: Annotated[int, typer.Option()] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="of a turn of each kind")] = 5,
    output: Annotated[Path | None, typer.Option(help="Markdown; JSON beside it")] = None,
) -> None:
    """Measure, print the table, and write it."""
    blocks_of_one = -(-total_len // block_size)
    settings = {
        "dtype": dtype,
        "block_size": block_size,
        "num_kv_blocks": blocks_of_one * 3 // 2,
        "num_swap_blocks": blocks_of_one * num_requests,
    }
    bench, kinds, measured = Bench(model, num_requests, total_len, settings), [ONE_BY_ONE, *MODES], []
    bench.turn(ONE_BY_ONE)      # warms up
    for number in range(rounds):
        turn_of = {kind: bench.turn(kind) for kind in np.roll(kinds, number).tolist()}
        measured.append([turn_of[kind] for kind in kinds])
    own = {"model": Path(model).name, "requests": num_requests, "total_len": total_len, "rounds": rounds}
    facts = machine_facts() | own | settings | {"date": time.strftime("%Y-%m-%d")}
    table = markdown(measured) + "\n" + ", ".join(f"{key} {value}" for key, value in facts.items()) + "\n"
    print(table)
    if output is not None:
        output.write_text(table, encoding="utf-8")
        record = {"facts": facts, "rounds": [[asdict(turn) for turn in turns] for turns in measured]}
        output.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
