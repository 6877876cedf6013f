"""Scaled rotary frequencies against transformers', at positions beyond the original length."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.kernels.reference.kv_cache_write import POSITIONS_AT_ONCE, rotary_table
from quire.model.config import spec_from_config
from quire.model.frequencies import inverse_frequencies

QWEN = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 256, "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32_768,
}  # fmt: skip
SCALINGS = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, 131_072),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 131_072),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
        32_768,
    ),
}  # fmt: skip


def reference(config: dict[str, object], positions: Tensor) -> Tensor:
    """Return transformers' cosines and sines of positions, once for each pair of dimensions."""
    embedding = LlamaRotaryEmbedding(LlamaConfig(**config))
    cos, sin = (x[0, :, : x.shape[2] // 2] for x in embedding(torch.zeros(1), positions[None]))
    return torch.cat([cos, sin], dim=-1)


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers_up_to_the_last_position(name: str) -> None:
    scaling, longest = SCALINGS[name]
    config = QWEN | {"rope_parameters": {"rope_theta": 1e6, **scaling}}
    spec = spec_from_config(config)
    assert spec.rotary is not None
    assert spec.max_position_embeddings == longest
    table = rotary_table(inverse_frequencies(spec.rotary, longest), longest, spec.rotary.scale)
    positions = torch.cat([torch.arange(0, longest, 997), torch.arange(longest - 50, longest)])  # the last one included
    torch.testing.assert_close(table[positions], reference(config, positions), rtol=0, atol=1e-6)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
LONG = {
    "rope_type": "longrope", "original_max_position_embeddings": 8192,
    "short_factor": [1.0 + pair / 64 for pair in range(64)], "long_factor": [2.0 + pair / 8 for pair in range(64)],
}  # fmt: skip
YARN_OPTIONS = ("truncate", "factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")


@pytest.mark.parametrize(
    "options",
    [
        *(YARN | {key: None} for key in YARN_OPTIONS),
        YARN | {"truncate": False}, YARN | {"truncate": True}, YARN | {"truncate": None, "factor": None},
        YARN | {"mscale": 0.7, "mscale_all_dim": None}, YARN | {"rope_theta": 2e4, "truncate": None},
        LONG | {"factor": None}, LONG | {"attention_factor": None},
        SCALINGS["linear"][0] | {"original_max_position_embeddings": None},
        {"rope_type": "default", "factor": None},
    ],
    ids=lambda options: ", ".join(f"{key} {value}" for key, value in options.items() if not isinstance(value, list)),
)  # fmt: skip
def test_null_means_what_it_means_in_transformers(options: dict[str, object]) -> None:
    config = QWEN | {"rope_parameters": {"rope_theta": 1e6, **options}}
    spec = spec_from_config(config)
    assert spec.rotary is not None
    frequencies, scale = inverse_frequencies(spec.rotary, 8192), spec.rotary.scale
    table = rotary_table(frequencies, 8192, scale)
    positions = torch.arange(0, 8192, 409)
    torch.testing.assert_close(table[positions], reference(config, positions), rtol=0, atol=1e-6)


def test_table_made_in_parts_has_the_bits_of_one_made_at_once() -> None:
    frequencies = 10000.0 ** (-torch.arange(0, 24, 2).float() / 24)
    count = 2 * POSITIONS_AT_ONCE + 7
    angles = torch.outer(torch.arange(count).float(), frequencies)
    assert torch.equal(rotary_table(frequencies, count, 1.5), torch.cat([angles.cos(), angles.sin()], dim=-1) * 1.5)
