"""Plans and results that cross a process boundary as bytes: the same tokens as without."""

from pathlib import Path

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.core.plan import StepPlan, StepResult, decode_plan, decode_result, encode
from quire.execution.device import HostDevice
from quire.execution.executor import Executor
from quire.execution.worker import StepCompute
from support.random_model import write_random_model

PROMPTS = [[(11 * i * i + 5 * seed) % 290 for i in range(length)] for seed, length in enumerate((40, 3, 33, 17))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, top_p=0.9, max_tokens=18, n=3),
    SamplingParams(temperature=0.8, seed=2, presence_penalty=0.7, max_tokens=21, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=3, min_tokens=4, logit_bias={5: 3.0}, stop_token_ids=[5], max_tokens=30),
]


class RemoteExecutor:
    """Sends each plan and each result of an executor as bytes."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.max_steps_in_flight, self.graphs = inner.max_steps_in_flight, inner.graphs
        self.num_sent_bytes = 0

    def submit(self, plan: StepPlan) -> None:
        message = encode(plan)
        self.num_sent_bytes += len(message)
        self._inner.submit(decode_plan(message))

    def collect(self) -> StepResult:
        return decode_result(encode(self._inner.collect()))


def answers(model: Path) -> list[object]:
    with LLM(model, num_kv_blocks=12, num_swap_blocks=9, max_num_batched_tokens=32) as llm:
        outputs = llm.generate([list(prompt) for prompt in PROMPTS], PARAMS, use_tqdm=False)
        beams = llm.beam_search([list(prompt) for prompt in PROMPTS[:2]], BeamSearchParams(beam_width=3, max_tokens=8))
        assert llm.kv_stats().used_blocks == 0
        return [[(b.token_ids, b.logprobs, b.finish_reason) for b in each.outputs] for each in outputs + beams] + [
            each.prompt_logprobs for each in outputs
        ]


def test_answers_are_the_same_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_random_model(tmp_path)
    expected = answers(model)
    executors: list[RemoteExecutor] = []
    make = HostDevice.executor

    def make_remote(device: HostDevice, compute: StepCompute, max_num_batched_tokens: int) -> RemoteExecutor:
        executors.append(RemoteExecutor(make(device, compute, max_num_batched_tokens)))
        return executors[-1]

    monkeypatch.setattr(HostDevice, "executor", make_remote)
    assert answers(model) == expected
    assert executors[0].num_sent_bytes > 0
