#!/usr/bin/env bash
# Package: transformers 5.23.0, torch 2.13.0
# Expected: `generate` of RobertaForCausalLM, greedy, gives the tokens that the likeliest next token of each forward pass
# gives, as it does for other models.
# Seen: other tokens, with and without a cache. A forward pass counts positions from padding_idx + 1, as in training;
# `generate` makes position_ids from the attention mask, from 0 on, and passes them.
# Date: 2026-11-28
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0
cat > compare.py <<'PY'
import torch
from transformers import BertConfig, BertLMHeadModel, RobertaConfig, RobertaForCausalLM

SIZES = dict(vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
             max_position_embeddings=130, is_decoder=True, pad_token_id=1, bos_token_id=0, eos_token_id=2)


def tokens(kind, config_kind):
    torch.manual_seed(0)
    model = kind(config_kind(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    prompt = torch.tensor([[0, *((7 * i) % 190 + 5 for i in range(30))]])
    ids = prompt
    with torch.inference_mode():
        for _ in range(8):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False,
                                   eos_token_id=None, use_cache=False)
        shifted = model(prompt, position_ids=torch.arange(31)[None]).logits[0, -1].argmax()
    print(kind.__name__, "forward passes", ids[0, 31:].tolist(), "generate", generated[0, 31:].tolist())
    assert generated[0, 31] == shifted, "positions of generate do not begin at 0"
    return torch.equal(ids, generated)


assert tokens(BertLMHeadModel, BertConfig)
assert not tokens(RobertaForCausalLM, RobertaConfig)
PY
venv/bin/python compare.py
