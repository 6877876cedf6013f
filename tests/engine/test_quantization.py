"""Engines with quantized weights: logits of the model that the reference computes, and the summary of what serves."""

import logging

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError

PROMPTS = [[5, 9, 11, 200, 31], [7] * 40]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_answers_are_the_same_alone_and_together(method: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), LLM(quantization=method, num_kv_blocks=64) as llm:
        together = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        alone = [llm.generate([prompt], PARAMS, use_tqdm=False)[0] for prompt in PROMPTS]
        ready = llm._engine.ready
    assert [each.outputs[0].token_ids for each in together] == [each.outputs[0].token_ids for each in alone]
    assert [each.outputs[0].logprobs for each in together] == [each.outputs[0].logprobs for each in alone]
    assert f"quantization {method}: {method} weights in groups of 128, int8 activations" in caplog.text
    assert ready.quantization.startswith(f"{method}: {method} weights in groups of 128")


def test_quantization_changes_logits_and_hardly_the_model() -> None:
    """Tops of a trained model's first tokens agree, and their logprobs differ."""
    found = {}
    for method in (None, "int8"):
        with LLM(quantization=method, num_kv_blocks=64) as llm:
            (output,) = llm.generate(["import os\n"], PARAMS, use_tqdm=False)
            found[method] = output.outputs[0].logprobs[0]
    assert found[None] != found["int8"]
    top = max(found[None], key=lambda token: found[None][token].logprob)
    assert abs(found[None][top].logprob - found["int8"][top].logprob) < 0.1


def test_format_that_the_folder_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantization 'fp8' is the format of a checkpoint, and .*config.json has"):
        LLM(quantization="fp8")
