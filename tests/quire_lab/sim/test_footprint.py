"""What a model takes, counted from its config, is what the loaded one takes, for every family."""

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from quire.core.errors import ConfigError
from quire.kernels.choice import choose_back_end
from quire.model.config import expert_reads, num_layer_weights, num_parameters, spec_from_config
from quire.model.loader import load_model
from quire.model.quantization import (
    ONLINE_METHODS,
    WHOLE_ROW,
    Method,
    Quantization,
    QuantizationOptions,
    WeightScheme,
    resolve,
)
from quire.model.sharding import Mode, Shard
from quire_lab.sim.footprint import CPU_PACKING, PLAIN_PACKING, weight_bytes
from support.zero_model import FAMILIES, spec_of, write_zero_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_count_is_the_loaded_models(tmp_path: Path, name: str, dtype: str) -> None:
    spec = spec_of(name)
    back_end = choose_back_end(torch.device("cpu"), head_dim=spec.head_dim)
    if back_end.name != "cpp":
        pytest.skip("the C++ kernels were not built")
    decoder = load_model(write_zero_model(tmp_path, name, dtype), back_end=back_end)
    assert num_parameters(spec) == decoder.num_parameters
    assert weight_bytes(spec, dtype, CPU_PACKING) == decoder.weight_bytes


@pytest.mark.parametrize("group_size", [WHOLE_ROW, 32, 64, 128])
@pytest.mark.parametrize("method", ONLINE_METHODS)
@pytest.mark.parametrize("name", FAMILIES)
def test_count_is_the_loaded_models_with_quantized_weights(
    tmp_path: Path, name: str, method: Method, group_size: int
) -> None:
    spec = spec_of(name)
    back_end = choose_back_end(torch.device("cpu"), head_dim=spec.head_dim)
    if back_end.name != "cpp":
        pytest.skip("the C++ kernels were not built")
    quantization = resolve(QuantizationOptions(method, group_size), "config.json")
    decoder = load_model(write_zero_model(tmp_path, name, "bfloat16"), back_end=back_end, quantization=quantization)
    assert num_parameters(spec) == decoder.num_parameters
    assert weight_bytes(spec, "bfloat16", CPU_PACKING, quantization=quantization) == decoder.weight_bytes


def test_model_without_a_head_has_no_parameters_of_it() -> None:
    bert: dict[str, object] = {
        "architectures": ["BertModel"], "vocab_size": 99, "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 1, "num_attention_heads": 6, "max_position_embeddings": 32, "type_vocab_size": 2,
    }  # fmt: skip
    tables, layer = 48 * (99 + 32 + 2), 4 * (48 * 48 + 48) + 2 * 48 * 80 + 48 + 80
    assert num_parameters(spec_from_config(bert)) == tables + layer + 3 * 2 * 48


def test_ranks_hold_a_part_each_and_norms_whole() -> None:
    spec = spec_of("Llama", hidden_size=256, head_dim=32, num_attention_heads=8, intermediate_size=512, vocab_size=512)
    alone, tables = weight_bytes(spec, "float32"), 4 * 512 * 256
    for mode in get_args(Mode):
        first, second = (weight_bytes(spec, "float32", shard=Shard(rank, 2, mode)) for rank in range(2))
        norms = 4 * 256 * (2 * spec.num_layers + 1)
        assert first == second == (alone - tables - norms) // 2 + tables + norms


def test_tied_head_is_its_table_but_in_float16_on_a_cpu() -> None:
    tied, own = spec_of("Qwen3"), spec_of("Qwen3", tie_word_embeddings=False)
    assert weight_bytes(own, "float16", PLAIN_PACKING) - weight_bytes(tied, "float16", PLAIN_PACKING) == 2 * 301 * 72
    assert weight_bytes(own, "float32", CPU_PACKING) - weight_bytes(tied, "float32", CPU_PACKING) == 4 * 301 * 72
    assert weight_bytes(own, "float16", CPU_PACKING) == weight_bytes(tied, "float16", CPU_PACKING)


def test_format_without_sizes_is_refused_by_name() -> None:
    unknown = Quantization("own", WeightScheme("q4_K"))
    with pytest.raises(ConfigError, match="weight format q4_K is not supported yet; known are dense, int8"):
        weight_bytes(spec_of("Llama"), "bfloat16", quantization=unknown)


@pytest.mark.parametrize(("method", "bits"), [("int8", 8 + 32 / 128), ("int4", 4 + 32 / 128)])
def test_quantized_layers_take_their_bits_and_a_scale_for_each_group(method: Method, bits: float) -> None:
    spec = spec_of("Llama", hidden_size=256, head_dim=32, num_attention_heads=8, intermediate_size=512, vocab_size=512)
    quantization = resolve(QuantizationOptions(method), "config.json")
    plain, found = weight_bytes(spec, "bfloat16"), weight_bytes(spec, "bfloat16", quantization=quantization)
    head_bits = 8 + 32 / 128
    saved = num_layer_weights(spec) * (16 - bits) / 8 + 512 * 256 * (16 - head_bits) / 8
    assert plain - found == saved


def test_token_reads_its_experts_alone() -> None:
    spec = spec_of("Qwen2Moe", num_experts=64, num_experts_per_tok=4)
    one = 3 * spec.hidden_size * 40  # weights of an expert
    shared = spec_of("Qwen2Moe", num_experts=4, num_experts_per_tok=4)
    assert num_layer_weights(spec) - num_layer_weights(shared) == 60 * spec.hidden_size * len(spec.layers)  # routers
    reads = expert_reads(spec)
    assert reads is not None
    assert reads[:2] == (64, 4)
    assert reads.num_weights == num_layer_weights(spec) + spec.vocab_size * spec.hidden_size
    assert reads.share == pytest.approx(4 * one * len(spec.layers) / reads.num_weights)
    assert expert_reads(spec_of("Llama")) is None
    factors = reads.weights(np.array([1, 5, 10**6]))
    assert factors[0] == pytest.approx(1)
    assert 1 < factors[1] < 1 + 4 * reads.share
    assert factors[2] == pytest.approx(1 + 15 * reads.share)


def test_bytes_of_one_token_are_those_that_it_reads() -> None:
    spec = spec_of("Mixtral", hidden_size=64, intermediate_size=96, num_local_experts=8, num_experts_per_tok=2)
    whole, read = weight_bytes(spec, "bfloat16"), weight_bytes(spec, "bfloat16", of_one_token=True)
    idle = 6 * 3 * 64 * 96 * len(spec.layers)
    assert whole - read == 2 * (idle + spec.vocab_size * spec.hidden_size)
