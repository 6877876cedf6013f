"""Memory profiling: bytes available to the KV cache after the largest steps."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.core.errors import ConfigError
from quire.engine.adapters.store import make_slots
from quire.engine.options import EngineOptions
from quire.execution.cuda.cuda_graphs import MIXED_TOKENS, GraphSizes, dummy_batch
from quire.execution.cuda.memory_profiling import GRAPHS_SHARE, CudaMemoryMeter, available_kv_bytes
from quire.kernels.choice import cuda_back_end
from quire.kernels.reference.back_ends import REFERENCE
from quire.kernels.sampling import SETTINGS
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.loader import load_model
from support.random_model import write_random_model
from support.triton_compiler import specialized_launches

GIB = 1 << 30
FEW_ROWS = [16, 32, 64]  # each has tiles of its own


class FakeMeter(CudaMemoryMeter):
    """A card of 10 GiB on which weights take 1, the largest step 3 more, and decodes a half."""

    def __init__(self, free_bytes: int = 10 * GIB) -> None:
        self._free_bytes = free_bytes
        self._peaks = [4 * GIB, 3 * GIB // 2]

    def reset_peak(self) -> int:
        return GIB

    def peak_bytes(self) -> int:
        return self._peaks.pop(0)

    def free_and_total_bytes(self) -> tuple[int, int]:
        return self._free_bytes, 10 * GIB


@pytest.fixture
def model(tmp_path: Path) -> Decoder:
    return load_model(write_random_model(tmp_path), back_end=REFERENCE)


def test_share_of_the_card_less_the_peak_is_left(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, torch.Size]] = []
    forward = Decoder.forward

    def counting(self: Decoder, batch: object, cache: object) -> torch.Tensor:
        steps.append((len(batch.token_ids), batch.block_tables.shape))  # type: ignore[attr-defined]
        return forward(self, batch, cache)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "forward", counting)
    kept_back = int(10 * GIB * GRAPHS_SHARE)
    assert available_kv_bytes(model, 4, 90, 640, 16, 0.9, FakeMeter()) == 9 * GIB // 2 - kept_back
    sizes = [(90, torch.Size([4, 40])), (4, torch.Size([4, 40])), (MIXED_TOKENS[-1], torch.Size([8, 40]))]
    sizes += [(count, torch.Size([4, 40])) for count in FEW_ROWS] + [(1, torch.Size([1, 1]))]
    assert steps == sizes, "scratch memory goes by the widest table"
    steps.clear()
    assert available_kv_bytes(model, 4, 90, 640, 16, 0.9, FakeMeter(), None, GraphSizes((6, 80), (6, 80))) > 0
    assert steps[1:3] == [(6, torch.Size([6, 40])), (80, torch.Size([8, 40]))], "of the sizes that graphs will have"
    steps.clear()
    assert available_kv_bytes(model, 4, 90, 640, 16, 0.9, FakeMeter(), None, GraphSizes((), ())) > 0
    assert len(steps) == 2 + len(FEW_ROWS), "no graph"


@pytest.mark.parametrize(("is_exact", "counts"), [(False, [300, *FEW_ROWS, 1]), (True, [300, 64, 128, 256, 1])])
def test_each_tile_of_products_is_tried(
    is_exact: bool, counts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(write_random_model(tmp_path), back_end=replace(REFERENCE, is_exact=is_exact))
    steps, forward = list[int](), Decoder.forward
    monkeypatch.setattr(
        Decoder, "forward", lambda self, batch, cache: steps.append(len(batch.token_ids)) or forward(self, batch, cache)
    )
    available_kv_bytes(model, 4, 300, 640, 16, 0.9, FakeMeter(), None, GraphSizes((), ()))
    assert steps == counts


@pytest.mark.parametrize(
    ("block_size", "dtype", "max_loras", "is_exact"),
    [(8, "float32", 0, False), (16, "bfloat16", 0, False), (16, "float16", 2, False), (16, "bfloat16", 0, True)],
)
def test_no_request_waits_for_a_kernel_to_be_compiled(
    tmp_path: Path, block_size: int, dtype: str, max_loras: int, is_exact: bool
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    with specialized_launches() as kernels:
        model = load_model(write_random_model(tmp_path), dtype=dtype, back_end=cuda_back_end(is_exact=is_exact))
        options = EngineOptions(model=str(tmp_path), enable_lora=True, max_loras=max(1, max_loras))
        slots = make_slots(options, model) if max_loras else None
        available_kv_bytes(model, 4, 90, 640, block_size, 0.9, FakeMeter(), slots)
        tried = kernels.copy()
        cache = KVCache.allocate(model.kv_geometry, 40, block_size, model.back_end)
        for num_seqs, num_tokens in ((1, 1), (3, 3), (4, 12), (4, 20), (2, 50)):
            for own in {None, slots}:
                hidden = model.forward(dummy_batch(num_seqs, num_tokens, 5, model.device, own), cache)
            logits = model.logits(hidden[:num_seqs])
            model.back_end.sampling.mask_logits(logits, np.arange(num_seqs), np.ones((num_seqs, 10), np.uint32))
            model.back_end.sampling.choose_tokens(logits, np.ones(num_seqs, SETTINGS))
        blocks = np.arange(16)
        for caches in (cache.keys + cache.values, cache.values + cache.keys):  # a copy, and a swap
            model.back_end.copy_blocks(cache.keys + cache.values, caches, blocks, blocks + 16)
    assert kernels == tried


def test_rank_that_does_not_sample_has_its_share_too(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: logits(self, hidden)[:0])
    assert available_kv_bytes(model, 4, 90, 640, 16, 0.9, FakeMeter()) > 0


def test_what_others_hold_is_not_given_away(model: Decoder) -> None:
    assert available_kv_bytes(model, 2, 8, 64, 16, 0.9, FakeMeter(free_bytes=GIB)) == GIB


def test_card_too_small_for_the_largest_step_is_refused(model: Decoder) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization of 0.3 is 3221225472 bytes, but .* take 4831838208"):
        available_kv_bytes(model, 2, 8, 64, 16, 0.3, FakeMeter())
