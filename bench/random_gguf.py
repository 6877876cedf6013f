"""Random GGUF file in Q4_0 of Qwen3-30B-A3B's shape: what llama.cpp runs beside `bench/experts.py model`.

    python bench/random_gguf.py model.gguf [--layers 48]       # 17 GB with 48 layers
    llama-bench -m model.gguf -t 2 -p 64 -n 16

Types are those of `llama-quantize ... Q4_0` without an importance matrix: linear layers, experts and the embedding in
Q4_0, the head in Q6_K, the router and norms in float32. Nibbles are random bytes; scales are those of weights with a
standard deviation of 0.02. The quantized elements are taken from 64 MiB of random blocks of each type, from a random
place on, so that writing costs little. The file has no tokenizer: llama-bench draws ids.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType

WIDTH, INNER, DENSE_INNER, NUM_EXPERTS, NUM_CHOSEN = 2048, 768, 6144, 128, 8
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCABULARY, POSITIONS = 32, 4, 128, 151_936, 40_960
STD = 0.02              # of weights
CHUNK_BYTES = 64 << 20
F32, Q4_0, Q6_K = (GGMLQuantizationType[name] for name in ("F32", "Q4_0", "Q6_K"))
Tensor = tuple[str, tuple[int, ...], GGMLQuantizationType]


def tensors(num_layers: int) -> Iterator[Tensor]:
    """Yield name, shape (rows of `shape[-1]` elements) and type of each tensor."""
    yield "token_embd.weight", (VOCABULARY, WIDTH), Q4_0
    for layer in range(num_layers):
        for name, shape, kind in (
            ("attn_norm", (WIDTH,), F32),
            ("attn_q", (NUM_HEADS * HEAD_DIM, WIDTH), Q4_0),
            ("attn_k", (NUM_KV_HEADS * HEAD_DIM, WIDTH), Q4_0),
            ("attn_v", (NUM_KV_HEADS * HEAD_DIM, WIDTH), Q4_0),
            ("attn_q_norm", (HEAD_DIM,), F32),
            ("attn_k_norm", (HEAD_DIM,), F32),
            ("attn_output", (WIDTH, NUM_HEADS * HEAD_DIM), Q4_0),
            ("ffn_norm", (WIDTH,), F32),
            ("ffn_gate_inp", (NUM_EXPERTS, WIDTH), F32),
            ("ffn_gate_exps", (NUM_EXPERTS, INNER, WIDTH), Q4_0),
            ("ffn_up_exps", (NUM_EXPERTS, INNER, WIDTH), Q4_0),
            ("ffn_down_exps", (NUM_EXPERTS, WIDTH, INNER), Q4_0),
        ):
            yield f"blk.{layer}.{name}.weight", shape, kind
    yield "output_norm.weight", (WIDTH,), F32
    yield "output.weight", (VOCABULARY, WIDTH), Q6_K


def num_bytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    """Return the bytes of a tensor."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    return int(np.prod(shape)) // block_size * block_bytes


def blocks(count: int, kind: GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """Return `count` random blocks, [count, bytes of a block] uint8."""
    block = np.frombuffer(rng.bytes(count * GGML_QUANT_SIZES[kind][1]), np.uint8).reshape(count, -1).copy()
    if kind == Q4_0:  # float16 scale, 32 nibbles of -8 to 7, whose standard deviation is 4.61
        scales = (STD / 4.61 * rng.choice([-1, 1], count)).astype(np.float16)
        block[:, :2] = scales[:, None].view(np.uint8)
    else:  # Q6_K: 192 bytes of 6-bit elements (standard deviation 18.5), 16 int8 scales, one float16 scale
        block[:, 192:208] = rng.integers(16, 48, (count, 16), dtype=np.uint8)
        block[:, 208:210] = np.full((count, 1), STD / 18.5 / 32, np.float16).view(np.uint8)
    return block


def write_tensor(
    writer: GGUFWriter, tensor: Tensor, pools: dict[GGMLQuantizationType, np.ndarray], rng: np.random.Generator
) -> None:
    """Append a tensor's elements to the file, a chunk at a time; its description has been written."""
    _, shape, kind = tensor
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    if kind == F32:
        is_norm = len(shape) == 1
        (np.ones(shape, np.float32) if is_norm else rng.standard_normal(shape, np.float32) * STD).tofile(file)
    else:
        left, pool = int(np.prod(shape)) // GGML_QUANT_SIZES[kind][0], pools[kind]
        start = int(rng.integers(len(pool)))
        while left:
            count = min(left, len(pool) - start)
            pool[start : start + count].tofile(file)
            left, start = left - count, 0
    writer.write_padding(file, num_bytes(shape, kind))


def main(path: Path, layers: Annotated[int, typer.Option(min=1)] = 48) -> None:
    """Write the file."""
    writer = GGUFWriter(None, "qwen3moe")
    writer.add_name("random")
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(DENSE_INNER)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(NUM_EXPERTS)
    writer.add_expert_used_count(NUM_CHOSEN)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(2)
    listed = list(tensors(layers))
    for name, shape, kind in listed:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes(shape, kind), raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    pools = {kind: blocks(CHUNK_BYTES // GGML_QUANT_SIZES[kind][1], kind, rng) for kind in (Q4_0, Q6_K)}
    for tensor in listed:
        write_tensor(writer, tensor, pools, rng)
    writer.fout[0].close()


if __name__ == "__main__":
    typer.run(main)
