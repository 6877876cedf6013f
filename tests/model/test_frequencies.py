"""Scaled rotary frequencies against transformers', up to a last bit."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.model.config import spec_from_config
from quire.model.rope import inverse_frequencies

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


def assert_same_as_transformers(config: dict[str, object], longest: int) -> None:
    """Assert the frequencies of transformers for a sequence of `longest` positions, but for last bits of a few.

    Powers are rounded once, and PyTorch's in float32 are a last bit off themselves; a divisor can make two of one.
    """
    rotary = spec_from_config(config).rotary
    assert rotary is not None
    embedding = LlamaRotaryEmbedding(LlamaConfig(**config))
    embedding(torch.zeros(1), torch.tensor([[longest - 1]]))  # lets frequencies follow the length
    expected, found = embedding.inv_freq.numpy(), inverse_frequencies(rotary, longest)
    np.testing.assert_array_max_ulp(found, expected, maxulp=2)
    assert np.count_nonzero(found != expected) <= len(expected) // 16
    assert rotary.scale == pytest.approx(embedding.attention_scaling, rel=1e-7)


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    scaling, longest = SCALINGS[name]
    config = QWEN | {"rope_parameters": {"rope_theta": 1e6, **scaling}}
    assert spec_from_config(config).max_position_embeddings == longest
    assert_same_as_transformers(config, longest)


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
    assert_same_as_transformers(config, 8192)
