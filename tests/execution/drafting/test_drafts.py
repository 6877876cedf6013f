"""Drafts and forced tokens on a real model: tokens, logprobs and texts of single steps, to the bit."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from quire import LLM, SamplingParams
from quire.core.plan import RowResult, StepPlan, StepResult
from quire.core.sampling_params import branch_seed
from quire.execution.cuda.cuda_worker import AsyncCudaExecutor, CudaWorker, StepInFlight
from quire.execution.device import Device
from quire.execution.executor import Executor, LocalExecutor
from quire.execution.worker import StepCompute, Worker
from support.steps_in_flight import compute_with_torch

PROMPTS = [[(11 * i * i + 5 * seed) % 290 for i in range(length)] for seed, length in enumerate((40, 3, 33, 17, 9))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, top_p=0.9, max_tokens=18, n=3),
    SamplingParams(temperature=0.8, seed=2, presence_penalty=0.7, frequency_penalty=0.3, max_tokens=21, logprobs=2),
    SamplingParams(temperature=1.0, seed=3, min_tokens=4, logit_bias={5: 3.0}, stop_token_ids=[5], max_tokens=30),
    SamplingParams(temperature=1.0, seed=4, repetition_penalty=1.3, logprobs=0, prompt_logprobs=1, max_tokens=20),
]
Force = Callable[[int, int, list[int]], None]           # a row's tokens, from an output index on
Outputs = dict[tuple[tuple[int, ...], int], list[int]]  # key: prompt and seed of the branch


class Oracle:
    """Knows what each row will come to; drafts that, with a mistake now and then, and forces some of it."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs, self._rng = outputs, random.Random(5)
        self._known: dict[int, list[int]] = {}       # output so far, by row
        self._whole: dict[int, list[int]] = {}
        self._takes_forced: dict[int, bool] = {}
        self.num_drafted = self.num_accepted = self.num_forced = 0

    def watch(self, plan: StepPlan) -> None:
        """Note what a plan says of its rows."""
        for new in plan.new_rows:
            prompt, output = tuple(new.token_ids[: new.num_prompt_tokens]), list(new.token_ids[new.num_prompt_tokens :])
            self._known[new.row] = output
            self._whole[new.row] = self._outputs.get((prompt, new.seed), [])
            self._takes_forced[new.row] = new.params.logprobs is None

    def add_to(self, plan: StepPlan, result: StepResult, force: Force | None) -> StepResult:
        """Return a result with drafts and forced tokens; `force` writes the latter into a row."""
        rows = dict(result.rows)
        self.num_drafted += sum(len(each.token_ids) for each in plan.drafts)
        self.num_accepted += sum(len(each.token_ids) - 1 for each in rows.values())
        for row, token in zip(plan.sample_rows, result.token_ids, strict=True):
            if row in rows and rows[row].drafts:
                continue
            own = rows.get(row) or RowResult([token], [r] if (r := self._record(plan, result, row)) else None)
            if row not in result.rows or own is result.rows[row]:
                self._known[row] += own.token_ids
            done, whole = len(self._known[row]), self._whole[row]
            forced = whole[done : done + self._rng.randint(0, 2)] if force and self._takes_forced[row] else []
            if forced and force is not None:
                force(row, done, forced)
                self.num_forced += len(forced)
                self._known[row] += forced
            done += len(forced)
            drafts = whole[done : done + self._rng.randint(1, 5)] or [1]
            if self._rng.random() < 0.3:
                drafts[self._rng.randrange(len(drafts))] = 3
            rows[row] = structs.replace(own, forced=forced, drafts=drafts)
        return structs.replace(result, rows=rows)

    def _record(self, plan: StepPlan, result: StepResult, row: int) -> object:
        return result.logprobs[plan.sample_rows.index(row)] if result.logprobs else None


class OracleWorker(Worker):
    """The CPU's worker with an oracle."""

    oracle: Oracle

    def execute(self, plan: StepPlan) -> StepResult:
        self.oracle.watch(plan)
        return self.oracle.add_to(plan, super().execute(plan), self._force)

    def _force(self, row: int, index: int, tokens: list[int]) -> None:
        batch = self.compute.batch
        start = int(batch.num_prompt_tokens[row]) + index
        batch.token_ids[row, start : start + len(tokens)] = tokens


class OracleCudaWorker(CudaWorker):
    """The GPU's worker with an oracle that forces nothing, because the next step may be in flight."""

    oracle: Oracle

    def launch(self, plan: StepPlan) -> StepInFlight:
        self.oracle.watch(plan)
        self._plans = [*getattr(self, "_plans", []), plan]
        return super().launch(plan)

    def complete(self, step: StepInFlight) -> StepResult:
        return self.oracle.add_to(self._plans.pop(0), super().complete(step), None)


def answers(model: Path, **settings: int) -> tuple[list[object], Outputs]:
    with LLM(model, **{"max_num_batched_tokens": 64} | settings) as llm:  # type: ignore[arg-type]
        outputs = llm.generate([list(prompt) for prompt in PROMPTS], PARAMS, use_tqdm=False)
        assert llm.kv_stats().used_blocks == 0
    found: Outputs = {}
    for prompt, params, output in zip(PROMPTS, PARAMS, outputs, strict=True):
        for branch in output.outputs:
            found[tuple(prompt), branch_seed(params.seed or 0, branch.index)] = list(branch.token_ids)
    return [
        [(b.text, b.token_ids, b.logprobs, b.cumulative_logprob, b.finish_reason, b.stop_reason) for b in each.outputs]
        for each in outputs
    ] + [each.prompt_logprobs for each in outputs], found


@pytest.mark.parametrize("is_async", [False, True], ids=["one step at a time", "two in flight"])
@pytest.mark.parametrize(
    "settings", [{"num_kv_blocks": 80}, {"num_kv_blocks": 14, "num_swap_blocks": 9}], ids=["room", "preemption"]
)
def test_answers_are_the_same_to_the_bit(
    settings: dict[str, int], is_async: bool, stories260k: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_async:
        compute_with_torch(monkeypatch)
    expected, outputs = answers(stories260k, **settings)
    oracle = Oracle(outputs)

    def make(device: Device, compute: StepCompute, max_num_batched_tokens: int) -> Executor:
        worker = (OracleCudaWorker if is_async else OracleWorker)(compute)
        worker.oracle = oracle
        return AsyncCudaExecutor(worker) if isinstance(worker, CudaWorker) else LocalExecutor(worker)

    monkeypatch.setattr("quire.execution.device.HostDevice.executor", make)
    found, _ = answers(stories260k, **settings)
    assert found == expected
    assert 0 < oracle.num_accepted < oracle.num_drafted
    assert is_async or oracle.num_forced > 0
