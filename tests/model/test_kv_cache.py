"""The tensors of the cache: shapes, zeros, and memory that is taken only where it is used."""

import resource

import pytest
import torch

from quire.kernels.back_end import TORCH
from quire.model.config import spec_from_config
from quire.model.footprint import kv_bytes_per_token
from quire.model.kv_cache import ALIGNMENT, KVCache

SPEC = spec_from_config(
    {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    }
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cache_is_one_zeroed_aligned_tensor_per_layer_for_keys_and_for_values(dtype: torch.dtype) -> None:
    cache = KVCache.allocate(SPEC, 5, 16, dtype, TORCH)
    assert len(cache.keys) == len(cache.values) == 3
    for tensor in (*cache.keys, *cache.values):
        assert tensor.shape == (5, 16, 2, 8)
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT == 0
        assert not tensor.any()
    assert sum(t.nbytes for t in (*cache.keys, *cache.values)) == 5 * 16 * kv_bytes_per_token(SPEC, dtype.itemsize)


def test_empty_cache_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = KVCache.allocate(SPEC, 1 << 18, 16, torch.float32, TORCH)
    nominal_kib = sum(t.nbytes for t in (*cache.keys, *cache.values)) // 1024
    assert nominal_kib > 1 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < nominal_kib // 20
