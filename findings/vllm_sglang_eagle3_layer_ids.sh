#!/usr/bin/env bash
# vLLM 0.33.0 and SGLang 0.5.23 on config.json of EAGLE-3 heads, 2026-11-30.
#
# Expected: `eagle_aux_hidden_state_layer_ids` names the layers of the target whose streams a head was trained on, wherever in
#   config.json it stands, and both engines tap the same places of the target for one folder.
# Seen: vLLM reads the key at the top level alone, and SGLang in `eagle_config` alone; in the other place each takes its own
#   default, (2, N / 2, N - 3), without a word, though vLLM sizes the projection of the streams by the number of ids there. Where
#   SGLang reads ids it adds 1: they are layers that give a stream, and for vLLM layers that read one. So a head of layers other
#   than the default ones drafts from wrong streams in one of the two engines; answers stay right, and fewer drafts are accepted.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip --disable-pip-version-check --quiet download --no-deps --only-binary :all: --python-version 3.12 --dest . \
    vllm==0.33.0 sglang==0.5.23
venv/bin/python - <<'PYTHON'
import ast
import glob
import zipfile
from types import SimpleNamespace
from typing import List, Optional


def function(wheel: str, path: str, name: str, **names):
    """Return a function or method of a wheel's file as it stands there, without what the file imports."""
    source = zipfile.ZipFile(glob.glob(wheel)[0]).read(path).decode()
    found = next(node for node in ast.walk(ast.parse(source)) if getattr(node, "name", None) == name)
    names |= {"SpeculativeConfig": object, "Optional": Optional, "List": List}
    exec(compile(ast.Module([found], []), path, "exec"), names)
    return names[name]


def layers_of_vllm(config: dict) -> list[int]:
    path = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
    read = function("vllm-*.whl", path, "get_eagle3_aux_layers_from_config")
    default = function("vllm-*.whl", "vllm/model_executor/models/interfaces.py", "get_eagle3_default_aux_hidden_state_layers")
    hf_config = SimpleNamespace(**config)
    found = read(SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=hf_config)))
    return list(found or default(SimpleNamespace(model=SimpleNamespace(layers=[None] * NUM_LAYERS))))


def layers_of_sglang(config: dict) -> list[int]:
    """The lookup stands in a function of the whole engine: a `try` around these two keys, which is taken out of it."""
    path = "sglang/srt/model_executor/model_runner_components/spec_aux_hidden_state.py"
    source = zipfile.ZipFile(glob.glob("sglang-*.whl")[0]).read(path).decode()
    lookup = next(
        node for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Try) and '"eagle_config"' in ast.get_source_segment(source, node)
    )
    own = SimpleNamespace()
    names = {"config": own, "draft_model_config": SimpleNamespace(hf_config=SimpleNamespace(**config))}
    exec(compile(ast.Module([lookup], []), path, "exec"), names)
    capture = function("sglang-*.whl", "sglang/srt/models/qwen3.py", "set_eagle3_layers_to_capture")
    target = SimpleNamespace(
        pp_group=SimpleNamespace(is_last_rank=True), model=SimpleNamespace(),
        config=SimpleNamespace(num_hidden_layers=NUM_LAYERS),
    )
    capture(target, own.eagle_aux_hidden_state_layer_ids)
    return target.model.layers_to_capture


NUM_LAYERS = 36
IDS = {"eagle_aux_hidden_state_layer_ids": [4, 12, 20]}
found = {}
for place, config in {"at the top level": IDS, "in eagle_config": {"eagle_config": IDS}}.items():
    found[place] = layers_of_vllm(config), layers_of_sglang(config)
    print(f"ids 4, 12, 20 {place}, of {NUM_LAYERS} layers: streams in front of layers {found[place][0]} (vLLM), {found[place][1]} (SGLang)")
assert found["at the top level"] == ([4, 12, 20], [2, 18, 33]), "it is no longer so"
assert found["in eagle_config"] == ([2, 18, 33], [5, 13, 21]), "it is no longer so"
PYTHON
