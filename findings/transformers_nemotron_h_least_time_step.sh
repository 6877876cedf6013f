#!/usr/bin/env bash
# Package: transformers 5.23.0, torch 2.13.0
# Expected: NemotronH computes tokens one by one, with a cache, as it computes them in one prompt: the logits differ by
# rounding alone.
# Seen: a prompt's steps of time are at least time_step_min (0.001 by default), those of a single token are not: where
# softplus(dt + dt_bias) is below it the logits are 0.026 apart, of up to 5.7. With a time_step_min of 1e-12 they are
# 5e-6 apart.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0
cat > compare.py <<'PY'
import torch
from transformers import NemotronHConfig, NemotronHForCausalLM


def difference(time_step_min):
    """Return how far the logits of a prompt are from those of the same tokens one by one, with a cache."""
    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=96, hidden_size=64, layers_block_type=["linear_attention", "full_attention"], num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, mamba_num_heads=4, mamba_head_dim=32, n_groups=2, ssm_state_size=16,
        chunk_size=8, intermediate_size=96, time_step_min=time_step_min,
    )
    model = NemotronHForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("dt_bias"):
                weight.fill_(-7.0)  # softplus(-7) is 0.0009, and the default time_step_min 0.001
            elif weight.dim() > 1:
                weight.normal_(0.0, 0.2)
        tokens = torch.randint(96, (1, 40))
        whole = model(tokens, use_cache=False).logits
        steps, cache = [], None
        for position in range(tokens.shape[1]):
            out = model(tokens[:, position : position + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    return (whole - torch.cat(steps, 1)).abs().max().item(), whole.abs().max().item()


seen = {limit: difference(limit) for limit in (1e-12, 0.001)}
for limit, (apart, largest) in seen.items():
    print(f"time_step_min {limit}: prompt and single tokens are {apart:.1e} apart, logits up to {largest:.1f}")
assert seen[1e-12][0] < 1e-5
assert seen[0.001][0] > 1e-3
PY
venv/bin/python compare.py
