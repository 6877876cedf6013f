#!/usr/bin/env bash
# llama.cpp 0.5.0's mtmd (source and libraries of npm: node-llama-cpp and @node-llama-cpp/linux-x64 3.22.1), 2026-11-29.
#
# Expected: a file of an encoder of images for LLaVA 1.5, as tools/mtmd/legacy-models/convert_image_encoder_to_gguf.py writes it,
#   gives the rows of the model: CLIP's class token comes first and has the first position, patch i has position i + 1; all layers
#   of the file are computed (the converter has dropped the last of CLIP's); the class token's row is left out.
# Seen: the class token is put behind the patches, so that patch i has position i, and the class token the last one; of the file's
#   layers the last is left out; and the first row, now that of the first patch, is dropped in place of the class token's, which
#   stays as the last. Rows of random weights differ as much as they are large. With these three changes the reference below
#   agrees to the precision of ggml's GELU.
# Takes some minutes: mtmd is in no package, and is compiled here.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip --disable-pip-version-check --quiet install numpy==2.3.5 gguf==0.19.0
for package in node-llama-cpp @node-llama-cpp/linux-x64; do
  npm pack --silent --ignore-scripts "$package@3.22.1" > packed
  mkdir -p "$(basename "$package")"
  tar -xzf "$(tail -n 1 packed)" -C "$(basename "$package")" --strip-components 1
