"""Random GGUF file of a model's shape: what llama.cpp runs beside Quire.

    python bench/random_gguf.py model.gguf [--model qwen3-30b-a3b] [--layers 48]    # 17 GB with 48 layers
    llama-bench -m model.gguf -t 2 -p 64 -n 16

Qwen3-30B-A3B has the types of `llama-quantize ... Q4_0` without an importance matrix: linear layers, experts and the
embedding in Q4_0, the head in Q6_K, the router and norms in float32; the other models those of Q8_0. Quantized elements
are random bytes; scales are those of weights with a standard deviation of 0.02. They are taken from 64 MiB of random
blocks of each type, from a random place on, so that writing costs little. The vocabulary is of numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType

STD = 0.02              # standard deviation of weights
CHUNK_BYTES = 64 << 20
F32, Q4_0, Q6_K, Q8_0 = (GGMLQuantizationType[name] for name in ("F32", "Q4_0", "Q6_K", "Q8_0"))
Value = int | float | Sequence[int]
Shapes = Mapping[str, tuple[int, ...]]


class Tensor(NamedTuple):
    """A tensor: rows of `shape[-1]` elements."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType


class Model(NamedTuple):
    """Metadata of a file, but for its number of layers, and the tensors of each layer."""

    architecture: str
    metadata: Mapping[str, Value]
    layers: Sequence[Shapes]       # one for each layer: name -> shape, without `blk.N.` and `.weight`
    ends: Shapes                   # tensors beside the layers
    type: GGMLQuantizationType
    floats: frozenset[str] = frozenset()  # matrices in float32

    def tensors(self, num_layers: int) -> Iterator[Tensor]:
        """Yield the tensors of the first layers, and those beside them."""
        stems = (f"blk.{layer}." for layer in range(num_layers))
        named = ((stem, shapes) for stem, shapes in zip(stems, self.layers, strict=False))
        for stem, shapes in chain(named, (("", self.ends),)):
            for name, shape in shapes.items():
                is_float = len(shape) == 1 or name in self.floats
                kind = Q6_K if name == "output" and self.type == Q4_0 else F32 if is_float else self.type
                yield Tensor(stem + name + ("" if name in UNSUFFIXED else ".weight"), shape, kind)


UNSUFFIXED = ("ssm_a", "ssm_dt.bias")


def attention(width: int, heads: int, kv_heads: int, head_dim: int, *, query_rows: int = 1) -> Shapes:
    """Return the tensors of attention with norms of queries and keys; `query_rows` 2: gates stand beside queries."""
    return {
        "attn_norm": (width,), "attn_q": (query_rows * heads * head_dim, width), "attn_k": (kv_heads * head_dim, width),
        "attn_v": (kv_heads * head_dim, width), "attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,),
        "attn_output": (width, heads * head_dim),
    }  # fmt: skip


