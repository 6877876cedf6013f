"""Memory profiling: the bytes of a GPU that are available to the KV cache, measured by running the largest step.

Measured is this engine's own peak, never the whole card's use: another engine, in this process or another one, may
start or stop meanwhile.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.execution.cuda.cuda_graphs import USUAL_SIZES, GraphSizes, dummy_batch, dummy_settings
from quire.execution.cuda.cuda_memory import device_allocator
from quire.kernels.sampling import SETTINGS, num_words
from quire.kernels.triton.few_rows import TILES
from quire.model.kv_cache import KVCache
from quire.model.language_model import LanguageModel

if TYPE_CHECKING:
    from quire.kernels.triton.triton_low_rank import TritonSlots

# Beside what torch's allocator counts: the capturing stream's cuBLAS workspace (32 MiB) and the driver's copies of the
# graphs, some MiB for each of up to 20 sizes. An estimate, not measured yet; a small card keeps back a smaller part.
GRAPHS_BYTES, GRAPHS_SHARE = 256 << 20, 0.02


class CudaMemoryMeter:
    """Meter of the bytes that torch's allocator has reserved since construction, before the weights are loaded."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._held_before = device, 0
        self._held_before = self.reset_peak()

    def reset_peak(self) -> int:
        """Free the allocator's reserve, reset the peak, and return its new value."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return self.peak_bytes()

    def peak_bytes(self) -> int:
        """Return the most bytes reserved since the last reset."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - self._held_before

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Return the bytes of the card that no process holds, and its size."""
        return torch.cuda.mem_get_info(self._device)


@torch.inference_mode()
def available_kv_bytes(
    model: LanguageModel,
    num_seqs: int,
    num_tokens: int,
    max_model_len: int,
    block_size: int,
    utilization: float,
    meter: CudaMemoryMeter,
    slots: "TritonSlots | None" = None,
    sizes: GraphSizes = USUAL_SIZES,
) -> int:
    """Return the bytes that `utilization` of the device leaves after weights and the largest step. ConfigError if none.

    The largest step has `num_tokens` tokens of `num_seqs` sequences with contexts of up to `max_model_len` tokens. CUDA
    graphs keep the memory of the largest one of `sizes`. Every kernel that a request could wait for is compiled here.
    slots: of adapters, which are weights; None: no row has one.
    """
    cache = KVCache.allocate(model.kv_geometry, 2, block_size, model.back_end, device_allocator(model.device))
    max_blocks, num_seqs = -(-max_model_len // block_size), min(num_seqs, num_tokens)
    model.back_end.copy_blocks(cache.tensors, cache.tensors, np.array([0]), np.array([1]))
    meter.reset_peak()
    largest = dummy_batch(num_seqs, num_tokens, max_blocks, model.device, slots)
    logits = model.logits(model.forward(largest, cache)[:num_seqs])
    if len(logits):  # else of a rank that does not sample
        draws = np.ones(len(logits), SETTINGS)
        model.back_end.sampling.choose_tokens(logits.clone(), draws)  # edits need a second copy
    del largest, logits
    peak_bytes = meter.peak_bytes()
    held_bytes = meter.reset_peak()
    for size in sizes.largest(num_seqs):  # graphs share their memory
        hidden = model.forward(dummy_batch(size.num_rows, size.num_tokens, max_blocks, model.device, slots), cache)
        _draw_as_graphs_do(model, hidden[: size.num_rows])
        del hidden
    peak_bytes += meter.peak_bytes() - held_bytes
    _compile_other_kernels(model, cache, num_seqs, num_tokens, max_blocks, slots)
    meter.reset_peak()
    free_bytes, total_bytes = meter.free_and_total_bytes()
    left = int(total_bytes * utilization) - peak_bytes - min(GRAPHS_BYTES, int(total_bytes * GRAPHS_SHARE))
    if left <= 0:
        raise ConfigError(
            f"gpu_memory_utilization of {utilization} is {int(total_bytes * utilization)} bytes, but weights "
            f"and the largest step take {peak_bytes}; raise it, or lower max_num_batched_tokens or max_num_seqs"
        )
    return min(left, free_bytes)


def _draw_as_graphs_do(model: LanguageModel, hidden: Tensor) -> None:
    """Draw a token for each row of hidden states [num_rows, hidden_size], by settings on the device."""
    logits = model.logits(hidden)
    if len(logits):  # else of a rank that does not sample
        model.back_end.sampling.choose_tokens(logits, dummy_settings(len(logits), model.device))


def _compile_other_kernels(
    model: LanguageModel, cache: KVCache, num_seqs: int, num_tokens: int, max_blocks: int, slots: "TritonSlots | None"
) -> None:
    """Run steps with kernels that the largest step does not launch: of one row, without adapters, with a token mask.

    Few rows have fused products, in tiles by their number; so does attention over a table of one block. The products
    of exact back ends have tiles for about each doubling of the rows.
    """
    counts = [tile.max_rows for tile in TILES[1:] if tile.max_rows < num_tokens]
    if model.back_end.is_exact:
        counts = [64 << i for i in range((num_tokens - 1).bit_length() - 6)]
    for own in (None,) if slots is None else (None, slots):
        for count in counts:
            rows = min(count, num_seqs)
            model.logits(model.forward(dummy_batch(rows, count, max_blocks, model.device, own), cache)[:rows])
        logits = model.logits(model.forward(dummy_batch(1, 1, 1, model.device, own), cache))
    if slots is not None:
        model.forward(dummy_batch(num_seqs, num_tokens, max_blocks, model.device), cache)
    nothing = np.zeros((1, num_words(logits.shape[1])), np.uint32)
    if len(logits):
        model.back_end.sampling.mask_logits(logits, np.zeros(1, np.int64), nothing)
