#!/usr/bin/env bash
# Package: transformers 5.23.0, torch 2.13.0
# Expected: KimiLinearForCausalLM.save_pretrained writes the names of the published checkpoints, which it reads: experts in
# block_sparse_moe, and the feed-forward of the first, dense layer in mlp.
# Seen: the dense layer is written as block_sparse_moe.gate_proj, up_proj and down_proj, a name that no published checkpoint
# and no other engine has: the renaming of experts is undone for all modules that are called mlp.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0
cat > compare.py <<'PY'
from safetensors.torch import load_file
from transformers import KimiLinearConfig, KimiLinearForCausalLM

config = KimiLinearConfig(
    vocab_size=96, hidden_size=48, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, num_experts=4,
    num_experts_per_token=2, layer_types=["linear_attention", "full_attention"], linear_num_heads=2, linear_head_dim=16,
    first_k_dense_replace=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)
KimiLinearForCausalLM(config).save_pretrained("saved")
names = {name for name in load_file("saved/model.safetensors") if "_proj" in name and "self_attn" not in name}
dense = sorted(name for name in names if name.startswith("model.layers.0."))
print("dense layer:", *dense, sep="\n  ")
assert dense == [f"model.layers.0.block_sparse_moe.{name}_proj.weight" for name in ("down", "gate", "up")]
assert not any(".mlp." in name for name in names)
PY
venv/bin/python compare.py