done
git clone --quiet node-llama-cpp/llama/gitRelease.bundle source
libraries=$folder/linux-x64/bins/linux-x64
(
  cd source
  mkdir objects
  flags="-O1 -fPIC -std=c++17 -w -Itools/mtmd -Iinclude -Iggml/include -Icommon -Ivendor -Ivendor/stb -Ivendor/hash"
  flags="$flags -Ivendor/miniaudio -Ivendor/sheredom -I. -DLLAMA_SHARED -DGGML_SHARED -DLLAMA_BUILD"
  ls tools/mtmd/*.cpp tools/mtmd/models/*.cpp vendor/hash/hash.cpp | grep -v -e mtmd-cli -e deprecation |
    xargs -P "$(nproc)" -I {} sh -c 'g++ '"$flags"' -c {} -o objects/$(basename {} .cpp).o'
  gcc -O1 -fPIC -w -Ivendor/hash -c vendor/hash/xxhash/xxhash.c -o objects/xxhash.o
  gcc -O1 -fPIC -w -Ivendor/hash -c vendor/hash/sha256/sha256.c -o objects/sha256.o
  g++ -x c++ -O1 -fPIC -w -Ivendor/hash -c vendor/hash/sha1/sha1.c -o objects/sha1.o
  g++ -shared -o ../libmtmd.so objects/*.o -L"$libraries" -l:libllama.v0.5.0.so -l:libggml.v0.5.0.so -l:libggml-base.so \
    -Wl,-rpath,"$libraries"
)
venv/bin/python - "$libraries" <<'PYTHON' 2> /dev/null
import ctypes
import math
import sys
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_void_p

import gguf
import numpy as np

WIDTH, HEADS, INNER, LAYERS, SIDE, PATCH, TEXT = 32, 4, 48, 2, 28, 7, 48
rng = np.random.default_rng(0)
weights = {"v.class_embd": (WIDTH,), "v.patch_embd.weight": (WIDTH, 3, PATCH, PATCH), "v.position_embd.weight": (17, WIDTH)}
for name in ("v.pre_ln", *(f"v.blk.{layer}.ln{each}" for layer in range(LAYERS) for each in (1, 2))):
    weights |= {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
for layer in range(LAYERS):  # the converter calls the first layer of a feed-forward ffn_down
    for name, rows, columns in (*((f"attn_{each}", WIDTH, WIDTH) for each in ("q", "k", "v", "out")),
                                ("ffn_down", INNER, WIDTH), ("ffn_up", WIDTH, INNER)):
        weights |= {f"v.blk.{layer}.{name}.weight": (rows, columns), f"v.blk.{layer}.{name}.bias": (rows,)}
for name, columns in (("mm.0", WIDTH), ("mm.2", TEXT)):
    weights |= {f"{name}.weight": (TEXT, columns), f"{name}.bias": (TEXT,)}
weights = {name: rng.standard_normal(shape, np.float32) * 0.3 for name, shape in weights.items()}

writer = gguf.GGUFWriter("mmproj.gguf", "clip")
writer.add_bool("clip.has_text_encoder", False)
writer.add_bool("clip.has_vision_encoder", True)
writer.add_bool("clip.has_llava_projector", True)
writer.add_string("clip.projector_type", "mlp")
for key, value in {
    "image_size": SIDE, "patch_size": PATCH, "embedding_length": WIDTH, "feed_forward_length": INNER,
    "projection_dim": 16, "attention.head_count": HEADS, "block_count": LAYERS,
}.items():
    writer.add_uint32(f"clip.vision.{key}", value)
writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
writer.add_bool("clip.use_gelu", False)
for name, value in weights.items():
    writer.add_tensor(name, value)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
pixels = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)


def linear(x, name):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def norm(x, name):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def reference(is_class_last, num_layers):
    values = ((pixels / 255.0 - 0.5) / 0.5).transpose(2, 0, 1)
    cut = values.reshape(3, SIDE // PATCH, PATCH, SIDE // PATCH, PATCH).transpose(1, 3, 0, 2, 4).reshape(16, -1)
    patches, token = cut @ weights["v.patch_embd.weight"].reshape(WIDTH, -1).T, weights["v.class_embd"][None]
    x = np.concatenate([patches, token] if is_class_last else [token, patches]) + weights["v.position_embd.weight"]
    x = norm(x, "v.pre_ln")
    for layer in range(num_layers):
        block = f"v.blk.{layer}"
        given = norm(x, f"{block}.ln1")
        q, k, v = (linear(given, f"{block}.attn_{each}").reshape(17, HEADS, -1).transpose(1, 0, 2) for each in "qkv")
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(WIDTH // HEADS)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(17, WIDTH)
        x = x + linear(mixed, f"{block}.attn_out")
        inner = linear(norm(x, f"{block}.ln2"), f"{block}.ffn_down")
        x = x + linear(inner / (1 + np.exp(-1.702 * inner)), f"{block}.ffn_up")
    inner = linear(x[1:], "mm.0")
    erf = np.vectorize(math.erf)
    return linear(inner * (1 + erf(inner / math.sqrt(2))) / 2, "mm.2")


class Params(Structure):
    _fields_ = [
        ("use_gpu", c_bool), ("device", c_void_p), ("print_timings", c_bool), ("n_threads", c_int32),
        ("image_marker", c_char_p), ("media_marker", c_char_p), ("flash_attn_type", c_int32), ("warmup", c_bool),
        ("image_min_tokens", c_int32), ("image_max_tokens", c_int32), ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p), ("batch_max_tokens", c_int32), ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
    ]


class Text(Structure):
    _fields_ = [("text", c_char_p), ("text_len", c_size_t), ("add_special", c_bool), ("parse_special", c_bool)]


ggml = ctypes.CDLL(f"{sys.argv[1]}/libggml.v0.5.0.so", ctypes.RTLD_GLOBAL)
ggml.ggml_backend_load_all_from_path(sys.argv[1].encode())
mtmd = ctypes.CDLL("./libmtmd.so")
for name, result, arguments in (
    ("mtmd_context_params_default", Params, []), ("mtmd_init_from_file", c_void_p, [c_char_p, c_void_p, Params]),
    ("mtmd_default_marker", c_char_p, []), ("mtmd_bitmap_init", c_void_p, [c_uint32, c_uint32, c_char_p]),
    ("mtmd_input_chunks_init", c_void_p, []), ("mtmd_input_chunks_get", c_void_p, [c_void_p, c_size_t]),
    ("mtmd_tokenize", c_int32, [c_void_p, c_void_p, POINTER(Text), POINTER(c_void_p), c_size_t]),
    ("mtmd_encode_chunk", c_int32, [c_void_p, c_void_p]), ("mtmd_get_output_embd", POINTER(c_float), [c_void_p]),
):
    getattr(mtmd, name).restype, getattr(mtmd, name).argtypes = result, arguments
params = mtmd.mtmd_context_params_default()
params.use_gpu, params.n_threads = False, 1
context = mtmd.mtmd_init_from_file(b"mmproj.gguf", None, params)
assert context
marker, chunks = mtmd.mtmd_default_marker(), mtmd.mtmd_input_chunks_init()
bitmap = mtmd.mtmd_bitmap_init(SIDE, SIDE, pixels.tobytes())
assert mtmd.mtmd_tokenize(context, chunks, Text(marker, len(marker), False, True), (c_void_p * 1)(bitmap), 1) == 0
assert mtmd.mtmd_encode_chunk(context, mtmd.mtmd_input_chunks_get(chunks, 0)) == 0
found = np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(context), (16, TEXT))
differences = []
for is_class_last, num_layers in ((False, LAYERS), (False, LAYERS - 1), (True, LAYERS), (True, LAYERS - 1)):
    rows = reference(is_class_last, num_layers)
    differences.append(np.abs(rows - found).max())
    print(f"class token {'last' if is_class_last else 'first'}, {num_layers} of {LAYERS} layers: rows up to "
          f"{np.abs(rows).max():.2f}, largest difference {differences[-1]:.4f}")
sys.exit(not (differences[0] > 1 and differences[-1] < 0.05))
PYTHON
