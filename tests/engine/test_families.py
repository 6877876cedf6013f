"""Engines of model families with parts of their own: quantized weights, and preemption, change what they should."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from support.quantized_folder import gptq, gptq_config
from support.random_folder import write_random_folder

SIZES: dict[str, object] = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 256,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3,
}  # fmt: skip
CONFIGS: dict[str, dict[str, object]] = {
    "falcon": SIZES | {"architectures": ["FalconForCausalLM"], "new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma2": SIZES | {
        "architectures": ["Gemma2ForCausalLM"], "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24,
    },
    "glm4_moe": SIZES | {
        "architectures": ["Glm4MoeForCausalLM"], "num_key_value_heads": 2, "n_routed_experts": 8, "n_group": 4,
        "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "routed_scaling_factor": 1.5,
    },
    "gpt_neox": SIZES | {"architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.5},
    "gptj": {
        "architectures": ["GPTJForCausalLM"], "vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4,
        "n_positions": 256, "rotary_dim": 8,
    },
    "ministral3": SIZES | {
        "architectures": ["Ministral3ForCausalLM"], "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": YARN,
    },
    "olmo": SIZES | {"architectures": ["OlmoForCausalLM"], "clip_qkv": 0.8},
}  # fmt: skip
PROMPTS = [[(7 * i + start) % 97 for i in range(length)] for start, length in enumerate((37, 3, 41, 38))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)


def answers(folder: Path, prompts: Sequence[list[int]], **options: Any) -> tuple[list[Any], int]:  # noqa: ANN401
    """Return tokens and logprobs of the prompts in one engine, and how often it preempted a sequence."""
    with LLM(folder, **{"num_kv_blocks": 64, "block_size": 8} | options) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        preemptions = sum(each.metrics.num_preemptions for each in outputs)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs], preemptions


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("family", CONFIGS)
def test_preempted_sequences_have_the_bits_of_sequences_alone(
    family: str, quantization: str | None, tmp_path: Path
) -> None:
    folder = write_random_folder(tmp_path / "model", CONFIGS[family], torch.bfloat16)
    alone = [answers(folder, [prompt], quantization=quantization)[0][0] for prompt in PROMPTS]
    together, preemptions = answers(
        folder, PROMPTS, quantization=quantization, num_kv_blocks=16, max_num_batched_tokens=19
    )
    assert preemptions > 0
    assert together == alone


@pytest.mark.parametrize("family", ["falcon", "gpt_neox"])
def test_grouped_rows_of_a_gptq_checkpoint_have_the_bits_of_its_dequantized_twin(family: str, tmp_path: Path) -> None:
    folder = write_random_folder(tmp_path / "gptq", CONFIGS[family], torch.bfloat16)
    tensors, twin, rng = load_file(folder / "model.safetensors"), tmp_path / "twin", np.random.default_rng(0)
    stored, floats = dict(tensors), dict(tensors)
    for name in [name for name, tensor in tensors.items() if ".mlp." in name or "attention." in name]:
        stem, _, kind = name.rpartition(".")
        if kind != "weight" or tensors[name].dim() != 2:
            continue
        module = gptq(4, 32, sym=False)(rng, *tensors[name].shape)
        del stored[name]
        stored |= {f"{stem}.{end}": tensor.contiguous() for end, tensor in module.tensors.items()}
        floats[name] = module.values.bfloat16()
    assert len(stored) > len(floats)
    save_file(stored, folder / "model.safetensors")
    twin.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": gptq_config(4, 32, sym=False)})
    )
    save_file(floats, twin / "model.safetensors")
    found = answers(folder, PROMPTS, quantization_activations="bfloat16")
    assert found == answers(twin, PROMPTS)
