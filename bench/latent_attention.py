"""Decoding with latent attention, beside llama.cpp on the same random GGUF file, in turn.

    python bench/latent_attention.py --llama-cpp FOLDER [--layers 4] [--contexts 32,8192] [--rounds 7] [--threads 2]
    python bench/latent_attention.py    # the kernel alone: CPU time of one thread, caches of 16 and 8 bits, in turn

DeepSeek-V2-Lite's sizes with few layers, all of them dense, in Q8_0, with V2's two projections of queries: llama.cpp
knows V2-Lite's one projection by the number of layers. FOLDER has the libraries of llama.cpp 0.5.0 (`make real`); its
cache is of 16 bits by default, and so is Quire's. Each time is one step of one sequence behind so many tokens.
llama.cpp computes the tokens before, Quire reads a cache of random numbers: a step takes as long. With one thread the
times are of the CPU: llama.cpp's threads spin at barriers, and beside other work two of them stand still.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from quire.core.arrays import BFLOAT16, FLOAT8_E4M3, Array, DType, bits
from quire.core.config import QUANTIZED
from quire.engine.formats import read_source
from quire.extension import _kernels
from quire.kernels.choice import choose_back_end
from quire.kernels.conversion import converted
from quire.kernels.cpp.cpp_attention import paged_attention
from quire.kernels.cpp.cpp_kv_cache import cache_shapes, write_kv
from quire.kernels.paged_attention import AttentionSpec, Heads, RotarySpec, build_metadata
from quire.kernels.program import LayerInputs
from quire.model.kv_cache import KVCache
from quire.model.loader import load_model
from quire.model.quantization import QuantizationOptions
from support import llama_cpp

WIDTH, INNER, HEADS, RANK, LATENT, ROPE, NOPE, VALUE, VOCABULARY = 2048, 10_944, 16, 1536, 512, 64, 128, 128, 4096
BLOCK_SIZE = 16
F32, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0
STD = 0.02  # standard deviation of weights


def tensors(num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor; vectors are float32, matrices Q8_0."""
    yield "token_embd.weight", (VOCABULARY, WIDTH)
    for layer in range(num_layers):
        shapes = {
            "attn_norm": (WIDTH,), "attn_q_a": (RANK, WIDTH), "attn_q_a_norm": (RANK,),
            "attn_q_b": (HEADS * (NOPE + ROPE), RANK), "attn_kv_a_mqa": (LATENT + ROPE, WIDTH),
            "attn_kv_a_norm": (LATENT,), "attn_k_b": (HEADS, LATENT, NOPE), "attn_v_b": (HEADS, VALUE, LATENT),
            "attn_output": (WIDTH, HEADS * VALUE), "ffn_norm": (WIDTH,), "ffn_gate": (INNER, WIDTH),
            "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
        }  # fmt: skip
        for name, shape in shapes.items():
            yield f"blk.{layer}.{name}.weight", shape
    yield "output_norm.weight", (WIDTH,)
    yield "output.weight", (VOCABULARY, WIDTH)


