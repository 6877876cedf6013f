#!/usr/bin/env bash
# Packages: transformers 5.23.0, torch 2.13.0
# Expected: a forward pass with past_key_values and without position_ids counts on from the cached tokens, as it does in Llama and in
# the other hybrids with rotary positions (Falcon-H1, Qwen3-Next): a loop of single tokens gives the logits of one pass.
# Seen: Bamba gives each call the positions 0, 1, ..., whatever the cache holds. Queries and keys of all tokens of the loop have
# position 0: logits are off by 0.4 of the largest, without a warning. `generate` passes positions, and is right; with
# position_ids the loop is right, too. Loops that score, distil or speculate with a cache of their own are wrong for this family.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0
cat > compare.py <<'PY'
import torch
from transformers import BambaConfig, BambaForCausalLM, FalconH1Config, FalconH1ForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16, mamba_chunk_size=8)
MODELS = (
    (LlamaForCausalLM, LlamaConfig(**SIZES)),
    (FalconH1ForCausalLM, FalconH1Config(**SIZES, **MAMBA, mamba_d_ssm=128)),
    (BambaForCausalLM, BambaConfig(**SIZES, **MAMBA, mamba_expand=2, attn_layer_indices=[1, 3])),
)


def apart(model, tokens, has_positions):
    """Return how far logits of a loop of single tokens are from those of one pass, as a share of the largest."""
    whole, cache, parts = model(tokens, use_cache=False).logits, None, []
    for at in range(tokens.shape[1]):
        positions = {"position_ids": torch.tensor([[at]])} if has_positions else {}
        out = model(tokens[:, at : at + 1], past_key_values=cache, use_cache=True, **positions)
        cache = out.past_key_values
        parts.append(out.logits)
    return ((whole - torch.cat(parts, 1)).abs().max() / whole.abs().max()).item()


for kind, config in MODELS:
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.15)
    with torch.inference_mode():
        found = [apart(model, torch.randint(128, (1, 24)), has_positions) for has_positions in (True, False)]
    print(f"{kind.__name__}: {found[0]:.0e} of the largest apart with position_ids, {found[1]:.0e} without")
    assert found[0] < 1e-4 and (found[1] > 0.01) == (kind is BambaForCausalLM), "it is no longer so"
PY
venv/bin/python compare.py 2> errors || { cat errors; exit 1; }
