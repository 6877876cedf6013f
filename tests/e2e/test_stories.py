"""A real trained model in float32 gives the ten continuations recorded from transformers, token for token."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=320)


@pytest.fixture(scope="module")
def cases(stories260k: Path) -> list[dict[str, Any]]:
    recorded: list[dict[str, Any]] = json.loads((stories260k / "expected.json").read_text())["cases"]
    return recorded


def check(llm: LLM, cases: list[dict[str, Any]]) -> list[int]:
    """Run the prompts as one batch; return how often each was preempted."""
    prompts = [case["prompt"] for case in cases]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    for output, case in zip(outputs, cases, strict=True):
        assert output.prompt_token_ids == case["prompt_token_ids"]
        assert output.outputs[0].token_ids == case["output_token_ids"]
        assert output.outputs[0].finish_reason == case["finish_reason"]
    return [output.metrics.num_preemptions for output in outputs if output.metrics]


def test_continuations_one_by_one(stories260k: Path, cases: list[dict[str, Any]]) -> None:
    with LLM(str(stories260k), dtype="float32") as llm:
        for case in cases:
            check(llm, [case])


@pytest.mark.parametrize(("block_size", "budget"), [(16, 2048), (8, 1), (64, 16), (128, 7)])
def test_continuations_as_one_batch(stories260k: Path, cases: list[Any], block_size: int, budget: int) -> None:
    with LLM(str(stories260k), dtype="float32", block_size=block_size, max_num_batched_tokens=budget) as llm:
        check(llm, cases)


def test_continuations_with_every_request_but_the_first_preempted(stories260k: Path, cases: list[Any]) -> None:
    """The first in order is never preempted, so an eleventh request goes before the ten."""
    longest = max(len(case["prompt_token_ids"]) for case in cases) + 320
    engine = {"dtype": "float32", "block_size": 8, "num_kv_blocks": -(-longest // 8) + 2}
    with LLM(str(stories260k), enable_prefix_caching=False, **engine) as llm:  # or the second would run on the first's
        preemptions = check(llm, [cases[0], *cases])
        assert min(preemptions[1:]) >= 1
        assert llm.kv_stats().used_blocks == 0


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("block_size", "budget"), list(product((8, 16, 32, 64, 128), (1, 7, 16, 2048))))
def test_continuations_in_every_setting(
    stories260k: Path, cases: list[dict[str, Any]], block_size: int, budget: int
) -> None:
    with LLM(str(stories260k), dtype="float32", block_size=block_size, max_num_batched_tokens=budget) as llm:
        check(llm, cases)
