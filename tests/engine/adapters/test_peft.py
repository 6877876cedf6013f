"""Adapters against PEFT: logprobs of prompts, for every way to write ranks and scales."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, LoRARequest, SamplingParams
from quire.core.errors import InvalidRequestError
from support.random_model import VOCAB_SIZE, write_random_model

transformers = pytest.importorskip("transformers")

PROMPT = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": MODULES},
    "rsLoRA, odd": {"r": 5, "lora_alpha": 3, "use_rslora": True, "target_modules": ["v_proj", "up_proj"]},
    "patterns": {
        "r": 4, "lora_alpha": 4, "target_modules": MODULES,
        "rank_pattern": {"q_proj": 7, "layers.1.mlp.gate_proj": 2, "^model.layers.0.self_attn.v_proj": 1},
        "alpha_pattern": {"k_proj": 9, "down_proj": 0.5},
    },
    "one layer": {"r": 8, "lora_alpha": 8, "target_modules": ["gate_proj", "k_proj"], "layers_to_transform": [1]},
}  # fmt: skip


def peft_logprobs(
    plain: torch.nn.Module, folder: Path, config: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Save an adapter by PEFT; return its logprobs of the prompt, and the model's."""
    peft = pytest.importorskip("peft")  # takes seconds, which processes without these tests are spared
    torch.manual_seed(3)
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        without = plain(tokens).logits[0].log_softmax(-1)
        adapted = peft.get_peft_model(plain, peft.LoraConfig(task_type="CAUSAL_LM", **config))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
        found = adapted.eval()(tokens).logits[0].log_softmax(-1)
    adapted.save_pretrained(folder)
    return found, without


def logprobs(llm: LLM, lora_request: LoRARequest | None) -> torch.Tensor:
    """Return the logprobs of the prompt's tokens behind the first."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False, lora_request=lora_request)
    assert output.prompt_logprobs is not None
    each = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    return torch.tensor([position[token].logprob for position, token in each if position is not None])


def check(model: Path, plain: torch.nn.Module, folder: Path, config: dict[str, Any]) -> None:
    expected, without = peft_logprobs(plain, folder, config)
    places = torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])
    with LLM(model, dtype="float32", enable_lora=True) as llm:
        found = logprobs(llm, LoRARequest("a", 1, str(folder)))
        torch.testing.assert_close(found, expected[places], rtol=0, atol=1e-4)
        torch.testing.assert_close(logprobs(llm, None), without[places], rtol=0, atol=1e-4)
    assert (expected[places] - without[places]).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft
@pytest.mark.parametrize("case", CASES)
def test_logprobs_are_those_of_peft(case: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = write_random_model(tmp_path / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    check(model, plain, tmp_path / "adapter", CASES[case])


SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
MIXTURE = SIZES | {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40, "norm_topk_prob": True,
}  # fmt: skip
HYBRID = SIZES | {
    "head_dim": 16, "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "rms_norm_eps": 1e-2, "initializer_range": 0.1,
}  # fmt: skip
MAMBA = {key: value for key, value in SIZES.items() if key != "num_hidden_layers"} | {"initializer_range": 0.1}
KIMI = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"} | {
    "num_hidden_layers": 3, "initializer_range": 0.1, "layer_types": [*["linear_attention"] * 2, "full_attention"],
    "linear_num_heads": 3, "linear_head_dim": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32,
}  # fmt: skip
FALCON = SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}
GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 48, "n_layer": 2, "n_head": 6, "bos_token_id": 0, "eos_token_id": 0}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("family", "sizes", "targets"),
    [
        ("GPT2", GPT2, ["c_attn", "c_fc", "c_proj"]),
        ("Phi3", SIZES, ["qkv_proj", "gate_up_proj", "down_proj"]),
        ("GPTNeoX", SIZES, ["query_key_value", "dense_h_to_4h", "dense"]),
        ("Falcon", FALCON, ["query_key_value", "dense_4h_to_h"]),
        ("Gemma2", SIZES | {"head_dim": 8}, ["q_proj", "gate_proj", "o_proj"]),
        ("Mixtral", MIXTURE, ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("Qwen3Moe", MIXTURE | {"head_dim": 8}, ["q_proj", "v_proj", "o_proj"]),
        ("Qwen2Moe", MIXTURE, ["q_proj", "k_proj"]),
        ("Olmoe", MIXTURE, ["v_proj", "o_proj"]),
        ("Qwen3_5Text", HYBRID, ["q_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"]),
        ("Qwen3Next", HYBRID | MIXTURE, ["q_proj", "in_proj_qkvz", "out_proj"]),
        (
            "GraniteMoeHybrid",
            SIZES | {"initializer_range": 0.1, "mamba_n_heads": 6, "mamba_d_state": 16, "num_local_experts": 0}
            | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 64},
            ["q_proj", "o_proj", "in_proj", "out_proj", "input_linear", "output_linear"],
        ),
        (
            "NemotronH",
            MAMBA | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "head_dim": 16}
            | {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "time_step_min": 1e-12},
            ["k_proj", "in_proj", "up_proj", "down_proj"],
        ),
        (
            "FalconH1",
            SIZES | {"initializer_range": 0.1, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 16}
            | {"attention_in_multiplier": 1.3, "key_multiplier": 0.5, "ssm_in_multiplier": 0.7}
            | {"mlp_multipliers": [0.8, 0.6], "ssm_multipliers": [0.9, 1.4, 0.7, 1.2, 0.5], "ssm_out_multiplier": 0.4},
            ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "gate_proj", "up_proj", "down_proj"],
        ),
        ("KimiLinear", KIMI, ["q_proj", "k_proj", "v_proj", "g_a_proj", "g_b_proj", "kv_a_proj_with_mqa", "o_proj"]),
        ("Lfm2", SIZES | {"layer_types": ["conv", "full_attention"]}, ["in_proj", "out_proj", "k_proj", "w1", "w2"]),
    ],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to")
def test_other_families_have_the_logprobs_of_peft(
    family: str, sizes: dict[str, Any], targets: list[str], tmp_path: Path
) -> None:
    """Transposed weights, modules that the checkpoint has fused, with rows in groups too, norms around sublayers."""
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**sizes)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain.save_pretrained(tmp_path / "model")
    rank = {"r": 6, "lora_alpha": 12, "target_modules": targets}
    check(tmp_path / "model", plain, tmp_path / "adapter", rank)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ({"target_modules": ["q_proj", "gate_proj"]}, r"no target module '.*\.0\.mlp\.shared_expert\.gate_proj'"),
    ],
)
def test_factors_of_experts_are_refused_by_name(targets: dict[str, Any], message: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = transformers.Qwen2MoeConfig(**MIXTURE)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain.save_pretrained(tmp_path / "model")
    adapted = peft.get_peft_model(plain, peft.LoraConfig(task_type="CAUSAL_LM", r=4, **targets))
    adapted.save_pretrained(tmp_path / "adapter")
    with LLM(tmp_path / "model", dtype="float32", enable_lora=True) as llm:
        with pytest.raises(InvalidRequestError, match=message):
            logprobs(llm, LoRARequest("a", 1, str(tmp_path / "adapter")))
        assert len(logprobs(llm, None)) == len(PROMPT) - 1