def feed_forward(width: int, inner: int, norm: str = "ffn_norm") -> Shapes:
    """Return the tensors of a feed-forward layer."""
    return {norm: (width,), "ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}


def qwen3_30b_a3b() -> Model:
    """Return Qwen3-30B-A3B."""
    width, inner, experts, vocabulary = 2048, 768, 128, 151_936
    layer = attention(width, 32, 4, 128) | {
        "ffn_norm": (width,), "ffn_gate_inp": (experts, width), "ffn_gate_exps": (experts, inner, width),
        "ffn_up_exps": (experts, inner, width), "ffn_down_exps": (experts, width, inner),
    }  # fmt: skip
    metadata = sizes(width, 6144, 32, 4, 128) | {
        "context_length": 40_960, "rope.freq_base": 1e6, "expert_feed_forward_length": inner, "expert_count": experts,
        "expert_used_count": 8, "vocab_size": vocabulary,
    }  # fmt: skip
    ends = {"token_embd": (vocabulary, width), "output_norm": (width,), "output": (vocabulary, width)}
    return Model("qwen3moe", metadata, [layer] * 48, ends, Q4_0, frozenset({"ffn_gate_inp"}))


def qwen3_5_0_8b() -> Model:
    """Return Qwen3.5-0.8B's text model."""
    width, inner, heads, dim, vocabulary = 1024, 3584, 16, 128, 248_320
    delta_net = {
        "attn_norm": (width,), "attn_qkv": (3 * heads * dim, width), "attn_gate": (heads * dim, width),
        "ssm_conv1d": (3 * heads * dim, 4), "ssm_dt.bias": (heads,), "ssm_a": (heads,), "ssm_beta": (heads, width),
        "ssm_alpha": (heads, width), "ssm_norm": (dim,), "ssm_out": (width, heads * dim),
    }  # fmt: skip
    mixers = [*[delta_net] * 3, attention(width, 8, 2, 256, query_rows=2)] * 6
    metadata = sizes(width, inner, 8, 2, 256) | {
        "context_length": 262_144, "rope.freq_base": 1e7, "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0], "ssm.conv_kernel": 4, "ssm.inner_size": heads * dim,
        "ssm.state_size": dim, "ssm.time_step_rank": heads, "ssm.group_count": heads, "full_attention_interval": 4,
        "vocab_size": vocabulary,
    }  # fmt: skip
    layers = [{**mixer, **feed_forward(width, inner, "post_attention_norm")} for mixer in mixers]
    ends = {"token_embd": (vocabulary, width), "output_norm": (width,)}
    return Model("qwen35", metadata, layers, ends, Q8_0, frozenset({"ssm_conv1d"}))


def lfm2_1_2b() -> Model:
    """Return LFM2-1.2B."""
    width, inner, taps, vocabulary = 2048, 8192, 3, 65_536
    conv = {
        "attn_norm": (width,), "shortconv.conv": (width, taps), "shortconv.in_proj": (3 * width, width),
        "shortconv.out_proj": (width, width),
    }  # fmt: skip
    kv_heads = [8 if layer in (2, 5, 8, 10, 12, 14) else 0 for layer in range(16)]
    mixers = (attention(width, 32, 8, 64) if count else conv for count in kv_heads)
    metadata = sizes(width, inner, 32, 8, 64) | {
        "context_length": 128_000, "rope.freq_base": 1e6, "attention.head_count_kv": kv_heads,
        "shortconv.l_cache": taps, "vocab_size": vocabulary,
    }  # fmt: skip
    layers = [{**mixer, **feed_forward(width, inner)} for mixer in mixers]
    ends = {"token_embd": (vocabulary, width), "token_embd_norm": (width,)}
    return Model("lfm2", metadata, layers, ends, Q8_0, frozenset({"shortconv.conv"}))


def gemma4_e2b() -> Model:
    """Return Gemma 4 E2B with a vocabulary of 32,000, an eighth of its own."""
    width, inner, of_layer, vocabulary, num_layers, num_own = 1536, 6144, 256, 32_000, 35, 15
    is_windowed = [layer % 5 != 4 for layer in range(num_layers)]
    norms = ("post_attention_norm", "post_ffw_norm", "post_norm")
    behind = {"inp_gate": (of_layer, width), "proj": (width, of_layer), "layer_output_scale": (1,)}
    layers = list[Shapes]()
    for layer, windowed in enumerate(is_windowed):
        own = attention(width, 8, 1, 256 if windowed else 512)
        read = own if layer < num_own else {name: own[name] for name in own if name[:6] not in ("attn_k", "attn_v")}
        wide = feed_forward(width, inner * (1 + (layer >= num_own)))
        layers.append({**read, **wide, **dict.fromkeys(norms, (width,)), **behind})
    metadata = sizes(width, inner, 8, 1, 512) | {
        "context_length": 131_072, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "rope.dimension_count": 512,
        "rope.dimension_count_swa": 256, "attention.key_length_swa": 256, "attention.value_length_swa": 256,
        "attention.sliding_window": 512, "attention.sliding_window_pattern": is_windowed,
        "attention.shared_kv_layers": num_layers - num_own, "embedding_length_per_layer_input": of_layer,
        "feed_forward_length": [inner * (1 + (layer >= num_own)) for layer in range(num_layers)],
        "final_logit_softcapping": 30.0, "vocab_size": vocabulary,
    }  # fmt: skip
    ends = {
        "token_embd": (vocabulary, width), "output_norm": (width,), "rope_freqs": (256,),
        "per_layer_token_embd": (vocabulary, num_layers * of_layer), "per_layer_proj_norm": (of_layer,),
        "per_layer_model_proj": (num_layers * of_layer, width),
    }  # fmt: skip
    return Model("gemma4", metadata, layers, ends, Q8_0)


def sizes(width: int, inner: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Value]:
    """Return the keys that all have."""
    return {
        "embedding_length": width, "feed_forward_length": inner, "attention.head_count": heads,
        "attention.head_count_kv": kv_heads, "attention.key_length": head_dim, "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip


MODELS = {
    "qwen3-30b-a3b": qwen3_30b_a3b, "qwen3.5-0.8b": qwen3_5_0_8b, "lfm2-1.2b": lfm2_1_2b, "gemma4-e2b": gemma4_e2b,
}  # fmt: skip


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor."""
    block_size, block_bytes = GGML_QUANT_SIZES[tensor.type]
    return int(np.prod(tensor.shape)) // block_size * block_bytes


def blocks(count: int, kind: GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """Return `count` random blocks, [count, bytes of a block] uint8."""
    block = np.frombuffer(rng.bytes(count * GGML_QUANT_SIZES[kind][1]), np.uint8).reshape(count, -1).copy()
    if kind == Q4_0:  # float16 scale, 32 nibbles of -8 to 7 with a standard deviation of 4.61
        scales = (STD / 4.61 * rng.choice([-1, 1], count)).astype(np.float16)
        block[:, :2] = scales[:, None].view(np.uint8)
    elif kind == Q8_0:  # float16 scale, 32 bytes of -128 to 127 with a standard deviation of 73.9
        block[:, :2] = np.full((count, 1), STD / 73.9, np.float16).view(np.uint8)
    else:  # Q6_K: 192 bytes of 6-bit elements (standard deviation 18.5), 16 int8 scales, one float16 scale
        block[:, 192:208] = rng.integers(16, 48, (count, 16), dtype=np.uint8)
        block[:, 208:210] = np.full((count, 1), STD / 18.5 / 32, np.float16).view(np.uint8)
    return block


def floats(tensor: Tensor, rng: np.random.Generator) -> np.ndarray:
    """Return the elements of a float32 tensor: norms of ones, decays below 0."""
    if len(tensor.shape) > 1:
        return rng.standard_normal(tensor.shape, np.float32) * STD
    return np.full(tensor.shape, -1 if tensor.name.endswith(UNSUFFIXED) else 1, np.float32)


def write_tensor(
    writer: GGUFWriter, tensor: Tensor, pools: dict[GGMLQuantizationType, np.ndarray], rng: np.random.Generator
) -> None:
    """Append a tensor's elements to the file, a chunk at a time; its description has been written."""
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    if tensor.type == F32:
        floats(tensor, rng).tofile(file)
    else:
        left, pool = int(np.prod(tensor.shape)) // GGML_QUANT_SIZES[tensor.type][0], pools[tensor.type]
        start = int(rng.integers(len(pool)))
        while left:
            count = min(left, len(pool) - start)
            pool[start : start + count].tofile(file)
            left, start = left - count, 0
    writer.write_padding(file, num_bytes(tensor))


def describe(writer: GGUFWriter, model: Model, num_layers: int) -> None:
    """Add the metadata."""
    writer.add_name("random")
    writer.add_block_count(num_layers)
    for key, value in model.metadata.items():
        name = f"{model.architecture}.{key}"
        if isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            per_layer = len(value) == len(model.layers)
            writer.add_array(name, list(value)[:num_layers] if per_layer else list(value))
    vocabulary = model.ends["token_embd"][0]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["0", ",", *(f"{number}," for number in range(vocabulary - 2))])
    writer.add_token_types([1] * vocabulary)
    writer.add_token_merges(["0 ,"])
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_0 if model.type == Q4_0 else LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(2)


def main(
    path: Path, layers: Annotated[int | None, typer.Option(min=1, help="default: all")] = None,
    model: Annotated[str, typer.Option(help=", ".join(MODELS))] = "qwen3-30b-a3b",
) -> None:  # fmt: skip
    """Write the file."""
    shape = MODELS[model]()
    num_layers = min(layers or len(shape.layers), len(shape.layers))
    writer = GGUFWriter(None, shape.architecture)
    describe(writer, shape, num_layers)
    tensors = list(shape.tensors(num_layers))
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), num_bytes(tensor), raw_dtype=tensor.type
        )
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    kinds = {tensor.type for tensor in tensors} - {F32}
    pools = {kind: blocks(CHUNK_BYTES // GGML_QUANT_SIZES[kind][1], kind, rng) for kind in sorted(kinds)}
    for tensor in tensors:
        write_tensor(writer, tensor, pools, rng)
    writer.fout[0].close()


if __name__ == "__main__":
    typer.run(main)