def write_file(path: Path, num_layers: int, num_tokens: int) -> None:
    """Write the file."""
    writer, rng = GGUFWriter(path, "deepseek2"), np.random.default_rng(0)
    writer.add_context_length(num_tokens)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(ROPE)
    sizes = {"key_length": LATENT + ROPE, "value_length": LATENT, "key_length_mla": NOPE + ROPE,
             "value_length_mla": VALUE, "q_lora_rank": RANK, "kv_lora_rank": LATENT}  # fmt: skip
    experts = {"leading_dense_block_count": num_layers, "expert_count": 2, "expert_used_count": 1,
               "expert_feed_forward_length": 1408, "expert_shared_count": 1, "vocab_size": VOCABULARY}  # fmt: skip
    for key, size in ({f"attention.{key}": size for key, size in sizes.items()} | experts).items():
        writer.add_uint32(f"deepseek2.{key}", size)
    writer.add_float32("deepseek2.expert_weights_scale", 1.0)
    writer.add_tokenizer_model("none")
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(2)
    for name, shape in tensors(num_layers):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        size, block_bytes = GGML_QUANT_SIZES[Q8_0]
        blocks = rng.integers(-127, 128, (int(np.prod(shape)) // size, block_bytes), dtype=np.int8)
        blocks[:, :2] = np.full(1, STD / 73, np.float16).view(np.int8)
        rows = blocks.view(np.uint8).reshape(*shape[:-1], -1)
        writer.add_tensor(name, rows, raw_dtype=Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Quire:
    """The file in Quire, and steps of one sequence."""

    def __init__(self, path: Path, num_tokens: int, num_threads: int) -> None:
        _kernels.set_num_threads(num_threads)
        self._clock = time.process_time if num_threads == 1 else time.perf_counter
        source = read_source(path)
        quantization = source.quantization(QuantizationOptions())
        back_end = choose_back_end("cpu", "cpp", head_dim=source.spec.head_dim)
        self._decoder = load_model(source, back_end=back_end, quantization=quantization, max_positions=num_tokens)
        self._decoder._rotary.fill(num_tokens)
        num_blocks, rng = num_tokens // BLOCK_SIZE, np.random.default_rng(0)
        self._cache = KVCache.allocate(self._decoder.kv_geometry, num_blocks, BLOCK_SIZE, back_end)
        for keys in self._cache.keys:  # numbers between 1 and 2, or -1 and -2
            bits(keys)[:] = rng.integers(0, 2, keys.shape, np.uint16) << 15 | 0x3F80 | rng.integers(0, 128, keys.shape)
        self._table = rng.permutation(num_blocks).astype(np.int32)[None]

    def step(self, position: int) -> float:
        """Return the seconds of a step at a position."""
        slot = self._table[0, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        starts, lens = np.array([0, 1], np.int32), np.array([position + 1], np.int32)
        metadata = build_metadata(self._table, starts, lens, BLOCK_SIZE)
        begun = self._clock()
        tokens = np.array([7])
        x = self._decoder.embedding(tokens, np.array([position]))
        inputs = LayerInputs(
            np.array([position]), np.array([slot], np.int64), metadata, self._cache.keys, self._cache.values
        )
        hidden = self._decoder._programs[0].run(x, inputs)
        assert self._decoder._head is not None
        self._decoder._head(hidden)
        return self._clock() - begun


class Theirs:
    """The file in llama.cpp, and steps of one sequence."""

    def __init__(self, folder: Path, path: Path, num_tokens: int, num_threads: int) -> None:
        llama_cpp.NUM_THREADS = num_threads
        self._clock = time.process_time if num_threads == 1 else time.perf_counter
        self._model = llama_cpp.LlamaCpp(folder, path, num_tokens)
        self._num_known = 0

    def step(self, position: int) -> float:
        """Return the seconds of a step at a position; the tokens before are computed first."""
        while self._num_known < position:
            count = min(512, position - self._num_known)
            self._model.logits([11] * count, self._num_known)
            self._num_known += count
        begun = self._clock()
        self._model.logits([7], position)
        return self._clock() - begun


def latents_in(element: DType, extra_bytes: int, latents: Array) -> tuple[Array, Array]:
    """Return a cache of latents [tokens, 1, LATENT + ROPE] in blocks one after the other, stored in `element`."""
    shape, _ = cache_shapes(len(latents) // BLOCK_SIZE, BLOCK_SIZE, 1, LATENT + ROPE, element, extra_bytes)
    cache, places = (np.zeros(shape, element), np.empty((shape[0], 0), element)), np.arange(len(latents))
    spec = RotarySpec(Heads(1, 1, LATENT + ROPE), rotary_start=LATENT)
    write_kv(spec, latents, latents, None, places, *cache, places)
    return cache


def time_kernel(rounds: int) -> None:
    """Print the milliseconds of a decode and of a chunk behind 8,192 tokens, over latents and over keys and values."""
    context, rng = 8192, np.random.default_rng(0)
    _kernels.set_num_threads(1)
    latents = converted(rng.standard_normal((context, 1, LATENT + ROPE), np.float32), BFLOAT16)
    keys, empty = latents_in(BFLOAT16, 0, latents)
    _, shape = cache_shapes(context // BLOCK_SIZE, BLOCK_SIZE, 1, LATENT + ROPE, BFLOAT16)
    values = converted(rng.standard_normal(shape, np.float32), BFLOAT16)
    caches = {"latents": (keys, empty), "keys and values": (keys, values)}
    for name, stored in QUANTIZED.items():
        element = FLOAT8_E4M3 if "float8" in stored.element else np.dtype(np.int8)
        caches[name] = latents_in(element, stored.extra_bytes(LATENT + ROPE, LATENT), latents)
    table = rng.permutation(len(keys)).astype(np.int32)[None]
    for isa, num_heads, num_rows in product(_kernels.usable_isas(), (16, 128), (1, 32)):
        _kernels.use_isa(isa)
        heads = Heads(num_heads, 1, LATENT + ROPE)
        query = converted(rng.standard_normal((num_rows, num_heads, LATENT + ROPE), np.float32), BFLOAT16)
        metadata = build_metadata(
            table, np.array([0, num_rows], np.int32), np.array([context], np.int32), BLOCK_SIZE
        )
        times: dict[str, list[float]] = {name: [] for name in caches}
        for _ in range(rounds):
            for name, cache in caches.items():
                spec = AttentionSpec(heads, 0.05, value_dim=0 if name == "keys and values" else LATENT)
                begun = time.process_time()
                paged_attention(spec, query, *cache, metadata)
                times[name].append(1e3 * (time.process_time() - begun))
        least = {name: min(each) for name, each in times.items()}
        rate = 2e-6 * num_rows * num_heads * context * (2 * LATENT + ROPE) / least["latents"]
        cells = ", ".join(f"{name} {least[name]:.2f} to {max(each):.2f} ms" for name, each in times.items())
        print(f"{isa}, {num_heads} heads, {num_rows} tokens: {cells}; latents {rate:.0f} GFLOP/s", flush=True)


def main(
    llama_cpp_folder: Annotated[Path | None, typer.Option("--llama-cpp")] = None, layers: int = 4,
    contexts: str = "32,8192", rounds: int = 7, threads: int = 2,
) -> None:  # fmt: skip
    """Print the milliseconds of a step at each context: median, and the least and the most."""
    if llama_cpp_folder is None:
        return time_kernel(rounds)
    positions = [int(each) for each in contexts.split(",")]
    num_tokens = max(positions) + BLOCK_SIZE
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_file(path, layers, num_tokens)
        theirs = Theirs(llama_cpp_folder, path, num_tokens, threads)
        engines = {"quire": Quire(path, num_tokens, threads), "llama.cpp": theirs}
        for position in sorted(positions):
            times: dict[str, list[float]] = {name: [] for name in engines}
            for turn in range(rounds + 1):
                for name, engine in engines.items():
                    seconds = [engine.step(position) for _ in range(5)]
                    if turn:  # the first one warms up
                        times[name].append(1e3 * statistics.median(seconds))
            medians = {name: statistics.median(each) for name, each in times.items()}
            spread = {name: f"{min(each):.2f} to {max(each):.2f}" for name, each in times.items()}
            ratio = medians["quire"] / medians["llama.cpp"]
            cells = ", ".join(f"{name} {medians[name]:.2f} ms ({spread[name]})" for name in engines)
            print(f"context {position}: {cells}, ratio {ratio:.3f}", flush=True)
    return None


if __name__ == "__main__":
    typer.run(main)
