#!/usr/bin/env bash
# Package: llama-cpp-python 0.3.36 (llama.cpp of 1 October 2026, its source), torch 2.13.0, transformers 5.23.0
# Expected: convert_hf_to_gguf.py --mmproj writes a file of the encoder of a Mistral 3 that llama.cpp reads: it copies the
#   embedding of [IMG_BREAK], which ends a row of an image, to v.token_embd.img_break, and clip.cpp requires that tensor.
# Seen: the file has no such tensor, for a filter drops all names with "language_model." before the converter looks for
#   that of the embeddings, so that clip.cpp refuses it ("unable to find tensor v.token_embd.img_break").
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 gguf==0.19.0
venv/bin/pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: llama-cpp-python==0.3.36
tar -xzf llama_cpp_python-0.3.36.tar.gz
source=llama_cpp_python-0.3.36/vendor/llama.cpp
cat > write.py <<'PY'
import json
from pathlib import Path

from transformers import Mistral3Config, Mistral3ForConditionalGeneration

text = {
    "model_type": "mistral", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": None,
}
vision = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "patch_size": 7, "image_size": 84,
}
model = Mistral3ForConditionalGeneration(
    Mistral3Config(text_config=text, vision_config=vision, image_token_index=10)
)
model.save_pretrained("folder")
token = {"id": 12, "content": "[IMG_BREAK]"}
for name, content in {
    "tokenizer.json": {"added_tokens": [token]}, "tokenizer_config.json": {},
    "preprocessor_config.json": {"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
}.items():
    Path("folder", name).write_text(json.dumps(content))
PY
venv/bin/python write.py > /dev/null 2>&1
PYTHONPATH=$source/gguf-py venv/bin/python "$source/convert_hf_to_gguf.py" folder --mmproj --outtype f32 --outfile mmproj.gguf 2>&1 |
  grep "break token id"
cat > look.py <<'PY'
from gguf import GGUFReader
from safetensors import safe_open

with safe_open("folder/model.safetensors", "np") as file:
    embeddings = [name for name in file.keys() if name.endswith("embed_tokens.weight")]
names = [tensor.name for tensor in GGUFReader("mmproj.gguf").tensors]
print("embeddings of the folder:", *embeddings)
print(len(names), "tensors of the encoder's file, with img_break:", [name for name in names if "img_break" in name])
assert all("language_model." in name for name in embeddings)
assert "mm.patch_merger.weight" in names
assert not any("img_break" in name for name in names)
PY
venv/bin/python look.py
grep -n "get_tensor(TN_TOK_IMG_BREAK)" "$source/tools/mtmd/clip.cpp"
