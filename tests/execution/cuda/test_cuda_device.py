"""Device CUDA: the swap space by the memory of the host, and the executor with all parts of the worker."""

from types import SimpleNamespace
from typing import Any

import pytest

from quire.core.config import CacheConfig
from quire.core.errors import ConfigError
from quire.engine.options import EngineOptions
from quire.engine.sizing import ModelLimits, size_engine
from quire.execution.cuda import cuda_device
from quire.execution.cuda.cuda_device import CudaDevice
from quire.execution.cuda.cuda_graphs import GraphSizes
from quire.kernels.reference.back_ends import REFERENCE
from quire.model.kv_cache import KVCache, KVGeometry, LayerKV

GIB = 1 << 30
LIMITS = ModelLimits(max_position_embeddings=8192, kv_bytes_per_token=128 * 1024, sliding_window=None)
BLOCK_BYTES = 16 * LIMITS.kv_bytes_per_token
GEOMETRY = KVGeometry((LayerKV(8, 128, "bfloat16"),) * 32)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """A device without a GPU; what its constructor asks torch.cuda is left out."""
    monkeypatch.setattr(CudaDevice, "__init__", lambda self: None)
    made = CudaDevice()  # type: ignore[call-arg]
    made._captures_graphs, made._sizes = False, GraphSizes()
    return made


def cache_config(device: CudaDevice, **asked: int | str) -> CacheConfig:
    options = EngineOptions(device="cuda", **asked)  # type: ignore[arg-type]
    return size_engine(options, LIMITS, 40 * GIB, device.kv_share, device.default_swap_bytes())[0]


@pytest.mark.parametrize(
    ("host_bytes", "swap_bytes"), [(64 * GIB, 4 * GIB), (8 * GIB, 4 * GIB), (3 * GIB, 3 * GIB // 2), (0, 0)]
)
def test_default_swap_space_is_at_most_half_of_the_hosts_free_memory(
    host_bytes: int, swap_bytes: int, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_device, "free_memory_bytes", lambda: host_bytes)
    assert cache_config(device).num_swap_blocks == swap_bytes // BLOCK_BYTES
    assert cache_config(device, memory_policy="contiguous-max").num_swap_blocks == 0


@pytest.mark.parametrize("asked", [{"swap_space": "4GiB"}, {"num_swap_blocks": 2048}], ids=str)
def test_swap_space_that_was_asked_for_and_does_not_fit_is_refused(
    asked: dict[str, Any], device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_device, "free_memory_bytes", lambda: 3 * GIB)
    num_blocks = cache_config(device, **asked).num_swap_blocks
    assert num_blocks == 2048
    with pytest.raises(ConfigError, match=r"swap space takes 4294967296 bytes, but only 3221225472 are free"):
        device.swapper(KVCache([], [], 16), GEOMETRY, num_blocks, REFERENCE, None)


@pytest.mark.parametrize("drafter", [None, object()])
def test_worker_has_all_that_the_engine_was_built_with(
    drafter: object, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests that interpret kernels build the worker themselves."""
    monkeypatch.setattr(cuda_device, "CudaWorker", lambda *parts: parts)
    monkeypatch.setattr(cuda_device, "AsyncCudaExecutor", lambda worker, **how: (worker, how))
    compute: Any = SimpleNamespace(drafter=drafter)
    found: Any = device.executor(compute, max_num_batched_tokens=16)
    assert found == ((compute, device._sizes), {"max_steps_in_flight": 2 if drafter is None else 1})
