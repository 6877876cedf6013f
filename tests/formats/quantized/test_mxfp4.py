"""gpt-oss with experts in MXFP4, against transformers' own reading of the same blocks."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.core.errors import ConfigError, ModelError
from quire.engine.formats import read_source
from quire.kernels.back_end import BackEnd
from quire.model.loader import load_model
from quire.model.quantization import QuantizationOptions
from quire_lab.sim.footprint import weight_bytes
from support.thread_ranks import assert_ranks_have_the_bits_of_one

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

WIDTH, INNER, EXPERTS, LAYERS = 64, 96, 5, 2
TOKENS = list(range(1, 40))
DENSE = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Write a folder with experts in random blocks, and its twin in bfloat16."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = transformers.GptOssConfig(
        vocab_size=99, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, sliding_window=9, num_local_experts=EXPERTS,
        num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder / "twin")
    twin = load_file(folder / "twin/model.safetensors")
    stored = dict(twin)
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}.mlp.experts."
        for name, rows, width in (("gate_up_proj", 2 * INNER, WIDTH), ("down_proj", WIDTH, INNER)):
            blocks = torch.randint(256, (EXPERTS, rows, width // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 126, (EXPERTS, rows, width // 32), dtype=torch.uint8)
            stored |= {f"{stem}{name}_blocks": blocks, f"{stem}{name}_scales": scales}
            del stored[stem + name]
            twin[stem + name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    save_file(twin, folder / "twin/model.safetensors", {"format": "pt"})
    (folder / "mxfp4").mkdir()
    save_file(stored, folder / "mxfp4/model.safetensors", {"format": "pt"})
    with_format = json.loads((folder / "twin/config.json").read_text())
    with_format["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": DENSE}
    (folder / "mxfp4/config.json").write_text(json.dumps(with_format))
    return folder / "mxfp4", folder / "twin"


def test_experts_in_blocks_give_the_bits_of_the_twin(tmp_path: Path, paged_runner: type, back_end: BackEnd) -> None:
    folder, twin = write_pair(tmp_path)
    source = read_source(folder)
    quantization = source.quantization(QuantizationOptions())
    assert str(quantization.layers) == "codebook4 weights in groups of 32, expanded to the model's dtype"
    quantized = load_model(source, back_end=back_end)
    found, expected = (
        paged_runner(model).run("a", TOKENS, [7, 20])
        for model in (quantized, load_model(read_source(twin), back_end=back_end))
    )
    assert torch.equal(found, expected)
    with torch.no_grad():
        model = transformers.GptOssForCausalLM.from_pretrained(twin, dtype=torch.float32)
        exact = model(torch.tensor([TOKENS])).logits[0]
    assert (found - exact).norm() < 0.05 * exact.norm()
    if back_end.name == "cpp":
        assert quantized.weight_bytes == weight_bytes(source.spec, "bfloat16", quantization=quantization)


def test_ranks_have_the_bits_of_one(tmp_path: Path, paged_runner: type, back_end: BackEnd) -> None:
    if back_end.name != "cpp":
        pytest.skip("ranks need the C++ kernels")
    source = read_source(write_pair(tmp_path)[0])
    assert_ranks_have_the_bits_of_one(
        source.spec,
        lambda ranks: load_model(source, back_end=back_end, ranks=ranks),
        lambda model: paged_runner(model).run("a", TOKENS, [7, 20]),
    )


def test_blocks_and_scales_of_other_forms_are_refused(tmp_path: Path, back_end: BackEnd) -> None:
    folder, _ = write_pair(tmp_path)
    with pytest.raises(ConfigError, match=r"quantization_activations 'int8' is for integer weights, .* codebook4"):
        read_source(folder).quantization(QuantizationOptions(activations="int8"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name][3, 2, 1] = 255
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"experts\.3\.down_proj\.scales has an exponent of 255, the limit is 223"):
        load_model(read_source(folder), back_end=back_end)
    tensors[name] = tensors[name][:, :, :1].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"experts\.0\.down_proj\.scales has shape \[64, 1\], expected \[64, 3\]"):
        load_model(read_source(folder), back_end=back_end)
