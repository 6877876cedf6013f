"""How much of a GPU is left for the KV cache: what the largest step needs is tried out before anything is promised.

What counts is the memory that this process has taken at its peak, never what the whole card shows: another engine on
the same card may come and go meanwhile.
"""

from typing import Protocol

import torch

from quire.core.errors import ConfigError
from quire.model.batch import ForwardBatch
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache


class MemoryMeter(Protocol):
    """Counts bytes of one device."""

    def forget(self) -> None:
        """Give back what is held in reserve, and let the peak begin anew."""

    def peak_bytes(self) -> int:
        """Return the most that this process has held since then."""

    def total_bytes(self) -> int:
        """Return what the device has."""

    def free_bytes(self) -> int:
        """Return what nobody holds now."""


class CudaMeter:
    """The `MemoryMeter` of a GPU, by torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def forget(self) -> None:
        """Give back what is held in reserve, and let the peak begin anew."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Return the most that torch has reserved since then."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)

    def total_bytes(self) -> int:
        """Return the memory of the card."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free_bytes(self) -> int:
        """Return what no process holds."""
        return torch.cuda.mem_get_info(self._device)[0]


def bytes_left(
    model: Decoder, num_seqs: int, num_tokens: int, max_model_len: int, utilization: float, meter: MemoryMeter
) -> int:
    """Return what `utilization` of the device leaves beside weights and the largest steps. ConfigError if nothing.

    Those are a step of `num_tokens` tokens, and one of `num_seqs` decodes whose contexts may have `max_model_len`.
    """
    meter.forget()
    cache = KVCache.allocate(model.spec, 1, 8, model.dtype, model.back_end, lambda n: _zeros(n, model.device))
    _run(model, cache, num_seqs, num_tokens, 8)
    _run(model, cache, num_seqs, num_seqs, max_model_len)
    peak_bytes = meter.peak_bytes()
    del cache
    meter.forget()
    left = int(meter.total_bytes() * utilization) - peak_bytes
    if left <= 0:
        raise ConfigError(
            f"gpu_memory_utilization of {utilization} is {int(meter.total_bytes() * utilization)} bytes, but weights "
            f"and the largest step take {peak_bytes}; raise it, or lower max_num_batched_tokens or max_num_seqs"
        )
    return min(left, meter.free_bytes())


@torch.inference_mode()
def _run(model: Decoder, cache: KVCache, num_seqs: int, num_tokens: int, max_context_len: int) -> None:
    """Run a step that writes nothing: its tokens are evenly spread, its decodes see nothing."""
    num_seqs, device = min(num_seqs, num_tokens), model.device
    query_starts = torch.linspace(0, num_tokens, num_seqs + 1).int()
    is_decode = num_tokens == num_seqs
    context_lens = torch.zeros(num_seqs, dtype=torch.int32) if is_decode else query_starts.diff()
    width = -(-max(max_context_len, int(context_lens.max())) // cache.block_size)
    batch = ForwardBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        slot_mapping=torch.full((num_tokens,), -1, device=device),
        query_starts=query_starts.to(device),
        context_lens=context_lens.int().to(device),
        block_tables=torch.zeros(num_seqs, width, dtype=torch.int32, device=device),
    )
    logits = model.logits(model.forward(batch, cache)[:num_seqs])
    model.back_end.sampling.argmax(logits.clone())  # edits need a second copy


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
