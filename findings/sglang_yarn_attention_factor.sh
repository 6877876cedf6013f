#!/usr/bin/env bash
# Packages: sglang 0.5.23 and vllm 0.33.0 (YaRNScalingRotaryEmbedding of their wheels), transformers 5.23.0, torch 2.13.0
# Expected: `attention_factor` of YaRN in config.json's rope_parameters scales queries and keys in each engine as in transformers, which
# documents it: the factor itself, in place of 0.1 ln(factor) + 1.
# Seen: vLLM does so. SGLang passes on `attn_factor`, which transformers does not read, and drops `attention_factor` without a word: a model
# trained with 1.0 and a factor of 8 has cosines and sines 1.21 times as large, and scores 1.46 times. With attn_factor SGLang multiplies
# its own 1.21. Only the two classes and the choice of arguments are run, without what their files import.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 numpy==2.4.6
venv/bin/pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 sglang==0.5.23 vllm==0.33.0
cat > scale.py <<'PY'
import ast
import glob
import math
import zipfile

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 4096}


class Base:
    def __init__(self, *_):
        pass


def scale(wheel, place, rope):
    """Return the scale of cosines and sines that get_rope of a wheel makes of rope_parameters."""
    archive = zipfile.ZipFile(glob.glob(wheel)[0])
    factory = ast.parse(archive.read(f"{place}/{'factory' if 'sglang' in place else '__init__'}.py"))
    source = ast.parse(archive.read(f"{place}/{'yarn' if 'sglang' in place else 'yarn_scaling_rope'}.py"))
    names = {"RotaryEmbedding": Base, "torch": torch, "math": math,
             "yarn_get_mscale": lambda scale, mscale=1: 0.1 * mscale * math.log(scale) + 1.0,
             "yarn_get_mscale_simple": lambda scale: 0.1 * math.log(scale) + 1.0}
    kind = next(node for node in source.body if getattr(node, "name", None) == "YaRNScalingRotaryEmbedding")
    kind.body = [node for node in kind.body if getattr(node, "name", None) == "__init__"]
    exec(compile(ast.Module([kind], []), place, "exec"), names)
    # the branch of YaRN, which chooses the arguments and calls the class
    branch = next(
        node for node in ast.walk(factory)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "scaling_type == 'yarn'"
    )
    names |= {"_get_rope_param": lambda given, key, default, _: given.get(key, default), "rope_scaling": rope, "rope_parameters": rope,
              "scaling_type": "yarn", "max_position": 32768, "head_size": 64, "rotary_dim": 64, "base": 1e4, "is_neox_style": True,
              "dtype": torch.float32}
    exec(compile(ast.Module(branch.body, []), place, "exec"), names)
    return names["rotary_emb"].mscale


seen = {}
for more in ({}, {"attention_factor": 1.0}, {"attn_factor": 0.5}):
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=32768, rope_parameters=YARN | more)
    seen[(*more, "")[0]] = found = [
        round(ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[1], 4),
        round(scale("vllm-*.whl", "vllm/model_executor/layers/rotary_embedding", YARN | more), 4),
        round(scale("sglang-*.whl", "sglang/srt/layers/rotary_embedding", YARN | more), 4),
    ]
    print(f"{more or 'neither'}: transformers {found[0]}, vLLM {found[1]}, SGLang {found[2]}")
assert seen == {"": [1.2079] * 3, "attention_factor": [1.0, 1.0, 1.2079], "attn_factor": [1.2079, 1.2079, 0.604]}, "it is no longer so"
PY
venv/bin/python scale.py
