#!/usr/bin/env bash
# Packages: transformers 5.23.0, torch 2.13.0
# Expected: a prompt gives the same greedy tokens whether `generate` computes it at once, in chunks (`prefill_chunk_size`), or
# behind the cache of an earlier turn (`past_key_values`), in a model with states as well: Nemotron-H's are the same.
# Seen: Jamba's tokens are others in both cases, without a warning. Its Mamba-1 layers read the cached state in calls of a single
# token alone; a call of several tokens begins at a state of zeros and overwrites what was cached, so that its layers forget all
# earlier chunks and turns, while its attention layers remember them. Mamba and FalconMamba have the same layers, and their forward
# with `cache_params` and several tokens the same fault.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0
cat > compare.py <<'PY'
import torch
from transformers import JambaConfig, JambaForCausalLM, MambaConfig, MambaForCausalLM, NemotronHConfig, NemotronHForCausalLM

SIZES = dict(vocab_size=128, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96)
JAMBA = JambaConfig(
    **SIZES, num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8, mamba_dt_rank=8,
)
NEMOTRON = NemotronHConfig(
    **SIZES, head_dim=16, layers_block_type=["mamba", "attention", "mamba", "attention"], mamba_num_heads=8,
    mamba_head_dim=16, n_groups=1, ssm_state_size=16, chunk_size=8, time_step_min=1e-12,
)
GREEDY = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)


def made(kind, config):
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.15)
    return model, torch.randint(3, 128, (1, 24))


def equal_tokens(kind, config):
    """Return how many of 8 tokens are those of one call: of a prompt in chunks, and of a second turn."""
    model, prompt = made(kind, config)
    ones = torch.ones_like(prompt)
    whole = model.generate(prompt, attention_mask=ones, **GREEDY)
    chunks = model.generate(prompt, attention_mask=ones, prefill_chunk_size=7, **GREEDY)
    first = model.generate(prompt[:, :13], attention_mask=ones[:, :13], return_dict_in_generate=True, **GREEDY)
    turns = torch.cat([first.sequences, prompt[:, 13:]], dim=1)
    known = model.generate(turns, attention_mask=torch.ones_like(turns), past_key_values=first.past_key_values, **GREEDY)
    new = model.generate(turns, attention_mask=torch.ones_like(turns), **GREEDY)
    return [(one == other)[0, -8:].sum().item() for one, other in ((whole, chunks), (new, known))]


def apart(kind, config):
    """Return how far the last logits of a prompt in two calls are from those of one call, as a share of the largest."""
    model, prompt = made(kind, config)
    with torch.inference_mode():
        whole = model(prompt).logits[:, -1]
        cache = model(prompt[:, :13], use_cache=True).cache_params
        parts = model(prompt[:, 13:], cache_params=cache, use_cache=True).logits[:, -1]
    return ((whole - parts).abs().max() / whole.abs().max()).item()


for kind, config in ((NemotronHForCausalLM, NEMOTRON), (JambaForCausalLM, JAMBA)):
    chunks, turn = equal_tokens(kind, config)
    print(f"{kind.__name__}: of 8 tokens {chunks} are equal behind a prompt in chunks, and {turn} in a second turn")
    assert (chunks == turn == 8) if kind is NemotronHForCausalLM else max(chunks, turn) < 8, "it is no longer so"
share = apart(MambaForCausalLM, MambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=4, state_size=8))
print(f"MambaForCausalLM: logits of a prompt in two calls are {share:.2f} of the largest apart")
assert share > 0.01, "it is no longer so"
PY
venv/bin/python compare.py 2> errors || { cat errors; exit 1; }
