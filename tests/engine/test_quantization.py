"""Engines with quantized weights: logits of the model that the reference computes, and the summary of what serves."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError
from quire.kernels.quantized import expand, round_to_nearest
from support.random_model import write_random_model

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("method", "group_size"), [("int8", -1), ("int4", 32)])
def test_expanded_weights_give_the_bits_of_the_dequantized_folder(
    tmp_path: Path, method: str, group_size: int, dtype: str
) -> None:
    """The head is not tied: it is dequantized beside the layers, and the embedding table is not."""
    folder, twin = write_random_model(tmp_path, torch_dtype=dtype), tmp_path / "twin"
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if weight.dim() == 2 and "embed" not in name:
            scheme = "int8" if name == "lm_head.weight" else method
            size = weight.shape[1] if group_size == -1 else group_size
            tensors[name] = expand(round_to_nearest(weight.to(getattr(torch, dtype)), scheme, size))
    twin.mkdir()
    (twin / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, twin / "model.safetensors")
    options = {"quantization": method, "quantization_group_size": group_size, "quantization_activations": "bfloat16"}
    found = []
    for path, settings in ((folder, options), (twin, {})):
        with LLM(path, dtype=dtype, num_kv_blocks=64, **settings) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            found.append([(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs])
    assert found[0] == found[1]


def test_format_that_the_folder_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantization 'fp8' is the format of a checkpoint, and .*config.json has"):
        LLM(quantization="fp8")
