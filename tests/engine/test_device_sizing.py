"""Sizes of an engine on a GPU, from the memory of the card and of the host."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.core.config import CacheConfig
from quire.core.errors import ConfigError
from quire.engine import device_sizing
from quire.engine.options import EngineOptions
from quire.engine.sizing import ModelLimits
from quire.execution.memory_profiling import CudaMemoryMeter
from quire.model.decoder import Decoder
from quire.model.kv_geometry import KVGeometry, LayerKV

GIB = 1 << 30
LIMITS = ModelLimits(max_position_embeddings=8192, kv_bytes_per_token=128 * 1024, sliding_window=None)
BLOCK_BYTES = 16 * LIMITS.kv_bytes_per_token
MODEL = cast(Decoder, SimpleNamespace(kv_geometry=KVGeometry((LayerKV(8, 128, "bfloat16"),) * 32)))


def cache_config(monkeypatch: pytest.MonkeyPatch, host_bytes: int, **asked: int | str) -> CacheConfig:
    monkeypatch.setattr(device_sizing, "available_kv_bytes", lambda *sizes: 40 * GIB)
    monkeypatch.setattr(device_sizing, "free_memory_bytes", lambda: host_bytes)
    options = EngineOptions(device="cuda", **asked)  # type: ignore[arg-type]
    return device_sizing.configs_for(options, LIMITS, MODEL, cast(CudaMemoryMeter, object()))[0]


@pytest.mark.parametrize(
    ("host_bytes", "swap_bytes"), [(64 * GIB, 4 * GIB), (8 * GIB, 4 * GIB), (3 * GIB, 3 * GIB // 2), (0, 0)]
)
def test_default_swap_space_is_at_most_half_of_the_hosts_free_memory(
    host_bytes: int, swap_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_config(monkeypatch, host_bytes).num_swap_blocks == swap_bytes // BLOCK_BYTES


@pytest.mark.parametrize("asked", [{"swap_space": "4GiB"}, {"num_swap_blocks": 2048}], ids=str)
def test_swap_space_that_was_asked_for_and_does_not_fit_is_refused(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_config(monkeypatch, 5 * GIB, **asked).num_swap_blocks == 2048
    with pytest.raises(ConfigError, match=r"swap space takes 4294967296 bytes, but only 3221225472 are free"):
        cache_config(monkeypatch, 3 * GIB, **asked)
