#!/usr/bin/env bash
# Package: transformers 5.23.0, torch 2.13.0
# Expected: OlmoHybridForCausalLM.save_pretrained writes the tensors q_conv1d, k_conv1d and v_conv1d with as many rows as
# q_proj, k_proj and v_proj have, which is how they are published and read from; and a config with rope_parameters null
# makes a model without rotary positions, as the model's own code says that published ones are.
# Seen: it writes three parts of equal size, whatever the widths of keys and values are, so that rows of values are in
# q_conv1d; and null becomes a rope_theta of 10,000: the model has a rotary embedding.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0
cat > compare.py <<'PY'
from safetensors.torch import load_file
from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

config = OlmoHybridConfig(
    vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32,
    rope_parameters=None, layer_types=["linear_attention", "full_attention"], pad_token_id=0,
)
model = OlmoHybridForCausalLM(config)
model.save_pretrained("saved")
tensors = load_file("saved/model.safetensors")
rows = {
    kind: [len(tensors[f"model.layers.0.linear_attn.{name}_{kind}.weight"]) for name in "qkv"]
    for kind in ("proj", "conv1d")
}
print("rows of q, k, v:", rows)
print("rotary:", model.model.rotary_emb, config.rope_parameters)
assert rows == {"proj": [32, 32, 128], "conv1d": [64, 64, 64]}
assert model.model.rotary_emb is not None
PY
venv/bin/python compare.py
