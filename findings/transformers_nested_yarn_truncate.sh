#!/usr/bin/env bash
# Package: transformers 5.23.0, torch 2.13.0
# Expected: `truncate: false` of YaRN (rope_parameters) has the same effect whether the parameters stand alone or by the
# type of layer, as factor, beta_fast and the others have.
# Seen: by the type of layer it has none: the frequencies are those with truncation. It is read from rope_parameters
# itself, not from the section of the type.
# Date: 2026-11-28
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0
cat > compare.py <<'PY'
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 4096}
SIZES = dict(hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=32768)


def alone(**more):
    return LlamaRotaryEmbedding(LlamaConfig(**SIZES, num_hidden_layers=1, rope_parameters=YARN | more)).inv_freq


def by_type(**more):
    rope = {"full_attention": YARN | more, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = Gemma3TextConfig(**SIZES, num_hidden_layers=2, layer_types=[*rope], rope_parameters=rope)
    return Gemma3RotaryEmbedding(config).full_attention_inv_freq


changes = {name: [not torch.equal(made(), made(**option)) for option in ({"beta_fast": 8.0}, {"truncate": False})]
           for name, made in (("alone", alone), ("by type of layer", by_type))}
for name, (beta, truncate) in changes.items():
    print(f"{name}: beta_fast changes frequencies: {beta}, truncate false changes frequencies: {truncate}")
assert changes == {"alone": [True, True], "by type of layer": [True, False]}
PY
venv/bin/python compare.py
