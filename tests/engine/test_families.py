"""Engines of model families with parts of their own: quantized weights, and preemption, change what they should."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.core.errors import ConfigError, EngineError
from quire.extension.isas import usable_isas
from support.peft_folders import write_adapter
from support.quantized_folder import Quantize, fp8, fp8_config, gptq, gptq_config
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
    "deepseek_v2": SIZES | {
        "architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
    },
    "falcon": SIZES | {"architectures": ["FalconForCausalLM"], "new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma2": SIZES | {
        "architectures": ["Gemma2ForCausalLM"], "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24,
    },
    "glm4_moe": SIZES | {
        "architectures": ["Glm4MoeForCausalLM"], "num_key_value_heads": 2, "n_routed_experts": 8, "n_group": 4,
        "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "routed_scaling_factor": 1.5,
    },
    "granitemoehybrid": SIZES | {
        "architectures": ["GraniteMoeHybridForCausalLM"], "num_key_value_heads": 2, "num_local_experts": 6,
        "num_experts_per_tok": 3, "intermediate_size": 64, "shared_intermediate_size": 64, "residual_multiplier": 0.5,
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_state": 32, "mamba_n_groups": 2,
    },
    "gpt_neox": SIZES | {"architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.5},
    "gptj": {
        "architectures": ["GPTJForCausalLM"], "vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4,
        "n_positions": 256, "rotary_dim": 8,
    },
    "kimi_linear": SIZES | {
        "architectures": ["KimiLinearForCausalLM"], "model_max_length": 256, "kv_lora_rank": 32, "v_head_dim": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "num_experts": 6, "num_experts_per_token": 3,
        "moe_intermediate_size": 64, "layer_types": ["linear_attention", "full_attention"],
        "linear_attn_config": {"num_heads": 2, "head_dim": 32},
    },
    "ministral3": SIZES | {
        "architectures": ["Ministral3ForCausalLM"], "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": YARN,
    },
    "nemotron_h": {key: value for key, value in SIZES.items() if key != "num_hidden_layers"} | {
        "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M-*E", "head_dim": 16,
        "num_key_value_heads": 2, "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 2,
        "n_routed_experts": 6, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
        "num_experts_per_tok": 3,
    },
    "olmo": SIZES | {"architectures": ["OlmoForCausalLM"], "clip_qkv": 0.8},
    "qwen3_next": SIZES | {
        "architectures": ["Qwen3NextForCausalLM"], "num_key_value_heads": 2, "head_dim": 16, "num_experts": 6,
        "full_attention_interval": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    },
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


LATENT = SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 40, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 24, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
NGRAMS = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
POOL = {"num_kv_blocks": 18, "max_num_batched_tokens": 19}  # one sequence and some
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 7},
    "recomputed": POOL | {"preemption_mode": "recompute"},
    "swapped": POOL | {"preemption_mode": "swap", "num_swap_blocks": 100},
    "speculated": POOL | {"speculative_config": NGRAMS},
}


@pytest.mark.parametrize("isa", usable_isas())
def test_latent_attention_has_the_bits_of_a_cold_plain_run_in_all_ways_of_scheduling(isa: str, tmp_path: Path) -> None:
    folder = write_random_folder(tmp_path / "model", LATENT, torch.bfloat16)
    repeated = [*PROMPTS, PROMPTS[0] * 3]  # n-grams to look up
    cold = [
        answers(folder, [prompt], cpu_isa=isa, enable_prefix_caching=False, max_num_seqs=1)[0][0] for prompt in repeated
    ]
    for way, options in WAYS.items():
        found, preemptions = answers(folder, repeated, cpu_isa=isa, **options)
        assert found == cold, way
        assert (preemptions > 0) == ("num_kv_blocks" in options), way
    with LLM(folder, cpu_isa=isa, num_kv_blocks=64, block_size=8) as llm:
        tokens = [llm.generate([repeated[-1]], PARAMS, use_tqdm=False)[0] for _ in range(2)]
        assert tokens[1].num_cached_tokens >= 96
        assert [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in tokens] == [cold[-1]] * 2
        params = [replace(PARAMS, temperature=0.8, seed=seed) for seed in (3, None)]
        forks = llm.generate([repeated[-1]], replace(params[0], n=3), use_tqdm=False)[0].outputs
        assert forks[0].token_ids == llm.generate([repeated[-1]], params[0], use_tqdm=False)[0].outputs[0].token_ids
        assert len({tuple(fork.token_ids) for fork in forks}) == 3


@pytest.mark.usefixtures("forked_processes")
def test_ranks_of_latent_attention_have_the_bits_of_one(tmp_path: Path) -> None:
    folder = write_random_folder(tmp_path / "model", LATENT, torch.bfloat16)
    alone = answers(folder, PROMPTS)[0]
    assert answers(folder, PROMPTS, tensor_parallel_size=2)[0] == alone


BLOCKS = (32, 32)
STORED = {
    "fp8": (fp8(BLOCKS, name="weight_scale_inv"), fp8_config(BLOCKS)),
    "gptq": (gptq(4, 8, sym=False), gptq_config(4, 8, sym=False)),
}


@pytest.mark.parametrize(("quantize", "config"), STORED.values(), ids=STORED)
def test_latents_of_a_quantized_checkpoint_have_the_bits_of_its_dequantized_twin(
    quantize: Quantize, config: dict[str, object], tmp_path: Path
) -> None:
    folder, twin = write_random_folder(tmp_path / "stored", LATENT, torch.bfloat16), tmp_path / "twin"
    tensors, rng = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    stored, floats = dict(tensors), dict(tensors)
    for name in [name for name in tensors if ".self_attn." in name and "_proj" in name]:
        module = quantize(rng, *tensors[name].shape)
        del stored[name]
        stem = name.removesuffix(".weight")
        stored |= {f"{stem}.{end}": tensor.contiguous() for end, tensor in module.tensors.items()}
        floats[name] = module.values.bfloat16()
    assert any("kv_b_proj.weight_scale_inv" in name or "kv_b_proj.qweight" in name for name in stored)
    save_file(stored, folder / "model.safetensors")
    twin.mkdir()
    save_file(floats, twin / "model.safetensors")
    (twin / "config.json").write_text((folder / "config.json").read_text())
    key = {"fp8": "modules_to_not_convert", "gptq": "dynamic"}[str(config["quant_method"])]
    dense = {
        "modules_to_not_convert": [f"model.layers.{layer}.mlp" for layer in range(2)], "dynamic": {"-:.*mlp.*": {}},
    }  # fmt: skip
    both = json.loads((folder / "config.json").read_text()) | {"quantization_config": config | {key: dense[key]}}
    (folder / "config.json").write_text(json.dumps(both))
    assert answers(folder, PROMPTS, quantization_activations="bfloat16") == answers(twin, PROMPTS)


def test_adapters_change_projections_of_latents_but_those_by_head(tmp_path: Path) -> None:
    folder = write_random_folder(tmp_path / "model", LATENT, torch.bfloat16)
    names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    adapters = [
        LoRARequest(f"of {len(own)}", number, str(write_adapter(tmp_path / str(number), folder, targets=own)))
        for number, own in enumerate([names, [*names, "kv_b_proj"]], 1)
    ]
    with LLM(folder, enable_lora=True, num_kv_blocks=64, block_size=8) as llm:
        plain, changed = (
            llm.generate([PROMPTS[0]], PARAMS, lora_request=each, use_tqdm=False)[0].outputs[0].logprobs
            for each in (None, adapters[0])
        )
        assert plain != changed
        with pytest.raises(EngineError, match="kv_b_proj"):
            llm.generate([PROMPTS[0]], PARAMS, lora_request=adapters[1], use_tqdm=False)


def test_latents_on_a_disk_are_found_again_with_their_bits(tmp_path: Path) -> None:
    folder = write_random_folder(tmp_path / "model", LATENT, torch.bfloat16)
    disk = {"kv_disk_dir": tmp_path / "disk", "kv_disk_size": "8MiB"}
    options: dict[str, Any] = disk | {"num_kv_blocks": 64, "block_size": 8}
    found = []
    for _ in range(2):
        with LLM(folder, **options) as llm:
            output = llm.generate([PROMPTS[0] * 3], PARAMS, use_tqdm=False)[0]
        found.append((output.num_cached_tokens, output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert [each[0] for each in found] == [0, 104]
    assert found[0][1:] == found[1][1:]


def test_sparse_attention_is_served_up_to_the_tokens_that_it_chooses(tmp_path: Path) -> None:
    sparse = LATENT | {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 72, "max_position_embeddings": 4096}
    folder = write_random_folder(tmp_path / "model", sparse, torch.bfloat16)
    twin = write_random_folder(tmp_path / "twin", LATENT | {"max_position_embeddings": 4096}, torch.bfloat16)
    with LLM(folder, num_kv_blocks=64, block_size=8) as llm, pytest.raises(EngineError, match="72"):
        llm.generate([[1] * 80], PARAMS, use_tqdm=False)
    assert answers(folder, PROMPTS) == answers(twin, PROMPTS)
    with pytest.raises(ConfigError, match=r"has only 72 positions.*sparse attention over more than index_topk tokens"):
        LLM(folder, max_model_len=73)
